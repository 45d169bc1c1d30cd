"""Regimes of the golden data: which numerics to run, which expected values to compare with, how closely (golden README, C9)."""

from dataclasses import dataclass

import torch

from prefill_engine.check.compare import GrossLimits, Limits
from prefill_kernels.numerics import Numerics

# README: hidden tensors 5e-4, logits 2e-3, all selections equal; the dequantised checkpoint 2e-3 for everything.
_EXACT = Limits(value=5e-4, logits=2e-3)
_LOADED = Limits(value=2e-3, logits=2e-3)
# C9: float64 activations, then rows >= 0.95, elements >= 0.98, argmax >= 0.98; steps of the README.
_QUANTISED = Limits(value=1e-4, logits=0.02, values=0.98, rows=0.95, argmax=0.98)
# README: a bf16 engine against fp32, for prompts of 64 tokens and up; against quantised values gross checks only.
_BF16 = GrossLimits(median=0.2, quantile=0.9, argmax=0.93, least_rows=64, short_median=0.8)
_NOISY = GrossLimits(median=0.8, quantile=None, argmax=0.8, least_rows=1, short_median=0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """prefix: of the expected tensors. One of `limits` (every tensor) and `gross` (logits statistics) is set.

    runs_replays: chunked, replayed and chunk-state cases are run too; their expected values exist in few regimes.
    """

    name: str
    prefix: str
    numerics: Numerics
    limits: Limits | None = None
    gross: GrossLimits | None = None
    runs_replays: bool = False


def _numerics(activation: torch.dtype, *, activations: bool, cache: bool) -> Numerics:
    return Numerics(activation=activation, quantise_activations=activations, quantise_cache=cache)


REGIMES = (
    Regime(
        name="fp32",
        prefix="fp32",
        numerics=_numerics(torch.float32, activations=False, cache=False),
        limits=_EXACT,
        runs_replays=True,
    ),
    Regime(
        name="fp32q",
        prefix="fp32q",
        numerics=_numerics(torch.float64, activations=False, cache=True),
        limits=_QUANTISED,
        runs_replays=True,
    ),
    Regime(
        name="bf16",
        prefix="fp32",
        numerics=_numerics(torch.bfloat16, activations=False, cache=False),
        gross=_BF16,
    ),
    Regime(
        name="bf16q",
        prefix="fp32q",
        numerics=_numerics(torch.bfloat16, activations=False, cache=True),
        gross=_NOISY,
    ),
    Regime(
        name="w_fp32",
        prefix="w_fp32",
        numerics=_numerics(torch.float32, activations=False, cache=False),
        limits=_LOADED,
    ),
    Regime(
        name="quant32",
        prefix="quant32",
        numerics=_numerics(torch.float64, activations=True, cache=True),
        limits=_QUANTISED,
    ),
    Regime(
        name="quant",
        prefix="quant",
        numerics=_numerics(torch.bfloat16, activations=True, cache=True),
        gross=_NOISY,
    ),
)
