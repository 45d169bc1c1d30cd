"""admit: whole prompts or nothing, class order, bounded bypass, no deadlock (serving.md 2.6, C47)."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefill_engine.admission import (
    AdmissionDecision,
    AdmissionState,
    BlockedHead,
    PoolView,
    WaitingAttempt,
    admit,
)
from prefill_plan.config import KvConfig

CONFIG = KvConfig()


def waiting(name: str, blocks: int, *, priority: int = 1, arrival: float = 0.0, pinned: int = 0) -> WaitingAttempt:
    """An attempt that needs blocks in all; the last one is not full."""
    return WaitingAttempt(
        attempt_id=name.encode(),
        priority=priority,
        arrival_seconds=arrival,
        prompt_tokens=blocks * 128 - 5,
        pinned_hit_blocks=pinned,
    )


def pool(free: int, *, num: int = 1_000, tickets: int = 0, slots: int = 8) -> PoolView:
    return PoolView(
        num_blocks=num, reserve_blocks=num // 100, free_blocks=free, ticket_blocks=tickets, free_state_slots=slots
    )


def decide(
    attempts: list[WaitingAttempt], view: PoolView, *, state: AdmissionState | None = None, now: float = 100.0
) -> AdmissionDecision:
    return admit(attempts, pool=view, state=state or AdmissionState(), config=CONFIG, now=now)


def names(ids: tuple[bytes, ...]) -> list[str]:
    return [each.decode() for each in ids]


@pytest.mark.parametrize(
    ("attempts", "view", "admitted", "stopped_by"),
    [
        pytest.param([], pool(990), [], "", id="nobody"),
        pytest.param([waiting("a", 990)], pool(990), ["a"], "", id="all-but-the-reserve"),
        pytest.param([waiting("a", 100)], pool(99), [], "blocks", id="one-block-short"),
        pytest.param([waiting("a", 100, pinned=1)], pool(99), ["a"], "", id="pinned-hit-counts"),
        pytest.param(
            [waiting("b", 10, arrival=2.0), waiting("a", 10, arrival=1.0), waiting("c", 10, arrival=1.0)],
            pool(990, slots=2),
            ["a", "c"],
            "state_slots",
            id="oldest-first-one-state-slot-each",
        ),
        pytest.param(
            [waiting("s", 10, priority=3), waiting("i", 10, priority=1, arrival=9.0), waiting("n", 10, priority=2)],
            pool(25),
            ["i", "n"],
            "blocks",
            id="classes-before-arrival",
        ),
        pytest.param(
            [waiting("head", 500), waiting("mid", 90, arrival=1.0), waiting("tiny", 20, arrival=2.0)],
            pool(100),
            ["tiny"],
            "blocks",
            id="smallest-passes-a-blocked-head",
        ),
        pytest.param(
            [waiting("head", 500), waiting("low", 20, priority=3)],
            pool(100),
            ["low"],
            "blocks",
            id="lower-class-passes-a-blocked-head",
        ),
        pytest.param([waiting("a", 10)], pool(400, tickets=501), [], "tickets", id="tickets-hold-too-much"),
        pytest.param([waiting("a", 10)], pool(400, tickets=500), ["a"], "", id="tickets-at-the-bound"),
    ],
)
def test_admit_takes_whole_prompts_in_order(
    attempts: list[WaitingAttempt], view: PoolView, admitted: list[str], stopped_by: str
) -> None:
    decision = decide(attempts, view)
    assert (names(decision.admitted), decision.stopped_by, decision.refused) == (admitted, stopped_by, ())
    assert decide(attempts[::-1], view) == decision


def test_prompt_longer_than_the_pool_is_refused_and_blocks_nobody() -> None:
    decision = decide([waiting("giant", 991, pinned=600), waiting("a", 10, arrival=1.0)], pool(390))
    assert names(decision.admitted) == ["a"]
    [(attempt_id, refusal)] = decision.refused
    assert attempt_id == b"giant"
    assert (refusal.reason, refusal.retry, refusal.retry_after_seconds) == ("KV_MEMORY", "OTHER_PE", None)
    assert refusal.message == ("prompt of 126843 tokens needs 991 KV blocks, an empty pool admits 990 of 1000; refused")
    assert decision.state == AdmissionState()


def test_two_giants_run_one_after_the_other() -> None:
    giants = [waiting("a", 600), waiting("b", 600, arrival=1.0)]
    first = decide(giants, pool(990))
    assert names(first.admitted) == ["a"]
    assert names(decide(giants[1:], pool(390), state=first.state).admitted) == []
    assert names(decide(giants[1:], pool(990), state=first.state).admitted) == ["b"]


def test_blocked_head_is_passed_64_times_then_reserved() -> None:
    state, passed = AdmissionState(), 0
    for i in range(100):
        attempts = [waiting("head", 500), waiting(f"s{i}", 10, arrival=1.0)]
        decision = decide(attempts, pool(100), state=state)
        state, passed = decision.state, passed + len(decision.admitted)
    assert passed == 64
    assert state.blocked == (BlockedHead(attempt_id=b"head", priority=1, since_seconds=100.0, bypasses=64),)
    assert names(decide([waiting("head", 500)], pool(500), state=state).admitted) == ["head"]


def test_blocked_head_is_passed_two_seconds_then_reserved() -> None:
    attempts = [waiting("head", 500), waiting("small", 200, arrival=1.0), waiting("low", 10, priority=2)]
    state = decide(attempts, pool(5), now=100.0).state
    assert names(decide(attempts, pool(10), state=state, now=101.9).admitted) == ["low"]
    assert names(decide(attempts, pool(300), state=state, now=102.0).admitted) == []
    assert names(decide(attempts, pool(700), state=state, now=102.0).admitted) == ["head", "small"]


def test_higher_class_goes_before_a_reserved_head_of_a_lower_one() -> None:
    attempts = [waiting("low", 500, priority=2), waiting("low2", 5, priority=2, arrival=1.0)]
    state = decide(attempts, pool(3), now=100.0).state
    decision = decide([*attempts, waiting("high", 50, arrival=50.0)], pool(100), state=state, now=110.0)
    assert names(decision.admitted) == ["high"]


def test_new_head_starts_its_own_count() -> None:
    state = AdmissionState(blocked=(BlockedHead(attempt_id=b"gone", priority=1, since_seconds=0.0, bypasses=64),))
    decision = decide([waiting("head", 500), waiting("s", 10, arrival=1.0)], pool(100), state=state)
    assert names(decision.admitted) == ["s"]
    assert decision.state.blocked == (BlockedHead(attempt_id=b"head", priority=1, since_seconds=100.0, bypasses=1),)


def test_pins_of_those_behind_a_reserved_head_are_given_up_last_in_line_first() -> None:
    attempts = [
        waiting("head", 600, pinned=300),
        waiting("b", 500, pinned=100, arrival=1.0),
        waiting("c", 500, pinned=0, arrival=2.0),
        waiting("d", 500, pinned=250, arrival=3.0),
    ]
    first = decide(attempts, pool(100))
    assert first.unpin == ()
    assert names(decide(attempts, pool(100), state=first.state, now=103.0).unpin) == ["d"]
    assert names(decide(attempts, pool(0), state=first.state, now=103.0).unpin) == ["d", "b"]
    assert decide(attempts, pool(300), state=first.state, now=103.0).unpin == ()


class AdmissionMachine(RuleBasedStateMachine):
    """A pool of 100 blocks and 4 state slots under arrivals, cancels, ends and tickets."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = 0
        self.queue: dict[bytes, WaitingAttempt] = {}
        self.held: dict[bytes, int] = {}
        self.tickets: dict[bytes, int] = {}
        self.state = AdmissionState()

    def view(self) -> PoolView:
        pinned = sum(each.pinned_hit_blocks for each in self.queue.values())
        used = pinned + sum(self.held.values()) + sum(self.tickets.values())
        assert used <= 99
        return PoolView(
            num_blocks=100,
            reserve_blocks=1,
            free_blocks=99 - used,
            ticket_blocks=sum(self.tickets.values()),
            free_state_slots=4 - len(self.held) - len(self.tickets),
        )

    @rule(blocks=st.integers(1, 110), priority=st.integers(1, 3), pinned_share=st.floats(0, 0.9))
    def arrive(self, blocks: int, priority: int, pinned_share: float) -> None:
        pinned = min(int(blocks * pinned_share), self.view().free_blocks)
        name = f"{self.count:04}"
        self.count += 1
        self.queue[name.encode()] = waiting(name, blocks, priority=priority, arrival=self.now, pinned=pinned)

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 5.0]))
    def admit(self, seconds: float) -> None:
        self.now += seconds
        view = self.view()
        reserved = [head for head in self.state.blocked if head.is_reserved(self.now)]
        decision = admit(list(self.queue.values()), pool=view, state=self.state, config=CONFIG, now=self.now)
        taken = [self.queue[each] for each in decision.admitted]
        assert sum(each.needed_blocks for each in taken) <= view.free_blocks
        assert len(taken) <= view.free_state_slots
        if view.ticket_blocks > 50:
            assert not taken
        for head in reserved:
            is_waiting = head.attempt_id in self.queue and head.attempt_id not in decision.admitted
            # Nobody of its class or a lower one passes.
            assert not is_waiting or all(each.priority < head.priority for each in taken)
        for attempt_id, refusal in decision.refused:
            assert self.queue.pop(attempt_id).prompt_blocks > 99
            assert refusal.reason == "KV_MEMORY"
        for each in taken:
            del self.queue[each.attempt_id]
            self.held[each.attempt_id] = each.prompt_blocks
        for attempt_id in decision.unpin:
            each = self.queue[attempt_id]
            self.queue[attempt_id] = WaitingAttempt(
                attempt_id=attempt_id,
                priority=each.priority,
                arrival_seconds=each.arrival_seconds,
                prompt_tokens=each.prompt_tokens,
                pinned_hit_blocks=0,
            )
        self.state = decision.state

    @precondition(lambda self: self.held)
    @rule(has_ticket=st.booleans())
    def finish_oldest(self, has_ticket: bool) -> None:
        attempt_id = next(iter(self.held))
        blocks = self.held.pop(attempt_id)
        if has_ticket:
            self.tickets[attempt_id] = blocks

    @precondition(lambda self: self.tickets)
    @rule()
    def settle_oldest(self) -> None:
        del self.tickets[next(iter(self.tickets))]

    @precondition(lambda self: self.queue)
    @rule()
    def cancel_oldest(self) -> None:
        del self.queue[next(iter(self.queue))]

    @invariant()
    def one_blocked_head_per_class(self) -> None:
        classes = [head.priority for head in self.state.blocked]
        assert len(set(classes)) == len(classes)

    def teardown(self) -> None:
        """Whatever happened, with work ending everybody gets in: no pins, giants or reservations deadlock."""
        for _ in range(3 * self.count + 3):
            self.held.clear()
            self.tickets.clear()
            self.admit(3.0)
        assert not self.queue


AdmissionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAdmissionMachine = AdmissionMachine.TestCase
