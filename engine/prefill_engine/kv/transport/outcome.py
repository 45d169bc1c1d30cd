"""How one pull or push ended, from what happened to it. Pure but for the clock."""

import time
from collections.abc import Callable

from prefill_engine.kv.transport.contract import PullOutcome, PullState
from prefill_engine.kv.transport.frame import Frame, Op, Refusal, check_key


def always_settled() -> bool:
    return True


def ended(
    state: PullState, reason: str, *, started: float, settled: Callable[[], bool] = always_settled
) -> PullOutcome:
    """started: time.monotonic() of the call."""
    return PullOutcome(state=state, reason=reason, seconds=time.monotonic() - started, settled=settled)


def judge_answer(answer: Frame, *, expected: Op, length: int) -> tuple[PullState, str] | None:
    """None if the answer is the expected one with the expected length; else how the exchange ended."""
    if answer.op is expected and answer.length == length:
        return None
    if answer.op is Op.ABSENT:
        return PullState.ABSENT, "absent"
    if answer.op is Op.REFUSED and answer.status is Refusal.NO_WINDOW:
        return PullState.BUSY, "refused: no_window"
    if answer.op is Op.REFUSED:
        return PullState.FAILED, f"refused: {Refusal(answer.status).name.lower()}"
    return (
        PullState.FAILED,
        f"protocol: {answer.op.name} of {answer.length} bytes, expected {expected.name} of {length}",
    )


def is_in_order(answer: Frame) -> bool:
    """The connection is fit for another exchange after this unexpected answer; a refusal for BUSY closes it."""
    return answer.op is Op.ABSENT or (answer.op is Op.REFUSED and answer.status is not Refusal.BUSY)


def check_arguments(key: bytes, deadline_seconds: float) -> None:
    """Raises ValueError: errors of our own caller, not of a peer."""
    check_key(key)
    if deadline_seconds <= 0:
        raise ValueError(f"deadline of {deadline_seconds} s, expected one above 0")
