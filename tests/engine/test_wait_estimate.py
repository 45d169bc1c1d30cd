"""Wait estimates by arithmetic, and against what plan_step then really does."""

import pytest

from prefill_engine.messages import RankLoad
from prefill_engine.wait_estimate import PendingWork, WaitEstimate, estimate_wait
from prefill_plan.config import SchedulerConfig
from prefill_testing.step_sequences import LINEAR, Bench, attempt

CONFIG = SchedulerConfig()


def pending(name: str, rows: int, *, priority: int = 1, arrival: float = 0.0, start: int = 0) -> PendingWork:
    return PendingWork(
        attempt_id=name.encode(),
        priority=priority,
        arrival_seconds=arrival,
        start=start,
        prompt_tokens=start + rows,
        decoder_floor=max(0, start + rows - 140),
    )


def estimate(own: PendingWork, others: list[PendingWork], *, step_left_ms: float = 0.0) -> WaitEstimate:
    return estimate_wait(own, others, cost=LINEAR, config=CONFIG, now=100.0, step_left_ms=step_left_ms)


def load(waiting_rows: int, running_rows_left: int) -> RankLoad:
    return RankLoad(
        rank=0,
        running=0,
        waiting=0,
        waiting_rows=waiting_rows,
        running_rows_left=running_rows_left,
        waiting_rows_by_class=(0, 0, 0),
        kv_tokens_total=0,
        kv_tokens_free=0,
        kv_tokens_held_by_tickets=0,
        state_slots_free=0,
        step_counter=0,
        step_model=LINEAR.report(),
        step=None,
        store_ok=True,
        store_lag_blocks=0,
        counters={},
        at_ns=0,
    )


def test_idle_engine_makes_the_worked_example_wait_for_nothing() -> None:
    result = estimate(pending("a", 3_104, start=96_896), [])
    assert (result.wait_seconds, result.ahead_requests, result.ahead_rows) == (0.0, 0, 0)
    assert result.finish_seconds == pytest.approx((58.7 + 1.5) / 1e3, abs=1e-4)  # 58.7 ms and 140 decoder rows


def test_step_in_flight_is_waited_for() -> None:
    assert estimate(pending("a", 1_000), [], step_left_ms=250.0).wait_seconds == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("other", "is_ahead"),
    [
        pytest.param(pending("x", 500), True, id="shorter"),
        pytest.param(pending("x", 2_000, arrival=100.0), False, id="longer"),
        pytest.param(pending("x", 500, priority=2), False, id="lower-class"),
        pytest.param(pending("x", 90_000, priority=1), False, id="long"),
        pytest.param(pending("x", 9_000, arrival=-1_000.0), True, id="longer-but-old"),
    ],
)
def test_ahead_is_what_the_order_of_service_puts_first(other: PendingWork, is_ahead: bool) -> None:
    result = estimate(pending("own", 1_000, arrival=100.0), [other])
    assert (result.ahead_requests, result.ahead_rows) == ((1, other.rows) if is_ahead else (0, 0))


@pytest.mark.parametrize("num_ahead", [3, 20, 60])
def test_estimate_agrees_with_the_steps_that_follow(num_ahead: int) -> None:
    others = [pending(f"o{i:02}", 4_000) for i in range(num_ahead)]
    result = estimate(pending("own", 5_000, arrival=100.0), others)
    bench = Bench([attempt(f"o{i:02}", 4_000) for i in range(num_ahead)] + [attempt("own", 5_000, arrival=100.0)])
    bench.now = 100.0
    started = None
    while any(each.attempt_id == b"own" for each in bench.candidates):
        before = bench.now
        chunks = bench.step().chunks
        if started is None and any(chunk.attempt_id == b"own" for chunk in chunks):
            started = before - 100.0
    assert started is not None
    assert result.wait_seconds == pytest.approx(started, abs=0.21)  # one contended step
    assert result.finish_seconds == pytest.approx(bench.now - 100.0, abs=0.21)
