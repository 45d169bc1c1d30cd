"""Refusals before waiting: only what is ahead counts (C47)."""

import pytest

from prefill_engine.queue_limits import QueueAhead, budget_refusal, queue_refusal
from prefill_plan.config import ServerConfig
from prefill_testing.step_sequences import LINEAR, attempt, model

CONFIG = ServerConfig(max_waiting_requests=10, max_waiting_rows=100_000, max_tenant_rows=40_000)


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        pytest.param(QueueAhead(waiting_requests=0, rows=0, tenant_rows=0), None, id="idle"),
        pytest.param(QueueAhead(waiting_requests=9, rows=100_000, tenant_rows=40_000), None, id="at-every-limit"),
        pytest.param(
            QueueAhead(waiting_requests=1, rows=100_001, tenant_rows=0), ("QUEUE_FULL", "OTHER_PE"), id="rows"
        ),
        pytest.param(
            QueueAhead(waiting_requests=10, rows=500, tenant_rows=0), ("QUEUE_FULL", "OTHER_PE"), id="requests"
        ),
        pytest.param(
            QueueAhead(waiting_requests=10, rows=200_000, tenant_rows=40_001),
            ("TENANT_QUOTA", "SAME_LATER"),
            id="tenant-first",
        ),
    ],
)
def test_queue_refusal_counts_what_is_ahead(ahead: QueueAhead, expected: tuple[str, str] | None) -> None:
    refusal = queue_refusal(ahead, config=CONFIG, cost=LINEAR)
    assert (refusal and (refusal.reason, refusal.retry)) == expected


def test_retry_after_is_the_time_until_there_is_room() -> None:
    ahead = QueueAhead(waiting_requests=1, rows=300_000, tenant_rows=0)
    refusal = queue_refusal(ahead, config=CONFIG, cost=LINEAR)
    assert refusal is not None
    assert refusal.retry_after_seconds == pytest.approx(200_000 * LINEAR.ms_per_row(16_384) / 1e3)
    assert refusal.message == "300000 rows ahead on this rank, limit 100000; refused"
    soon = queue_refusal(QueueAhead(waiting_requests=1, rows=100_001, tenant_rows=0), config=CONFIG, cost=LINEAR)
    assert soon is not None
    assert soon.retry_after_seconds == pytest.approx(LINEAR.step_ms(16_384, 0, 0) / 1e3)


@pytest.mark.parametrize(
    ("step_cap_ms", "is_refused"),
    [
        pytest.param(None, False, id="no-cap"),
        pytest.param(30.0, False, id="enough"),
        pytest.param(27.0, True, id="less"),
    ],
)
def test_budget_refusal_when_the_smallest_chunk_is_too_long(step_cap_ms: float | None, is_refused: bool) -> None:
    candidate = attempt("a", 100_000, hit=96_896, replay=128)
    refusal = budget_refusal(
        step_cap_ms,
        least_rows=candidate.least_end - candidate.next_row,
        decoder_rows=1,
        context=candidate.least_end,
        cost=LINEAR,
    )
    assert (refusal is not None) == is_refused
    if refusal:
        assert refusal.reason == "BUDGET_IMPOSSIBLE"
        assert refusal.message == "step_cap 27.0 ms, but a step of 256 rows takes up to 28.2 ms; refused"


def test_budget_refusal_counts_context() -> None:
    costly = model(ctx=0.5)
    assert budget_refusal(30.0, least_rows=128, decoder_rows=1, context=10_000, cost=costly) is None
    assert budget_refusal(30.0, least_rows=128, decoder_rows=1, context=100_000, cost=costly) is not None
