"""What one op case is: inputs, a call, and what it moves and computes. op_cases and cache_cases make them."""

from collections.abc import Callable
from dataclasses import dataclass

from gpu_run.op_inputs import Maker
from torch import Tensor

from prefill_kernels.ops import Ops

EPS = 1e-20
Call = Callable[[Ops], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """build(maker) makes inputs and returns the call, so that only one case's inputs are in memory. mma: number class of the
    products, "" for none. priority: lower is measured first. exact: bits must equal `ref`'s."""

    name: str
    build: Callable[[Maker], Call]
    flops: float
    bytes: float
    mma: str = ""
    exact: bool = False
    priority: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """rows of the step, compressed entries visible, experts held here."""

    rows: int
    entries: int
    experts: int
