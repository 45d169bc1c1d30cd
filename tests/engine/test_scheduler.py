"""plan_step on small scenarios, the whole sequence of steps each time (serving.md 2.2-2.4, C47)."""

import math
from dataclasses import replace

import msgspec
import pytest

from prefill_engine.chunk_cut import Candidate, Work
from prefill_engine.scheduler import (
    IDLE_STEP,
    SchedulerState,
    check_scheduler_config,
    plan_step,
    refund,
)
from prefill_engine.step_budget import BudgetRule
from prefill_engine.step_sheet import ChunkRule
from prefill_plan.config import SchedulerConfig
from prefill_plan.errors import ConfigError
from prefill_testing.step_sequences import LINEAR, Bench, attempt, chunk_table, model, served_ms

CONFIG = SchedulerConfig()
CONTENDED_MS = LINEAR.step_ms(16_384, 140, 0)
FULL_MS = LINEAR.step_ms(32_768, 140, 0)


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        pytest.param(
            [attempt("long", 100_000)],
            [
                [("long", 0, 32_768)],
                [("long", 32_768, 65_536)],
                [("long", 65_536, 98_304)],
                [("long", 98_304, 100_000)],
            ],
            id="lone-request-full-cap",
        ),
        pytest.param([attempt("one", 1)], [[("one", 0, 1)]], id="one-token"),
        pytest.param([attempt("cap", 32_768)], [[("cap", 0, 32_768)]], id="exactly-the-cap"),
        pytest.param(
            [attempt("tail", 33_000)],
            [[("tail", 0, 32_384)], [("tail", 32_384, 33_000)]],
            id="short-tail-shortens-the-chunk-before",
        ),
        pytest.param(
            [attempt("hit", 100_000, hit=96_896)],
            [[("hit", 96_896, 100_000)]],
            id="worked-example-with-snapshot",
        ),
        pytest.param(
            [attempt("replay", 100_000, hit=96_896, replay=128)],
            [[("replay", 96_768, 100_000)]],
            id="worked-example-with-replay",
        ),
        pytest.param(
            [attempt("long", 40_000), attempt("short", 2_000, arrival=1.0)],
            # The short one waits, so the first step is a contended one; then the long one is alone.
            [[("short", 0, 2_000), ("long", 0, 14_336)], [("long", 14_336, 40_000)]],
            id="short-overtakes-long",
        ),
        pytest.param(
            [attempt("a", 20_000), attempt("b", 20_000)],
            # No short work: full steps. b takes the room that a leaves.
            [[("a", 0, 20_000), ("b", 0, 12_672)], [("b", 12_672, 20_000)]],
            id="two-long-share-a-full-step",
        ),
        pytest.param(
            [attempt("b", 9_000), attempt("a", 9_000)],
            [[("a", 0, 9_000), ("b", 0, 9_000)]],
            id="ties-by-attempt-id",
        ),
        pytest.param(
            [attempt("a", 9_000, arrival=2.0), attempt("b", 9_000, arrival=1.0)],
            [[("b", 0, 9_000), ("a", 0, 9_000)]],
            id="older-first",
        ),
        pytest.param(
            [attempt("blocked", 9_000, runnable_end=0), attempt("ready", 3_000, arrival=5.0)],
            [[("ready", 0, 3_000)]],
            id="late-head",
        ),
        pytest.param(
            [attempt("image", 9_000, runnable_end=5_000)],
            [[("image", 0, 4_992)]],
            id="text-before-an-image-runs",
        ),
        pytest.param(
            [attempt("image", 9_000, runnable_end=8_900)],
            [[("image", 0, 8_448)]],
            id="image-near-the-end-leaves-no-short-tail",
        ),
        pytest.param([attempt("image", 9_000, runnable_end=127)], [], id="less-than-a-block-is-not-runnable"),
        pytest.param(
            [attempt("replay", 9_000, hit=4_096, replay=128, runnable_end=4_200)],
            [],
            id="replay-rows-alone-are-not-runnable",
        ),
        pytest.param(
            [attempt("replay", 9_000, hit=4_096, replay=128, runnable_end=4_230)],
            [[("replay", 3_968, 4_224)]],
            id="replay-rows-and-one-block",
        ),
        pytest.param(
            [attempt("replay", 4_196, hit=4_096, replay=128)],
            [[("replay", 3_968, 4_196)]],
            id="replay-with-less-than-a-block-left",
        ),
        pytest.param(
            [attempt("low", 20_000, priority=2), attempt("high", 30_000, priority=1)],
            # The floor of the lower class (10 % of the coming milliseconds) comes first; then strict order.
            [[("low", 0, 3_200), ("high", 0, 29_440)], [("low", 3_200, 20_000), ("high", 29_440, 30_000)]],
            id="classes-strict-with-a-floor",
        ),
        pytest.param([], [], id="nothing"),
    ],
)
def test_plan_step_cuts_the_whole_sequence(
    candidates: list[Candidate], expected: list[list[tuple[str, int, int]]]
) -> None:
    assert chunk_table(Bench(candidates).run()) == expected


