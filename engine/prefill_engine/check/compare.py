"""Judges one tensor against its expected value: the tolerances of the golden README, sharpened by decisions C9."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One comparison. worst: the measured number; bound: its limit, an upper one, or a lower one where is_share."""

    regime: str
    group: str
    case: str
    tensor: str
    worst: float
    bound: float
    is_share: bool = False

    @property
    def passed(self) -> bool:
        return self.worst >= self.bound if self.is_share else self.worst <= self.bound

    @property
    def excess(self) -> float:
        """How bad it is: 1 = at its limit, more = out of it."""
        if self.is_share:
            return (1.0 - self.worst) / max(1.0 - self.bound, 1e-9)
        return self.worst / self.bound if self.bound else self.worst * 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Element-wise rule. value, logits: absolute error of hidden tensors and of logits.

    values, rows, argmax: least share of elements within `value`, of rows within `logits` (and of equal selections), of equal
    argmax. 1.0 = all of them, and then the finding shows the worst error instead of a share.
    """

    value: float
    logits: float
    values: float = 1.0
    rows: float = 1.0
    argmax: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrossLimits:
    """Row statistics of logits only: median and 90 % quantile of the rows' largest error, share of equal argmax. For prompts
    shorter than `least_rows` only the median counts, against `short_median`. quantile None: not judged."""

    median: float
    quantile: float | None
    argmax: float
    least_rows: int
    short_median: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadLimits:
    """Distribution of the errors of hidden values that are rounded at every step: largest, 99 % quantile, mean."""

    largest: float
    quantile99: float
    mean: float


class Judge:
    """Collects the findings of one case."""

    def __init__(
        self, limits: Limits, *, regime: str, group: str, case: str, findings: list[Finding] | None = None
    ) -> None:
        """findings: the list to append to; None: one of its own."""
        self.limits = limits
        self.regime = regime
        self.findings: list[Finding] = [] if findings is None else findings
        self._where = {"regime": regime, "group": group, "case": case}

    def values(self, tensor: str, got: Tensor, want: Tensor) -> None:
        """Hidden values, element by element."""
        error = _error(got, want)
        if self.limits.values == 1.0:
            self._add(tensor, float(error.max()) if error.numel() else 0.0, self.limits.value)
        else:
            self._add(tensor, _share(error <= self.limits.value), self.limits.values, is_share=True)

    def spread(self, tensor: str, got: Tensor, want: Tensor, limits: SpreadLimits) -> None:
        """Hidden values by the distribution of their errors."""
        error = _error(got, want).flatten().sort().values
        self._add(f"{tensor} max", float(error[-1]), limits.largest)
        self._add(f"{tensor} 99 %", float(error[int(0.99 * (len(error) - 1))]), limits.quantile99)
        self._add(f"{tensor} mean", float(error.mean()), limits.mean)

    def final_hidden(self, tensor: str, got: Tensor, want: Tensor) -> None:
        """[rows, D] input of the head: as exact as hidden values where those are, else it moves row by row with the logits."""
        if self.limits.values == 1.0:
            self.values(tensor, got, want)
        else:
            self.logits(tensor, got, want)

    def logits(self, tensor: str, got: Tensor, want: Tensor) -> None:
        """[rows, columns] logits."""
        error = _error(got, want).amax(-1)
        if self.limits.rows == 1.0:
            self._add(tensor, float(error.max()), self.limits.logits)
        else:
            self._add(tensor, _share(error <= self.limits.logits), self.limits.rows, is_share=True)

    def argmax(self, tensor: str, got: Tensor, want: Tensor) -> None:
        """[rows] best token."""
        self._add(tensor, _share(got.long() == want.long()), self.limits.argmax, is_share=True)

    def sets(self, tensor: str, got: Tensor, want: Tensor, *, margin: Tensor | None = None) -> None:
        """[rows, ..] chosen numbers, -1 = none, order free; both sides may be padded differently.

        margin: distance of each row's last chosen to the next score; nearer than 2e-5 may fall either way (README).
        """
        equal = torch.tensor(
            [set(a.long().tolist()) - {-1} == set(b.long().tolist()) - {-1} for a, b in zip(got, want, strict=True)]
        )
        if margin is not None:
            equal |= margin.float() < 2e-5
        self._add(tensor, _share(equal), self.limits.rows, is_share=True)

    def exact(self, tensor: str, got: Tensor, want: Tensor) -> None:
        """Bit-exact values: the number of elements that differ."""
        if got.shape != want.shape:
            raise ValueError(f"{tensor}: shape {list(got.shape)}, expected {list(want.shape)}")
        self._add(tensor, float((got != want).sum()), 0.0)

    def statistics(self, got: Tensor, want: Tensor, best: Tensor, want_best: Tensor, gross: GrossLimits) -> None:
        """Row statistics of [rows, columns] logits and [rows] argmax."""
        error = _error(got, want).amax(-1)
        if len(error) < gross.least_rows:
            self._add("logits median (short)", float(error.median()), gross.short_median)
            return
        self._add("logits median", float(error.median()), gross.median)
        if gross.quantile is not None:
            self._add("logits 90 %", float(error.quantile(0.9)), gross.quantile)
        self._add("argmax", _share(best.long() == want_best.long()), gross.argmax, is_share=True)

    def count(self, tensor: str, got: int, want: int) -> None:
        """Integers that must be equal; the finding shows the distance."""
        self._add(tensor, float(abs(got - want)), 0.0)

    def _add(self, tensor: str, worst: float, bound: float, *, is_share: bool = False) -> None:
        # NaN compares false with everything, so it would pass as an upper bound's violation only by luck.
        worst = (0.0 if is_share else float("inf")) if worst != worst else worst
        self.findings.append(Finding(tensor=tensor, worst=worst, bound=bound, is_share=is_share, **self._where))


def _error(got: Tensor, want: Tensor) -> Tensor:
    if got.shape != want.shape:
        raise ValueError(f"shape {list(got.shape)}, expected {list(want.shape)}")
    return (got.double() - want.double()).abs().nan_to_num(nan=torch.inf)


def _share(flags: Tensor) -> float:
    return float(flags.double().mean()) if flags.numel() else 1.0
