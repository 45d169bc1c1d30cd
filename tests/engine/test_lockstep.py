"""The leading rank gives in; everybody else keeps its step (serving.md 2.3)."""

import msgspec
import pytest

from prefill_engine.chunk_cut import Candidate
from prefill_engine.lockstep import StepWish, equalise, step_wish
from prefill_engine.scheduler import IDLE_STEP, SchedulerState, plan_step, refund
from prefill_plan.config import SchedulerConfig
from prefill_testing.scheduler_simulation import our_planner, poisson_mix, simulate
from prefill_testing.step_sequences import LINEAR, Bench, attempt, chunk_table

CONFIG = SchedulerConfig()
LONG = [attempt("a", 20_000), attempt("b", 90_000)]
"""Planned as a whole and 12,672 rows of b."""


@pytest.mark.parametrize(
    ("candidates", "all_rows", "expected"),
    [
        pytest.param(LONG, [32_672], [("a", 0, 20_000), ("b", 0, 12_672)], id="single-rank"),
        pytest.param(LONG, [32_672, 32_700], [("a", 0, 20_000), ("b", 0, 12_672)], id="not-the-leader"),
        pytest.param(LONG, [32_672, 32_672], [("a", 0, 20_000), ("b", 0, 12_672)], id="tie"),
        pytest.param(
            LONG, [1_000, 32_672, 25_000], [("a", 0, 20_000), ("b", 0, 4_992)], id="down-to-the-second-largest"
        ),
        pytest.param(LONG, [32_672, 0, 0, 0], [("a", 0, 20_000), ("b", 0, 128)], id="finished-chunks-stay-whole"),
        pytest.param([attempt("a", 90_000)], [32_768, 100], [("a", 0, 8_192)], id="never-below-8192-rows"),
        pytest.param(
            [attempt("a", 90_000, hit=1_280, replay=128)],
            [32_768, 10_000],
            [("a", 1_152, 11_136)],
            id="ends-on-a-block",
        ),
    ],
)
def test_equalise_shortens_unfinished_chunks_of_the_leader(
    candidates: list[Candidate], all_rows: list[int], expected: list[tuple[str, int, int]]
) -> None:
    decision = equalise(Bench(candidates).step(), all_rows, cost=LINEAR)
    assert chunk_table([decision]) == [expected]
    assert decision.encoder_rows == sum(end - start for _, start, end in expected)
    work = decision.work
    assert decision.predicted_ms == pytest.approx(
        LINEAR.step_ms(work.encoder_rows, work.decoder_rows, work.row_context_products)
    )


def test_equalised_rows_are_refunded() -> None:
    candidates = [attempt("x", 90_000, key="x"), attempt("y", 90_000, key="y")]
    planned, state = plan_step(candidates, state=SchedulerState(), config=CONFIG, cost=LINEAR, now=0.0)
    computed = equalise(planned, [32_768, 20_000], cost=LINEAR)
    back = refund(state, planned=planned, computed=computed.chunks)
    lost_ms = sum(chunk.charged_ms for chunk in planned.chunks) - sum(chunk.charged_ms for chunk in computed.chunks)
    gained_ms = sum(share.deficit_ms for share in back.shares) - sum(share.deficit_ms for share in state.shares)
    assert lost_ms == pytest.approx((32_768 - computed.encoder_rows) * 10.73e-3, rel=0.01)
    assert gained_ms == pytest.approx(lost_ms)


def test_wish_says_rows_and_work() -> None:
    decision = Bench([attempt("a", 300)]).step()
    assert step_wish(decision, stop_epoch=3) == StepWish(
        rows=300, budget_ms=decision.budget_ms, has_work=True, stop_epoch=3
    )
    assert step_wish(IDLE_STEP, stop_epoch=0) == StepWish(rows=0, budget_ms=0.0, has_work=False, stop_epoch=0)


def test_equalising_four_ranks_helps_short_work() -> None:
    arrivals = poisson_mix(seed=77, seconds=60, rows_per_second=4 * 0.5 * 87_000)
    config = msgspec.structs.replace(CONFIG, contended_chunk_tokens=32_768)
    planner = our_planner(config, cost=LINEAR)
    apart = simulate(arrivals, planner=planner, cost=LINEAR, num_ranks=4)
    level = simulate(arrivals, planner=planner, cost=LINEAR, num_ranks=4, is_equalised=True)
    assert level.latency_percentile(50, is_short=True) < 0.85 * apart.latency_percentile(50, is_short=True)
    assert level.lockstep_efficiency > apart.lockstep_efficiency
    assert set(level.latency_ms) == {each.attempt_id for each in arrivals}
