"""Random values for every kind of tensor, scaled so that a random model behaves like one: no saturated gates, no dead routers,
attention that looks at its context, logits with a standard deviation near 3.

Used by checkpoint_writer.py. Values depend on the seed and the tensor's name alone, never on order or sharding.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from prefill_engine.model.tensor_names import BLOCK, Rule, Storage

_PIECE_VALUES = 1 << 24
"""Values generated at once: bounds memory at any table size."""


@dataclass(frozen=True, slots=True)
class _Normal:
    """Normal distribution; with per_fan_in the deviation is `std` / sqrt(columns), so a unit-variance input gives `std`."""

    mean: float
    std: float
    per_fan_in: bool = False


_MATRIX = _Normal(0.0, 1.0, per_fan_in=True)
_NORM = _Normal(1.0, 0.15)
_VECTOR = _Normal(0.0, 0.1)
_BY_NAME = {
    "embed.weight": _Normal(0.0, 1.0),
    "head.weight": _Normal(0.0, 3.0, per_fan_in=True),
    "attn.attn_sink": _Normal(0.4, 0.4),
    "attn.wq_b.weight": _Normal(0.0, 2.0, per_fan_in=True),
    "attn.wo_b.weight": _Normal(0.0, 0.5, per_fan_in=True),
    "attn.compressor.wgate.weight": _Normal(0.0, 1.5, per_fan_in=True),
    "attn.indexer.weights_proj.weight": _Normal(0.0, 2.0, per_fan_in=True),
    "hc_attn_base": _Normal(0.0, 0.5),
    "hc_ffn_base": _Normal(0.0, 0.5),
    "hc_attn_scale": _Normal(0.7, 0.1),
    "hc_ffn_scale": _Normal(0.7, 0.1),
    "ffn.gate.weight": _Normal(0.0, 1.6, per_fan_in=True),
    "ffn.gate.bias": _Normal(0.0, 0.25),
    "ffn.gate.bias_vl": _Normal(0.0, 0.25),
    "ffn.shared_experts.w2.weight": _Normal(0.0, 0.5, per_fan_in=True),
    "w2.weight": _Normal(0.0, 0.5, per_fan_in=True),
    "engram.embed.weight": _Normal(0.0, 1.0),
    "engram.wkv.weight": _Normal(0.0, 0.5, per_fan_in=True),
    "engram.q_weight": _Normal(1.0, 0.3),
    "engram.k_weight": _Normal(1.0, 0.3),
    "image_start": _Normal(0.0, 0.8),
    "image_newline": _Normal(0.0, 0.8),
    "image_end": _Normal(0.0, 0.8),
    "attn.wo.weight": _Normal(0.0, 0.5, per_fan_in=True),
    "mlp.w2.weight": _Normal(0.0, 0.1, per_fan_in=True),
}
"""By rule name, where the default of the kind does not do. Their effect is a test: test_random_weights."""


def random_pieces(name: str, rule: Rule, shape: tuple[int, ...], *, seed: int) -> Iterator[Tensor]:
    """The tensor's float32 values in consecutive row blocks; each but the last has a multiple of 32 rows.

    Args:
        shape: logical shape, i.e. unpacked for fp4.
    """
    normal = _BY_NAME.get(rule.name) or _default(rule, shape)
    std = normal.std / math.sqrt(shape[-1]) if normal.per_fan_in else normal.std
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "little"))
    rows_per_piece = max(1, _PIECE_VALUES // (math.prod(shape[1:]) * BLOCK)) * BLOCK
    for start in range(0, shape[0], rows_per_piece):
        rows = min(rows_per_piece, shape[0] - start)
        yield torch.randn((rows, *shape[1:]), generator=generator).mul_(std).add_(normal.mean)


def _default(rule: Rule, shape: tuple[int, ...]) -> _Normal:
    if rule.storage is Storage.NORM:
        return _NORM
    return _MATRIX if len(shape) > 1 else _VECTOR
