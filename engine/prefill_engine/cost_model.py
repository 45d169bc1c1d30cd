"""How long a step takes: a linear model of its rows, fitted to the machine it runs on (serving.md 2.2, C47).

    step_ms = a + enc * encoder rows + dec * decoder rows + ctx * sum(rows * chunk end) / 1e6

The rank feeds one StepSample per finished step to observe(); the scheduler, the wait estimates and the heartbeats read
the result. Frozen: observe() returns a new model. The trap: a sample must describe the work of the step on this rank,
and steps that compiled, allocated or ran a placeholder must be flagged or left out, else they poison the fit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prefill_engine.messages import StepModelReport

Vector = tuple[float, float, float, float]
Matrix = tuple[Vector, Vector, Vector, Vector]

FORGETTING = 0.995  # serving.md 2.2: a step 138 steps ago counts half
WARMUP_STEPS = 20  # serving.md 2.2
CLAMP = 0.5  # serving.md 2.2: +-50 % of the start-up calibration
SEED: Vector = (25.4, 10.73e-3, 10.73e-3, 0.0)  # fit of the published points (perf.md 2); both halves have 20 layers

_RESIDUALS_KEPT = 128
_RESIDUALS_TRUSTED = 20  # fewer say nothing about a 95th percentile
_OUTLIER = 6.0  # times the median residual; a pause of the machine must not move the model
_PRIOR = 1e-4  # weight of the starting coefficients against one step; decides only what the steps leave open
_LEAST_ENC_MS = 1e-6  # work is never free: charges and orders need a positive cost
_SIGNIFICANT = 20.0  # F ratio; with the few steps of a start-up, noise alone reaches it in one calibration of twenty
# Coefficients are fitted per step, 1,000 rows, 1,000 rows and 1e9 products: all of one magnitude.
_UNITS: Vector = (1.0, 1e3, 1e3, 1e3)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One measured step. Counts as in CostModel.step_ms; flagged: it compiled, allocated or was disturbed; ignored."""

    step_ms: float
    encoder_rows: int
    decoder_rows: int
    row_context_products: int
    flagged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The coefficients now, and what is needed to refine them. Build with seed_model() or calibrated_from().

    coefficients: a (ms), enc, dec (ms per row), ctx (ms per million row-context products); never negative.
    calibration: the same at start-up; None = never calibrated: ctx stays 0 and nothing is clamped.
    warmup_left: real steps still to be ignored. num_samples: steps observed after that.
    residuals: |measured - predicted| in ms of the latest steps, oldest first.
    gram, moment: forgetting-weighted normal equations, in _UNITS.
    """

    coefficients: Vector
    calibration: Vector | None
    warmup_left: int
    num_samples: int
    residuals: tuple[float, ...]
    gram: Matrix
    moment: Vector

    @property
    def residual_p95_ms(self) -> float:
        """95th percentile of the latest residuals; 0 until there are enough of them."""
        if len(self.residuals) < _RESIDUALS_TRUSTED:
            return 0.0
        ranked = sorted(self.residuals)
        return ranked[math.ceil(0.95 * len(ranked)) - 1]

    def step_ms(self, encoder_rows: int, decoder_rows: int, row_context_products: int) -> float:
        """Predicted milliseconds of a step.

        Args:
            encoder_rows: all rows of the step, new and replayed.
            decoder_rows: rows at or above the decoder floor, and one placeholder per unfinished chunk.
            row_context_products: sum over chunks of rows * chunk end.
        """
        return self.coefficients[0] + self.rows_ms(encoder_rows, decoder_rows, row_context_products)

    def rows_ms(self, encoder_rows: int, decoder_rows: int, row_context_products: int) -> float:
        """What these rows add to a step that runs anyway."""
        _, enc, dec, ctx = self.coefficients
        return enc * encoder_rows + dec * decoder_rows + ctx * row_context_products / 1e6

    def rows_for_budget(self, budget_ms: float, *, decoder_rows: int, context: int) -> int:
        """Most encoder rows of a step that stays within the budget in 95 % of cases.

        Args:
            budget_ms: limit of the whole step.
            decoder_rows: decoder rows of the step.
            context: chunk end, taken as equal for all rows.

        Returns:
            Rows >= 0; 0 when not even an empty step fits.
        """
        a, enc, dec, ctx = self.coefficients
        spare_ms = budget_ms - self.residual_p95_ms - a - dec * decoder_rows
        return max(0, math.floor(spare_ms / (enc + ctx * context / 1e6)))

    def layer_ms(self, step_ms: float, *, num_layers: int) -> float:
        """What one layer of such a step should take: the heartbeat's expectation (C44)."""
        return step_ms / num_layers

    def observe(self, sample: StepSample) -> "CostModel":
        """The model after one more real step. Recursive least squares in information form: exact, and it cannot wind up
        when all steps look alike, because what the steps leave open falls back to the starting coefficients."""
        if sample.flagged:
            return self
        if self.warmup_left:
            return replace(self, warmup_left=self.warmup_left - 1)
        predicted_ms = self.step_ms(sample.encoder_rows, sample.decoder_rows, sample.row_context_products)
        error_ms = sample.step_ms - predicted_ms
        seen = replace(
            self, num_samples=self.num_samples + 1, residuals=(*self.residuals, abs(error_ms))[-_RESIDUALS_KEPT:]
        )
        if abs(error_ms) > self._outlier_ms(predicted_ms):
            return seen
        gram, moment = _add_sample(self.gram, self.moment, _features(sample), sample.step_ms)
        return replace(
            seen,
            gram=gram,
            moment=moment,
            coefficients=_fit(gram, moment, prior=self.calibration or SEED, bounds=_bounds(self.calibration)),
        )

    def report(self) -> StepModelReport:
        """The model as WatchLoad and the metrics show it."""
        a, enc, dec, ctx = self.coefficients
        return StepModelReport(
            a_ms=a,
            enc_ms_per_row=enc,
            dec_ms_per_row=dec,
            ctx_ms_per_mega=ctx,
            residual_p95_ms=self.residual_p95_ms,
            samples=self.num_samples,
        )

    def _outlier_ms(self, predicted_ms: float) -> float:
        """Steps with a larger error do not move the fit, only the residuals. A machine that became slower for good thus
        raises the median, and with it this limit, and is followed after 64 steps at most."""
        if len(self.residuals) < _RESIDUALS_TRUSTED:
            return math.inf
        median = sorted(self.residuals)[len(self.residuals) // 2]
        return max(_OUTLIER * median, 0.02 * predicted_ms)


def seed_model(*, warmup_steps: int = WARMUP_STEPS) -> CostModel:
    """The published fit, for a machine that was not calibrated. ctx = 0 until it is (C47)."""
    return CostModel(
        coefficients=SEED,
        calibration=None,
        warmup_left=warmup_steps,
        num_samples=0,
        residuals=(),
        gram=_ZERO_MATRIX,
        moment=_ZERO_VECTOR,
    )


def calibrated_from(samples: Sequence[StepSample], *, warmup_steps: int = WARMUP_STEPS) -> CostModel:
    """A model fitted to start-up steps; later fits stay within +-50 % of it.

    Start-up contexts are short, so the context term is often noise. It is 0 unless it clearly explains the steps; a term
    calibrated at 0 has no clamp and real steps may raise it.

    Args:
        samples: steps of different row counts, decoder shares and contexts, at least 4 of them not flagged.
        warmup_steps: real steps to ignore before the model is refined further; 0 when these samples were warm.

    Raises:
        ValueError: fewer than 4 usable samples.
    """
    usable = [sample for sample in samples if not sample.flagged]
    if len(usable) < 4:
        raise ValueError(f"calibration got {len(usable)} usable of {len(samples)} steps, expected at least 4")
    gram, moment = _ZERO_MATRIX, _ZERO_VECTOR
    for sample in usable:
        gram, moment = _add_sample(gram, moment, _features(sample), sample.step_ms)
    plain, full = (
        _fit(gram, moment, prior=_ZERO_VECTOR, bounds=_bounds(None, with_context=with_context))
        for with_context in (False, True)
    )
    unexplained = _squared_error(full, usable)
    gain = _squared_error(plain, usable) - unexplained
    coefficients = full if gain * (len(usable) - len(full)) > _SIGNIFICANT * unexplained else plain
    return CostModel(
        coefficients=coefficients,
        calibration=coefficients,
        warmup_left=warmup_steps,
        num_samples=0,
        residuals=(),
        gram=gram,
        moment=moment,
    )


_ZERO_VECTOR: Vector = (0.0, 0.0, 0.0, 0.0)
_ZERO_MATRIX: Matrix = (_ZERO_VECTOR, _ZERO_VECTOR, _ZERO_VECTOR, _ZERO_VECTOR)
_TERMS = range(4)


def _vector(values: Sequence[float]) -> Vector:
    a, enc, dec, ctx = values
    return a, enc, dec, ctx


def _squared_error(coefficients: Vector, samples: Sequence[StepSample]) -> float:
    """Sum of squared errors in ms^2."""
    scaled = [value * unit for value, unit in zip(coefficients, _UNITS, strict=True)]
    predicted = (sum(a * b for a, b in zip(scaled, _features(each), strict=True)) for each in samples)
    return sum((each.step_ms - predicted_ms) ** 2 for each, predicted_ms in zip(samples, predicted, strict=True))


def _features(sample: StepSample) -> Vector:
    return 1.0, sample.encoder_rows / 1e3, sample.decoder_rows / 1e3, sample.row_context_products / 1e9


def _add_sample(gram: Matrix, moment: Vector, features: Vector, step_ms: float) -> tuple[Matrix, Vector]:
    rows = [_vector([FORGETTING * gram[i][j] + features[i] * features[j] for j in _TERMS]) for i in _TERMS]
    return (rows[0], rows[1], rows[2], rows[3]), _vector(
        [FORGETTING * moment[i] + features[i] * step_ms for i in _TERMS]
    )


def _bounds(calibration: Vector | None, *, with_context: bool = False) -> tuple[tuple[float, float], ...]:
    """Allowed range of each coefficient, in _UNITS."""
    if calibration is None:
        context = (0.0, math.inf if with_context else 0.0)
        return (0.0, math.inf), (_LEAST_ENC_MS * _UNITS[1], math.inf), (0.0, math.inf), context
    scaled = [value * unit for value, unit in zip(calibration, _UNITS, strict=True)]
    return tuple((value * (1 - CLAMP), value * (1 + CLAMP) if value else math.inf) for value in scaled)


def _fit(gram: Matrix, moment: Vector, *, prior: Vector, bounds: Sequence[tuple[float, float]]) -> Vector:
    """Least squares within bounds: solve, fix what is out of bounds at its bound, solve the rest again.

    At most four rounds; a term once fixed stays fixed in this fit, the next step starts afresh.
    """
    target = [value * unit for value, unit in zip(prior, _UNITS, strict=True)]
    fixed: dict[int, float] = {i: low for i, (low, high) in enumerate(bounds) if low == high}
    while True:
        free = [i for i in _TERMS if i not in fixed]
        matrix = [[gram[i][j] + (_PRIOR if i == j else 0.0) for j in free] for i in free]
        right = [moment[i] + _PRIOR * target[i] - sum(gram[i][j] * value for j, value in fixed.items()) for i in free]
        solved = dict(zip(free, _solve(matrix, right), strict=True))
        outside = {
            i: min(max(value, bounds[i][0]), bounds[i][1])
            for i, value in solved.items()
            if not bounds[i][0] <= value <= bounds[i][1]
        }
        if not outside:
            return _vector([(solved | fixed)[i] / _UNITS[i] for i in _TERMS])
        fixed |= outside


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solution of a small positive definite system by elimination (the prior keeps every pivot positive)."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        for below in rows[i + 1 :]:
            factor = below[i] / rows[i][i]
            for j in range(i, size + 1):
                below[j] -= factor * rows[i][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
