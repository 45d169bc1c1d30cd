"""admit: which waiting attempts get KV now (serving.md 2.6, C47). Called by the rank's loop before plan_step; pure.

An attempt is admitted with the blocks of its whole prompt and one state slot or not at all: attempts that grow can
block each other for ever. Class order, then arrival; smaller attempts may pass a head that does not fit, but only so
long. The trap: hits pinned by attempts that wait are blocks that nobody can use, so they are given up when they keep a
head waiting (unpin).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prefill_engine.queue_limits import Refusal
from prefill_plan.config import KvConfig
from prefill_plan.layer_spec import BLOCK_TOKENS

MOST_BYPASSES = 64  # serving.md 2.6
MOST_BYPASS_SECONDS = 2.0  # serving.md 2.6


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingAttempt:
    """An attempt whose hit is resolved and that holds no KV but its pinned hit.

    priority: 1 interactive, 2 standard, 3 sheddable. prompt_tokens: L. pinned_hit_blocks: hit blocks it has pinned
    itself, or that others keep pinned: those that PoolView.free_blocks does not contain.
    """

    attempt_id: bytes
    priority: int
    arrival_seconds: float
    prompt_tokens: int
    pinned_hit_blocks: int

    @property
    def prompt_blocks(self) -> int:
        return -(-self.prompt_tokens // BLOCK_TOKENS)

    @property
    def needed_blocks(self) -> int:
        return self.prompt_blocks - self.pinned_hit_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """num_blocks: all of the pool. reserve_blocks: never handed out (1 %). free_blocks: unused + ref-0, the reserve
    taken off (BlockPool.num_free). ticket_blocks: held only by open tickets. free_state_slots:
    SwaPool.num_free_states."""

    num_blocks: int
    reserve_blocks: int
    free_blocks: int
    ticket_blocks: int
    free_state_slots: int

    @property
    def capacity_blocks(self) -> int:
        """The longest prompt that an empty pool admits."""
        return self.num_blocks - self.reserve_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedHead:
    """First attempt of a class, while it does not fit. since_seconds: when it was first passed over or found
    blocked."""

    attempt_id: bytes
    priority: int
    since_seconds: float
    bypasses: int

    def is_reserved(self, now: float) -> bool:
        """Whether it has waited enough: nobody of its class or a lower one is admitted before it."""
        return self.bypasses >= MOST_BYPASSES or now - self.since_seconds >= MOST_BYPASS_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionState:
    """What one call leaves for the next: at most one blocked head per class. Start with AdmissionState()."""

    blocked: tuple[BlockedHead, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionDecision:
    """admitted: allocate in this order. refused: can never fit here. unpin: waiting attempts that must give up their
    pinned hit (they resolve it again when admitted), because a reserved head needs the room.

    stopped_by: why the first attempt left waiting waits: "" (none does), "tickets", "state_slots" or "blocks".
    """

    admitted: tuple[bytes, ...]
    refused: tuple[tuple[bytes, Refusal], ...]
    unpin: tuple[bytes, ...]
    stopped_by: str
    state: AdmissionState


def admit(
    waiting: Sequence[WaitingAttempt], *, pool: PoolView, state: AdmissionState, config: KvConfig, now: float
) -> AdmissionDecision:
    """Decides who gets KV now. The order of waiting does not matter.

    Args:
        now: seconds, same clock as arrival_seconds.
    """
    refused = tuple((each.attempt_id, _never_fits(each, pool)) for each in waiting if _is_too_long(each, pool))
    queue = sorted((each for each in waiting if not _is_too_long(each, pool)), key=_turn)
    if queue and pool.ticket_blocks > config.max_ticket_fraction * pool.num_blocks:
        return AdmissionDecision(admitted=(), refused=refused, unpin=(), stopped_by="tickets", state=state)
    round_ = _Round(pool, blocked=state.blocked, now=now)
    for priority in sorted({each.priority for each in queue}):
        round_.admit_class([each for each in queue if each.priority == priority])
    left = [each for each in queue if each.attempt_id not in round_.admitted]
    stopped_by = "" if not left else "blocks" if round_.free_state_slots else "state_slots"
    return AdmissionDecision(
        admitted=tuple(round_.admitted),
        refused=refused,
        unpin=_unpin(left, round_, now=now),
        stopped_by=stopped_by,
        state=AdmissionState(blocked=tuple(round_.heads)),
    )


class _Round:
    """Free room and blocked heads while one admit call goes through the classes, highest first."""

    def __init__(self, pool: PoolView, *, blocked: Sequence[BlockedHead], now: float) -> None:
        self.free_blocks = pool.free_blocks
        self.free_state_slots = pool.free_state_slots
        self.admitted: list[bytes] = []
        self.heads: list[BlockedHead] = []
        self._known = {head.attempt_id: head for head in blocked}
        self._now = now

    def admit_class(self, queue: Sequence[WaitingAttempt]) -> None:
        """Admits from the attempts of one class, in order; past its head only who fits, smallest first."""
        rest = list(queue)
        while rest and self._is_open() and self._fits(rest[0]):
            self._take(rest.pop(0))
        if not rest:
            return
        first = rest[0]
        fresh = BlockedHead(attempt_id=first.attempt_id, priority=first.priority, since_seconds=self._now, bypasses=0)
        self.heads.append(self._known.get(first.attempt_id, fresh))
        for attempt in sorted(rest[1:], key=lambda each: (each.needed_blocks, _turn(each))):
            if self._is_open() and self._fits(attempt):
                self._take(attempt)

    def _is_open(self) -> bool:
        return not any(head.is_reserved(self._now) for head in self.heads)

    def _fits(self, attempt: WaitingAttempt) -> bool:
        return attempt.needed_blocks <= self.free_blocks and self.free_state_slots > 0

    def _take(self, attempt: WaitingAttempt) -> None:
        self.free_blocks -= attempt.needed_blocks
        self.free_state_slots -= 1
        self.admitted.append(attempt.attempt_id)
        self.heads = [replace(head, bypasses=head.bypasses + 1) for head in self.heads]


def _turn(attempt: WaitingAttempt) -> tuple[int, float, bytes]:
    return attempt.priority, attempt.arrival_seconds, attempt.attempt_id


def _unpin(left: Sequence[WaitingAttempt], round_: _Round, *, now: float) -> tuple[bytes, ...]:
    """Attempts, last in line first, whose pinned hits would make the first reserved head fit; none if the head fits by
    itself.

    Shared hits free nothing when one holder lets go; then the next call asks the next one.
    """
    reserved = next((head.attempt_id for head in round_.heads if head.is_reserved(now)), None)
    head = next((each for each in left if each.attempt_id == reserved), None)
    if head is None:
        return ()
    lacking = head.needed_blocks - round_.free_blocks
    chosen: list[bytes] = []
    for attempt in reversed(left[left.index(head) + 1 :]):
        if lacking <= 0:
            break
        if attempt.pinned_hit_blocks:
            chosen.append(attempt.attempt_id)
            lacking -= attempt.pinned_hit_blocks
    return tuple(chosen)


def _is_too_long(attempt: WaitingAttempt, pool: PoolView) -> bool:
    return attempt.prompt_blocks > pool.capacity_blocks


def _never_fits(attempt: WaitingAttempt, pool: PoolView) -> Refusal:
    return Refusal(
        reason="KV_MEMORY",
        retry="OTHER_PE",
        retry_after_seconds=None,
        message=f"prompt of {attempt.prompt_tokens} tokens needs {attempt.prompt_blocks} KV blocks, "
        f"an empty pool admits {pool.capacity_blocks} of {pool.num_blocks}; refused",
    )