def test_decision_counts_rows_as_the_cost_model_does() -> None:
    candidates = [
        attempt("replay", 100_000, hit=96_896, replay=128),
        attempt("long", 60_000, hit=1_280, replay=128, arrival=1.0),
    ]
    decision = Bench(candidates).step()
    assert chunk_table([decision]) == [[("replay", 96_768, 100_000), ("long", 1_152, 14_208)]]
    assert decision.work == Work(
        encoder_rows=3_232 + 13_056,
        decoder_rows=140 + 1,  # the last 140 rows of a finished prompt, one placeholder of an unfinished one
        row_context_products=3_232 * 100_000 + 13_056 * 14_208,
    )
    assert (decision.encoder_rows, decision.decoder_rows, decision.replay_rows) == (16_288, 141, 256)
    assert decision.predicted_ms == pytest.approx(LINEAR.step_ms(16_288, 141, 0))
    assert decision.budget_ms == pytest.approx(CONTENDED_MS)
    assert decision.why == BudgetRule.CONTENDED
    assert [chunk.why for chunk in decision.chunks] == [ChunkRule.ORDER, ChunkRule.ORDER]


@pytest.mark.parametrize(
    ("candidates", "why", "rows", "budget_ms"),
    [
        pytest.param([attempt("a", 90_000)], BudgetRule.LONE, 32_768, LINEAR.step_ms(32_768, 1, 0), id="lone"),
        pytest.param(
            [attempt("a", 90_000), attempt("b", 90_000)], BudgetRule.FULL, 32_768, FULL_MS, id="only-long-work"
        ),
        pytest.param(
            [attempt("a", 90_000), attempt("b", 8_191)], BudgetRule.CONTENDED, 16_383, CONTENDED_MS, id="short-work"
        ),
        pytest.param(
            [attempt("a", 90_000), attempt("b", 8_191, priority=2)],
            BudgetRule.FULL,
            32_768,
            FULL_MS,
            id="short-work-of-a-lower-class",
        ),
        pytest.param([attempt("a", 90_000, step_cap_ms=100.0)], BudgetRule.STEP_CAP, 6_912, 100.0, id="own-step-cap"),
        pytest.param(
            [attempt("a", 90_000), attempt("b", 90_000, step_cap_ms=50.0)],
            BudgetRule.STEP_CAP,
            2_176,
            50.0,
            id="step-cap-beats-the-row-floor",
        ),
        pytest.param(
            [attempt("a", 90_000), attempt("b", 90_000, priority=2, step_cap_ms=50.0)],
            BudgetRule.FULL,
            32_768,
            FULL_MS,
            id="step-cap-of-a-lower-class-does-not-count",
        ),
        pytest.param(
            [attempt("a", 90_000, step_cap_ms=1_000.0)],
            BudgetRule.LONE,
            32_768,
            1_000.0,
            id="generous-step-cap",
        ),
        pytest.param(
            [attempt("a", 90_000), attempt("b", 500, runnable_end=0, step_cap_ms=10.0)],
            BudgetRule.LONE,
            32_768,
            LINEAR.step_ms(32_768, 1, 0),
            id="unready-work-does-not-shrink-steps",
        ),
    ],
)
def test_budget_follows_who_waits(candidates: list[Candidate], why: BudgetRule, rows: int, budget_ms: float) -> None:
    decision = Bench(candidates).step()
    assert (decision.why, decision.encoder_rows) == (why, rows)
    assert decision.budget_ms == pytest.approx(budget_ms)


def test_many_short_prompts_are_bound_by_milliseconds_not_rows() -> None:
    # 200 prompts of 200 rows: 140 of each run the decoder too, so rows alone would be blind (serving.md 2.2).
    config = msgspec.structs.replace(CONFIG, contended_chunk_tokens=32_768)
    decision = Bench([attempt(f"{i:03}", 200) for i in range(200)], config=config).step()
    assert decision.encoder_rows == 96 * 200
    assert decision.decoder_rows == 96 * 140
    assert decision.predicted_ms <= FULL_MS


