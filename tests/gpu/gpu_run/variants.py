"""Second configurations of sm_90, beside those in use: checked as they are, timed at the same shapes (perf.md 7.2).

fp8 products of experts ("promoted"), weights expanded at load, and these through cuBLAS. Which of them the model should take is
for these figures to say; none of them is bound in triton_ops.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from gpu_run.op_case import Scale
from gpu_run.op_cases import op_cases
from gpu_run.sections import Bench, time_case, verdict_of

from prefill_kernels.gpu import experts, library_linear, matmul
from prefill_kernels.gpu.chip import Chip, chip_of
from prefill_kernels.gpu.expanded_weight import expand_weight
from prefill_kernels.number_formats import quantise_fp8_ue8m0
from prefill_kernels.ops import Ops, Rows
from prefill_testing.shapes import RELEASED, OpShapes

_DENSE = ("linear wq_b", "linear wo_b")
_EXPERTS = ("routed_experts", "shared_expert")


def time_variants(bench: Bench, num_rows: int, *, shapes: OpShapes = RELEASED) -> None:
    """Rows of the results' kernel table, "op, variant"; a variant that differs from `ref` is told among the correctness."""
    if not bench.is_dry and chip_of(bench.device) is not Chip.SM_90:
        bench.log.say("no second configurations on this chip")
        return
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # as library_linear asks for
    for variant, ops, names in variants(bench.ops):
        for small, large in zip(
            op_cases(shapes, Scale(rows=300, entries=4096, experts=8)),
            op_cases(shapes, Scale(rows=num_rows, entries=65536, experts=52)),
            strict=True,
        ):
            if small.name not in names or not bench.log.has_time(f"{small.name}, {variant}", 20):
                continue
            name, changed = f"{small.name}, {variant}", replace(bench, ops=ops)
            bench.log.results.setdefault("correctness", {})[name] = verdict_of(changed, small)
            time_case(changed, replace(large, name=name), num_rows)


def variants(ops: Ops) -> list[tuple[str, Ops, tuple[str, ...]]]:
    """(name, the op set with that variant in place, cases that meet it)."""
    expanded: dict[int, Any] = {}
    codes: dict[int, Any] = {}

    def expand(weight: Any) -> Any:
        # The weight is kept, so that its id is not given to another one.
        return expanded.setdefault(id(weight), (weight, expand_weight(weight)))[1]

    def as_codes(x: Rows) -> Rows:
        if id(x) not in codes:
            data, scales = quantise_fp8_ue8m0(x.plain)
            codes[id(x)] = (x, Rows(plain=x.plain, seen=data, scales=scales))
        return cast(Rows, codes[id(x)][1])

    def with_expanded(linear: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, weight, **options: linear(x, expand(weight), chip=Chip.SM_90, **options)

    def with_codes(op: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *rest, **options: op(as_codes(x), *rest, chip=Chip.SM_90, **options)

    promoted = {name: with_codes(getattr(experts, name)) for name in _EXPERTS}
    return [
        ("expanded", _changed(ops, linear=with_expanded(matmul.linear)), _DENSE),
        ("cuBLAS", _changed(ops, linear=with_expanded(library_linear.linear)), _DENSE),
        ("promoted fp8", _changed(ops, **promoted), _EXPERTS),
    ]


def _changed(ops: Ops, **changes: Callable[..., Any]) -> Ops:
    names = (name for name in vars(Ops) if not name.startswith("_"))
    return cast(Ops, SimpleNamespace(**{name: getattr(ops, name) for name in names} | changes))
