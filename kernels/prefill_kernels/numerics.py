"""What is rounded where: the one value that turns the same model into production, golden or check numerics.

Every op that rounds takes a Numerics. The trap: `activation` is what model.md writes as bf(.), so an op that forgets it
computes the fp32 regime and still looks right in every fp32 test.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Rounding points of one run (decisions C8).

    activation: dtype of activations; bf(x) of model.md rounds to it. bfloat16 in production, float32 or
        float64 in checks.
    quantise_activations: e4m3/ue8m0 per 32 channels before every fp8 or fp4 matmul (model.md 3.3). Dense weights
        never are.
    quantise_cache: window KV e4m3 per 32, main KV e2m1 per 16 (or e4m3 per 32), index queries and keys e2m1 per 32.
        False needs a KvCache in the test-only raw format.
    """

    activation: torch.dtype
    quantise_activations: bool
    quantise_cache: bool

    @property
    def wide(self) -> torch.dtype:
        """Accumulation dtype: float64 for float64 activations, else float32."""
        return torch.float64 if self.activation == torch.float64 else torch.float32


PRODUCTION = Numerics(activation=torch.bfloat16, quantise_activations=True, quantise_cache=True)
