"""Refusals before waiting: only what is ahead counts (C47)."""

import pytest

from prefill_engine.queue_limits import budget_refusal
from prefill_plan.config import ServerConfig
from prefill_testing.step_sequences import LINEAR, attempt, model

CONFIG = ServerConfig(max_waiting_requests=10, max_waiting_rows=100_000, max_tenant_rows=40_000)


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
