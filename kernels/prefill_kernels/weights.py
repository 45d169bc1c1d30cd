"""Weights as a checkpoint stores them. Ops take these; nothing is expanded at load time (model.md 3.2)."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWeight:
    """Unquantised matrix.

    data: [..., out, in] bfloat16 or float32.
    """

    data: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """e4m3 matrix with one ue8m0 scale per 32 x 32 tile.

    data: [..., out, in] float8_e4m3fn. scale: [..., ceil(out/32), ceil(in/32)] uint8, value 2**(byte - 127).
    """

    data: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4Weight:
    """e2m1 matrix, two values per byte, with one ue8m0 scale per row and 32 columns.

    data: [..., out, in/2] uint8, low nibble = even column. scale: [..., out, in/32] uint8.
    """

    data: Tensor
    scale: Tensor


Weight = DenseWeight | Fp8Weight | Fp4Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Matrices of experts; routed ones carry a leading [num_local_experts] axis, the shared expert none.

    w1: gate [.., inter, hidden]; w3: up [.., inter, hidden]; w2: down [.., hidden, inter].
    """

    w1: Weight
    w3: Weight
    w2: Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramTable:
    """Hash table of one Engram layer.

    data: [rows, head_dim] float8_e4m3fn with scale [rows, head_dim/32] uint8 (ue8m0); a dense checkpoint has bfloat16
        data and no scale.
    """

    data: Tensor
    scale: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MhcWeights:
    """Hyper-connection of one sub-layer, fp32: fn [2S + S*S, S*D], base [2S + S*S], scale [3]."""

    fn: Tensor
    base: Tensor
    scale: Tensor