def test_expensive_context_shrinks_steps_but_not_below_the_row_floor() -> None:
    costly = model(ctx=10e-3)
    candidates = [attempt("a", 900_000, hit=800_000), attempt("b", 900_000, hit=800_000)]
    assert Bench(candidates, cost=costly).step().encoder_rows == 18_560
    costly = model(ctx=1.0)
    assert Bench(candidates, cost=costly).step().encoder_rows == 4_096
    assert Bench([candidates[0]], cost=costly).step().encoder_rows == 32_768


def test_budget_contains_the_residual_of_the_model() -> None:
    noisy = replace(LINEAR, residuals=(10.0,) * 30)
    assert Bench([attempt("a", 90_000)], cost=noisy).step().encoder_rows == 32_768
    capped = Bench([attempt("a", 90_000, step_cap_ms=100.0)], cost=noisy).step()
    assert capped.predicted_ms <= 90.0
    assert capped.encoder_rows == 6_016


def test_impossible_step_cap_still_advances_by_the_smallest_chunk() -> None:
    decisions = Bench([attempt("a", 600, step_cap_ms=1.0), attempt("b", 4_196, hit=4_096, replay=128)]).run()
    assert chunk_table(decisions) == [
        [("b", 3_968, 4_196)],
        [("a", 0, 128)],
        [("a", 128, 256)],
        [("a", 256, 384)],
        [("a", 384, 512)],
        [("a", 512, 600)],
    ]
    assert {chunk.why for decision in decisions for chunk in decision.chunks} == {ChunkRule.FORCED}


def test_short_tail_remains_where_no_cut_avoids_it() -> None:
    config = msgspec.structs.replace(CONFIG, chunk_cap_tokens=512)
    assert chunk_table(Bench([attempt("a", 600)], config=config).run()) == [[("a", 0, 512)], [("a", 512, 600)]]


def test_fairness_keys_take_turns_and_a_lone_key_pays_nothing() -> None:
    candidates = [attempt(f"x{i}", 40_000, key="x") for i in range(3)] + [attempt("y0", 40_000, key="y", arrival=1.0)]
    bench = Bench(candidates)
    decisions = bench.run(most_steps=3)
    # 100 ms are 9,319 rows: x and y get equal turns although x has three prompts.
    assert chunk_table(decisions) == [
        [("x0", 0, 18_560), ("y0", 0, 14_208)],  # x 100 ms, y 100, x 100, y the 52 that were left
        [("y0", 14_208, 27_904), ("x0", 18_560, 37_248)],  # y its other 48, x 100, y 100, x 100
        [("y0", 27_904, 37_248), ("x0", 37_248, 40_000), ("x1", 0, 4_224)],  # x0 is short now: a contended step
    ]
    alone = Bench([attempt("z", 90_000, key="z")])
    assert alone.step().chunks[0].charged_ms == 0.0
    assert alone.state.shares[0].deficit_ms == 100.0


def test_weight_scales_the_turn() -> None:
    bench = Bench([attempt("x", 2_000_000, key="x", weight=3), attempt("y", 2_000_000, key="y")])
    served = served_ms(bench.run(most_steps=40))
    assert served[1, "x"] / served[1, "y"] == pytest.approx(3.0, rel=0.05)


def test_hits_cost_a_key_only_what_is_computed() -> None:
    bench = Bench(
        [attempt(f"x{i}", 100_000, key="x", hit=96_896) for i in range(30)]
        + [attempt(f"y{i}", 50_000, key="y") for i in range(4)]
    )
    served = served_ms(bench.run(most_steps=5))
    assert served[1, "x"] == pytest.approx(served[1, "y"], abs=200.0)


def test_refund_gives_back_what_was_not_computed() -> None:
    candidates = [attempt("x", 90_000, key="x"), attempt("y", 90_000, key="y")]
    decision, state = plan_step(candidates, state=SchedulerState(), config=CONFIG, cost=LINEAR, now=0.0)
    deficits = {share.fairness_key: share.deficit_ms for share in state.shares}
    charges = {chunk.fairness_key: chunk.charged_ms for chunk in decision.chunks}
    assert min(charges.values()) > 100.0
    back = refund(state, planned=decision, computed=decision.chunks[1:])
    lost = decision.chunks[0].fairness_key
    assert {share.fairness_key: share.deficit_ms for share in back.shares} == deficits | {
        lost: deficits[lost] + charges[lost]
    }
    assert refund(state, planned=decision, computed=decision.chunks) == state


