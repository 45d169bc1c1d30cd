"""The step model: recovers a machine from noisy steps, ignores what it should, never leaves its bounds."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_engine.cost_model import SEED, CostModel, StepSample, calibrated_from, seed_model
from prefill_engine.messages import StepModelReport

MACHINE = (31.0, 14.2e-3, 9.1e-3, 20e-3)


def sample(
    encoder_rows: int, decoder_rows: int, context: int, *, truth: tuple[float, ...] = MACHINE, factor: float = 1.0
) -> StepSample:
    a, enc, dec, ctx = truth
    products = encoder_rows * context
    step_ms = a + enc * encoder_rows + dec * decoder_rows + ctx * products / 1e6
    return StepSample(
        step_ms=step_ms * factor, encoder_rows=encoder_rows, decoder_rows=decoder_rows, row_context_products=products
    )


def random_samples(generator: random.Random, count: int, *, noise: float, outliers: float = 0.0) -> list[StepSample]:
    samples = []
    for _ in range(count):
        rows = generator.randint(128, 32_768)
        factor = generator.gauss(1, noise) if noise else 1.0
        if generator.random() < outliers:
            factor *= generator.uniform(2, 10)
        samples.append(
            sample(rows, generator.randint(1, min(rows, 8_000)), generator.randint(rows, 300_000), factor=factor)
        )
    return samples


def warm_calibration() -> CostModel:
    return calibrated_from(random_samples(random.Random(7), 12, noise=0.02), warmup_steps=0)


def observe_all(model: CostModel, samples: list[StepSample]) -> CostModel:
    for each in samples:
        model = model.observe(each)
    return model


def prediction_error(model: CostModel, points: list[StepSample]) -> float:
    return max(
        abs(model.step_ms(each.encoder_rows, each.decoder_rows, each.row_context_products) / each.step_ms - 1)
        for each in points
    )


@pytest.mark.parametrize(
    ("work", "expected_ms"),
    [
        pytest.param((2_048, 0, 0), 47, id="2k"),
        pytest.param((4_096, 0, 0), 69, id="4k"),
        pytest.param((8_192, 0, 0), 113, id="8k"),
        pytest.param((16_384, 0, 0), 201, id="16k"),
        pytest.param((32_768, 0, 0), 377, id="cap"),
        pytest.param((32_768, 22_400, 0), 617, id="160-short-prompts"),
        pytest.param((3_104, 0, 0), 58.7, id="worked-example"),
    ],
)
def test_seed_model_gives_the_published_step_times(work: tuple[int, int, int], expected_ms: float) -> None:
    assert seed_model().step_ms(*work) == pytest.approx(expected_ms, abs=0.7)


def test_step_model_recovers_coefficients_within_two_percent() -> None:
    model = observe_all(warm_calibration(), random_samples(random.Random(1), 2_000, noise=0.005))
    assert model.coefficients == pytest.approx(MACHINE, rel=0.02)
    assert model.num_samples == 2_000


def test_step_model_recovers_with_outliers() -> None:
    samples = random_samples(random.Random(2), 1_500, noise=0.03, outliers=0.04)
    model = observe_all(warm_calibration(), samples)
    assert prediction_error(model, random_samples(random.Random(3), 50, noise=0.0)) < 0.05


def test_step_model_follows_a_machine_that_became_slower() -> None:
    model = observe_all(warm_calibration(), random_samples(random.Random(4), 300, noise=0.02))
    slower = [replace(each, step_ms=each.step_ms * 1.3) for each in random_samples(random.Random(5), 1_000, noise=0.02)]
    model = observe_all(model, slower)
    assert model.coefficients == pytest.approx([1.3 * value for value in MACHINE], rel=0.08)


def test_observe_ignores_warm_up_and_flagged_steps() -> None:
    start = seed_model(warmup_steps=20)
    poison = replace(sample(1_000, 1, 1_000), step_ms=60_000.0)
    model = observe_all(start, [replace(poison, flagged=True)] * 30)
    assert model == start
    model = observe_all(start, [poison] * 20)
    assert model.coefficients == SEED
    assert model.num_samples == 0
    assert model.observe(sample(1_000, 1, 1_000)).num_samples == 1


def test_context_term_is_zero_until_calibrated() -> None:
    model = observe_all(seed_model(warmup_steps=0), random_samples(random.Random(6), 400, noise=0.0))
    assert model.coefficients[3] == 0.0
    assert model.coefficients[1] > 0
    assert warm_calibration().coefficients[3] == pytest.approx(MACHINE[3], rel=0.05)


def test_coefficients_stay_within_half_of_the_calibration() -> None:
    model = warm_calibration()
    calibration = model.coefficients
    model = observe_all(model, [sample(8_000, 300, 20_000, factor=9.0), sample(100, 10, 200, factor=0.01)] * 400)
    for value, start in zip(model.coefficients, calibration, strict=True):
        assert 0.5 * start - 1e-12 <= value <= 1.5 * start + 1e-12


def test_identical_steps_do_not_wind_the_model_up() -> None:
    model = observe_all(warm_calibration(), random_samples(random.Random(8), 200, noise=0.0))
    generator = random.Random(9)
    model = observe_all(model, [sample(2_048, 140, 9_000, factor=generator.gauss(1, 0.05)) for _ in range(5_000)])
    # 5,000 equal steps say nothing of other sizes; there the calibration holds, not noise.
    assert prediction_error(model, random_samples(random.Random(10), 50, noise=0.0)) < 0.25
    model = observe_all(model, random_samples(random.Random(11), 100, noise=0.0))
    assert prediction_error(model, random_samples(random.Random(12), 50, noise=0.0)) < 0.02


def test_residual_p95_needs_twenty_steps_and_budgets_include_it() -> None:
    model = warm_calibration()
    noisy = random_samples(random.Random(13), 300, noise=0.05)
    few, many = observe_all(model, noisy[:19]), observe_all(model, noisy)
    assert few.residual_p95_ms == 0.0
    assert many.residual_p95_ms > 5.0
    rows = many.rows_for_budget(300.0, decoder_rows=140, context=50_000)
    assert many.step_ms(rows, 140, rows * 50_000) + many.residual_p95_ms <= 300.0
    assert many.step_ms(rows + 1, 140, (rows + 1) * 50_000) + many.residual_p95_ms > 300.0
    within = sum(
        each.step_ms
        <= many.step_ms(each.encoder_rows, each.decoder_rows, each.row_context_products) + many.residual_p95_ms
        for each in random_samples(random.Random(14), 1_000, noise=0.05)
    )
    assert within > 930


def test_rows_for_budget_is_zero_when_an_empty_step_is_too_long() -> None:
    assert seed_model().rows_for_budget(20.0, decoder_rows=0, context=0) == 0


def test_context_noise_of_a_short_calibration_is_not_believed() -> None:
    generator = random.Random(16)
    shapes = [(16, 16, 16), (64, 64, 64), (384, 384, 384), (384, 1, 384), (32, 32, 384), (64, 1, 384)]
    noisy = [sample(*shape, factor=generator.gauss(1, 0.1)) for shape in shapes]
    model = calibrated_from(noisy, warmup_steps=0)
    assert model.coefficients[3] == 0.0
    assert model.calibration == model.coefficients
    # Real steps with long contexts teach it: a term calibrated at 0 is not clamped.
    taught = replace(model, calibration=(*MACHINE[:3], 0.0))
    taught = observe_all(taught, random_samples(random.Random(17), 400, noise=0.01))
    assert taught.coefficients[3] == pytest.approx(MACHINE[3], rel=0.05)


def test_calibration_refuses_too_few_steps() -> None:
    usable = random_samples(random.Random(15), 3, noise=0.0)
    with pytest.raises(ValueError, match="3 usable of 4 steps, expected at least 4"):
        calibrated_from([*usable, replace(usable[0], flagged=True)])


def test_report_and_layer_time_say_what_the_model_says() -> None:
    model = seed_model()
    assert model.report() == StepModelReport(
        a_ms=25.4, enc_ms_per_row=10.73e-3, dec_ms_per_row=10.73e-3, ctx_ms_per_mega=0.0, residual_p95_ms=0.0, samples=0
    )
    assert model.layer_ms(80.0, num_layers=40) == 2.0


@given(
    steps=st.lists(
        st.tuples(
            st.integers(1, 40_000), st.integers(0, 40_000), st.integers(0, 1_000_000), st.floats(0.01, 100_000.0)
        ),
        max_size=40,
    ),
    is_calibrated=st.booleans(),
)
def test_coefficients_are_never_negative(steps: list[tuple[int, int, int, float]], is_calibrated: bool) -> None:
    model = warm_calibration() if is_calibrated else seed_model(warmup_steps=0)
    for rows, decoder_rows, context, step_ms in steps:
        model = model.observe(
            StepSample(
                step_ms=step_ms,
                encoder_rows=rows,
                decoder_rows=decoder_rows,
                row_context_products=rows * context,
            )
        )
        assert min(model.coefficients) >= 0
        assert model.coefficients[1] > 0
        assert model == model.observe(replace(sample(1, 1, 1), flagged=True))
