"""Two op sets in lockstep: the model runs on the first, and the second computes every call again from the same inputs.

So each op is compared on the inputs that a real model gives it (pages, ragged batches, candidates, states), and no difference
grows from layer to layer. Tensors that an op writes in place are compared, too.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ops import IndexRows, Ops, Rows
from prefill_kernels.vision_ops import VisionOps

_WRITTEN = {
    "scatter_rows": ("x_MR",),
    "store_main": ("pages_ZER",),
    "store_index": ("data_pages_ZER", "scale_pages_ZES"),
    "pool_pairs": ("state_ZR2C",),
}
"""Arguments an op writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One output of one call. unequal: share of values; relative: L2 distance over L2 length, 0 for integers."""

    op: str
    call: int
    output: str
    unequal: float
    relative: float


class LockstepOps:
    """An Ops or VisionOps whose results are `leading`'s. differences: of every output of every call so far."""

    def __init__(self, leading: Ops | VisionOps, checked: Ops | VisionOps) -> None:
        self._leading, self._checked = leading, checked
        self._packed: dict[int, IndexRows] = {}
        self._kept: list[IndexRows] = []
        self.differences: list[Difference] = []
        self.num_calls = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_calls += 1
        parameters = _parameter_names(name)
        bound = dict(zip(parameters, args, strict=False)) | kwargs
        copies = {key: _copy(bound[key]) for key in _WRITTEN.get(name, ())}
        theirs = {key: self._twin(copies.get(key, value)) for key, value in bound.items()}
        got = getattr(self._checked, name)(**theirs)
        want = getattr(self._leading, name)(**bound)
        if isinstance(want, IndexRows):
            self._remember(want, got)
            got = IndexRows(data=self._checked.index_values(got, numerics=PRODUCTION))
        for path, left, right in _pairs(got, want, "result"):
            self._note(name, path, left, right)
        for key, copy in copies.items():
            self._note(name, key, copy, bound[key])
        return want

    def _twin(self, value: Any) -> Any:
        """The checked set's own form of index rows; everything else is passed as it is."""
        return self._packed[id(value.data)] if isinstance(value, IndexRows) else value

    def _remember(self, leading: IndexRows, checked: IndexRows) -> None:
        self._kept.append(leading)  # so that its id is not given to another tensor
        self._packed[id(leading.data)] = checked

    def _note(self, op: str, output: str, got: Tensor, want: Tensor) -> None:
        where = f"{op} call {self.num_calls} {output}"
        assert got.shape == want.shape, f"{where}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        assert got.dtype == want.dtype, f"{where}: dtype {got.dtype}, expected {want.dtype}"
        unequal = float((got != want).double().mean()) if want.numel() else 0.0
        relative = 0.0
        if want.is_floating_point() and want.numel():
            norm = torch.linalg.vector_norm(want.double()).clamp_min(1e-30)
            relative = float(torch.linalg.vector_norm(got.double() - want.double()) / norm)
        self.differences.append(
            Difference(op=op, call=self.num_calls, output=output, unequal=unequal, relative=relative)
        )


def _parameter_names(op: str) -> list[str]:
    protocol = Ops if hasattr(Ops, op) else VisionOps
    return list(inspect.signature(getattr(protocol, op)).parameters)[1:]


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _pairs(got: Any, want: Any, path: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Tensors of two results, by field. The quantised form of rows is an op set's own affair."""
    if isinstance(want, Tensor):
        yield path, got, want
    elif isinstance(want, Rows):
        yield f"{path}.plain", got.plain, want.plain
    elif isinstance(want, tuple):
        for index, (left, right) in enumerate(zip(got, want, strict=True)):
            yield from _pairs(left, right, f"{path}[{index}]")
    elif is_dataclass(want):
        for field in fields(want):
            yield from _pairs(getattr(got, field.name), getattr(want, field.name), f"{path}.{field.name}")
    else:
        assert got is None, f"{path} is {got!r}, expected {want!r}"
        assert want is None, f"{path}: unexpected {type(want)}"
