"""Which kernels the AOT gate compiles: `aot_cases(chip)` of every module listed here."""

import importlib
import inspect
import pkgutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from prefill_kernels import gpu
from prefill_kernels.aot_case import AotCase
from prefill_kernels.gpu.chip import Chip

GPU_MODULES = (
    "embed_tokens",
    "rows",
    "ring_rows",
    "gather_blocks",
    "rope_device",
    "norm_rows",
    "matmul",
    "grouped_linear",
    "mhc",
    "engram",
    "window_rows",
    "main_entries",
    "pool_pairs",
    "index_rows",
    "index_scores",
    "index_top_k",
    "sparse_attention",
    "route",
    "expert_rows",
    "experts",
    "combine_experts",
    "vision_rows",
    "vision_linear",
    "vision_attention",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """cases: (chip, case) in the order of the list. problems: what is missing or stands there twice."""

    cases: tuple[tuple[Chip, AotCase], ...]
    problems: tuple[str, ...]


def load_cases(chips: Sequence[Chip], modules: Sequence[str] = GPU_MODULES) -> Catalogue:
    """Cases of these modules for these chips. Of all modules: also which kernel of the package has none."""
    cases: list[tuple[Chip, AotCase]] = []
    problems: list[str] = []
    for name in modules:
        module = _module(name)
        if isinstance(module, str) or not hasattr(module, "aot_cases"):
            problems.append(module if isinstance(module, str) else f"{module.__name__} has no aot_cases")
            continue
        cases += [(chip, case) for chip in chips for case in module.aot_cases(chip)]
    problems += _repeated(cases)
    if modules == GPU_MODULES:
        package = [_module(info.name) for info in pkgutil.iter_modules(gpu.__path__)]
        sound = [module for module in package if isinstance(module, ModuleType)]
        problems += [module for module in package if isinstance(module, str) and module not in problems]
        problems += uncovered(sound, [case for _, case in cases])
    return Catalogue(cases=tuple(cases), problems=tuple(problems))


def uncovered(modules: Sequence[ModuleType], cases: Sequence[AotCase]) -> list[str]:
    """Kernels (by the house's name, `_.._kernel`) that these modules define and no case compiles."""
    compiled = {id(case.kernel) for case in cases}
    return [
        f"{module.__name__}.{name} has no AOT case"
        for module in modules
        for name, kernel in inspect.getmembers(module, lambda value: isinstance(value, JITFunction))
        if name.endswith("_kernel") and kernel.__module__ == module.__name__ and id(kernel) not in compiled
    ]


def _module(name: str) -> ModuleType | str:
    """The module, or why there is none."""
    full = f"prefill_kernels.gpu.{name}"
    try:
        return importlib.import_module(full)
    except ImportError as error:
        return f"{full} does not import: {error}"


def _repeated(cases: Sequence[tuple[Chip, AotCase]]) -> list[str]:
    count = Counter((chip, case.name) for chip, case in cases)
    return [
        f"{number} AOT cases are named {name!r} for {chip.name.lower()}"
        for (chip, name), number in count.items()
        if number > 1
    ]