def test_overdue_attempt_gets_a_small_chunk() -> None:
    skips = ((b"old", 50),)
    candidates = [attempt("old", 90_000), *(attempt(f"s{i}", 3_000) for i in range(20))]
    decision, state = plan_step(candidates, state=SchedulerState(skips=skips), config=CONFIG, cost=LINEAR, now=0.0)
    assert chunk_table([decision])[0][:2] == [("old", 0, 1_536), ("s0", 0, 3_000)]
    assert decision.chunks[0].why is ChunkRule.OVERDUE
    assert dict(state.skips).get(b"old") is None
    assert dict(state.skips)[b"s9"] == 1


def test_unready_attempts_lose_their_skip_count() -> None:
    state = SchedulerState(skips=((b"a", 7), (b"gone", 3)))
    candidates = [attempt("a", 9_000, runnable_end=0), attempt("b", 9_000)]
    assert plan_step(candidates, state=state, config=CONFIG, cost=LINEAR, now=0.0)[1].skips == ()


def test_idle_step_has_no_chunks() -> None:
    decision, state = plan_step([], state=SchedulerState(), config=CONFIG, cost=LINEAR, now=0.0)
    assert (decision, state) == (IDLE_STEP, SchedulerState())


def test_plan_step_refuses_an_attempt_twice() -> None:
    with pytest.raises(ValueError, match="attempt ids of 2 candidates are not unique"):
        plan_step([attempt("a", 10), attempt("a", 20)], state=SchedulerState(), config=CONFIG, cost=LINEAR, now=0.0)


@pytest.mark.parametrize(
    ("compute_start", "next_row", "runnable_end", "weight", "priority"),
    [
        pytest.param(0, 9_001, 9_001, 1, 1, id="beyond-the-prompt"),
        pytest.param(0, 9_000, 9_000, 1, 1, id="nothing-left"),
        pytest.param(128, 0, 9_000, 1, 1, id="before-compute-start"),
        pytest.param(0, 256, 128, 1, 1, id="runnable-end-below-next-row"),
        pytest.param(0, 0, 9_000, 0, 1, id="weight"),
        pytest.param(0, 0, 9_000, 1, 4, id="class"),
    ],
)
def test_candidate_refuses_positions_out_of_order(
    compute_start: int, next_row: int, runnable_end: int, weight: int, priority: int
) -> None:
    with pytest.raises(ValueError, match="candidate: compute_start"):
        replace(
            attempt("a", 9_000),
            compute_start=compute_start,
            next_row=next_row,
            runnable_end=runnable_end,
            weight=weight,
            priority=priority,
        )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        pytest.param({"chunk_cap_tokens": 128}, "scheduler.chunk_cap_tokens = 128, expected >= 256", id="cap"),
        pytest.param({"contended_chunk_tokens": 0}, "scheduler.contended_chunk_tokens = 0", id="contended"),
        pytest.param({"min_chunk_tokens": 0}, "scheduler.min_chunk_tokens = 0, expected >= 1", id="min"),
        pytest.param({"floor_chunk_tokens": -1}, "scheduler.floor_chunk_tokens = -1", id="floor"),
        pytest.param({"age_seconds": 0.0}, "scheduler.age_seconds = 0.0, expected > 0", id="age"),
    ],
)
def test_scheduler_config_that_could_stall_is_refused(wrong: dict[str, float], message: str) -> None:
    check_scheduler_config(CONFIG)
    with pytest.raises(ConfigError, match=message):
        check_scheduler_config(msgspec.structs.replace(CONFIG, **wrong))


def test_ageing_lets_long_work_pass_fresh_short_work() -> None:
    # cost / (1 + age / 10 s): 20,000 rows that waited 100 s weigh 1,818 rows.
    candidates = [attempt("old", 20_000, arrival=0.0), attempt("new", 2_000, arrival=100.0)]
    decision, _ = plan_step(candidates, state=SchedulerState(), config=CONFIG, cost=LINEAR, now=100.0)
    assert chunk_table([decision]) == [[("old", 0, 16_384)]]
    assert math.isclose(decision.budget_ms, CONTENDED_MS)
