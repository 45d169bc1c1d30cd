"""Random lives: whatever happens in whatever order, each attempt ends once, its rank is told once, and no ticket stays open."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefill_engine.front.events import Completed
from prefill_engine.rpc.status import Failure, ServingFailure
from prefill_testing.lifecycle_rig import LifecycleRig, call_of, events_of

NAMES = st.sampled_from(["a", "b", "c"])
REPORTS = ("resolve", "start", "token", "computed", "stored", "failed", "released")


class Lives(RuleBasedStateMachine):
    """Three attempts of two requests under random reports, cancels, lost streams, claims, settles and time."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = LifecycleRig(ranks=2)
        self.outcomes: dict[bytes, object] = {}

    @initialize(name=NAMES)
    def one_to_its_ticket(self, name: str) -> None:
        self.submit(name, "best_effort", True, 90.0)
        self.report_all(name)

    @rule(
        name=NAMES,
        store=st.sampled_from(["best_effort", "required", "skip"]),
        handoff=st.booleans(),
        wait=st.floats(1, 90),
    )
    def submit(self, name: str, store: str, handoff: bool, wait: float) -> None:
        request = {"a": ("r", 1), "b": ("r", 2), "c": ("s", 1)}[name]
        call = call_of(name, request_id=request[0], attempt=request[1], store=store, handoff=handoff)
        try:
            self.rig.submit(call, deadline=self.rig.now + wait)
        except ServingFailure:
            return

    @rule(name=NAMES, report=st.sampled_from(REPORTS))
    def report(self, name: str, report: str) -> None:
        getattr(self.rig, report)(name)

    @rule(name=NAMES)
    def report_all(self, name: str) -> None:
        for report in ("resolve", "start", "token", "computed"):
            getattr(self.rig, report)(name)

    @rule(name=NAMES)
    def cancel(self, name: str) -> None:
        self.rig.lifecycle.cancel(name.encode())

    @rule(name=NAMES)
    def lose_stream(self, name: str) -> None:
        attempt = self.rig.lifecycle.attempts.find(name.encode())
        if attempt is not None:
            attempt.streams = 0
            self.rig.lifecycle.stream_lost(attempt)

    @rule(name=NAMES, delivered=st.booleans())
    def settle(self, name: str, delivered: bool) -> None:
        attempt = self.rig.lifecycle.attempts.find(name.encode())
        if attempt is not None and attempt.ticket is not None and attempt.ticket.is_open:
            if attempt.ticket.claimant is not None:
                self.rig.settle(attempt.ticket, delivered=delivered)
            elif self.rig.now < attempt.ticket.expires:
                self.rig.claim(attempt.ticket)

    @rule(seconds=st.floats(0.01, 40))
    def pass_time(self, seconds: float) -> None:
        self.rig.now += seconds
        self.rig.lifecycle.tick()

    @invariant()
    def each_ends_once_and_its_rank_hears_of_it_once(self) -> None:
        for name in ("a", "b", "c"):
            sent = self.rig.kinds_sent(name)
            submits = sent.count("Submit")
            assert sent.count("Cancel") <= submits
            assert sent.count("Release") <= submits
        finished = [attempt.call.attempt_id for attempt in self.rig.ledger.finished]
        assert len(self.rig.ledger.admitted) == len(finished) + len(self.rig.lifecycle.attempts.live())

    @invariant()
    def outcomes_stick_and_streams_end_with_them(self) -> None:
        for attempt in self.rig.ledger.finished:
            known = self.outcomes.setdefault(id(attempt).to_bytes(8, "big"), attempt.outcome)
            assert attempt.outcome is known
            assert attempt.ticket is None or not attempt.ticket.is_open
            events = events_of(attempt)
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            assert isinstance(attempt.outcome, Completed) == any(isinstance(e.body, Completed) for e in events)
            assert isinstance(attempt.outcome, Completed | Failure)

    def teardown(self) -> None:
        """Time ends everything: deadlines, leases and the drain leave nothing behind."""
        self.rig.lifecycle.begin_drain(seconds=1.0, finish_queued=False)
        self.rig.now += 2.0
        self.rig.lifecycle.tick()
        assert self.rig.lifecycle.drain_status().done
        for attempt in self.rig.ledger.finished:
            told = {"Cancel", "Release"} & set(self.rig.kinds_sent(attempt.call.attempt_id.decode()))
            rank_ended_it = isinstance(attempt.outcome, Failure) and attempt.outcome.reason == "KERNEL_FAULT"
            assert told or rank_ended_it or not attempt.call.handoff


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
