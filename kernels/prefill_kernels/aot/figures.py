"""What a compiled kernel is made of, read out of PTX, SASS and cuobjdump's text. Pure; `compile` calls it.

The trap: a kernel over the limit of tensor memory still compiles, to a stub that only traps; so `is_trap_stub` is a figure.
"""

import re
from dataclasses import dataclass

from prefill_kernels.aot_case import Mma

_OPERANDS = {"bf16": Mma.BF16, "f16": Mma.BF16, "tf32": Mma.TF32, "e4m3": Mma.FP8, "e5m2": Mma.FP8}
_TCGEN05_KINDS = {"f16": Mma.BF16, "tf32": Mma.TF32, "f8f6f4": Mma.FP8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One kernel compiled for one chip.

    spills: local loads and stores in the machine code. shared_bytes: of one program. tensor_memory_columns: of 512.
    mma: "wgmma bf16", "tcgen05 block_scaled", "mma.sync bf16", .. -> number of such instructions.
    compile_cpu_s: processor time of the compiler, all its processes.
    """

    registers: int
    stack_bytes: int
    spills: int
    shared_bytes: int
    tensor_memory_columns: int
    num_warps: int
    mma: dict[str, int]
    is_trap_stub: bool
    compile_cpu_s: float


def matrix_instructions(ptx: str) -> dict[str, int]:
    """Instruction and family of every matrix product in the PTX -> count."""
    counts: dict[str, int] = {}
    for line in re.findall(r"\b(?:wgmma\.mma_async|tcgen05\.mma(?!\.)|tcgen05\.mma\.|mma\.sync)[\w.:]*", ptx):
        name = _instruction(line)
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def _instruction(text: str) -> str:
    if text.startswith("tcgen05"):
        kind = re.search(r"kind::(\w+)", text)
        family = Mma.BLOCK_SCALED if "block_scale" in text else _TCGEN05_KINDS.get(kind[1] if kind else "")
        return f"tcgen05 {family or (kind[1] if kind else text)}"
    family = next((_OPERANDS[part] for part in text.split(".") if part in _OPERANDS), None)
    return f"{'wgmma' if text.startswith('wgmma') else 'mma.sync'} {family or text}"


def is_trap_stub(ptx: str) -> bool:
    """Whether the kernel traps: instead of running it ends the process's context."""
    return re.search(r"^\s*trap;", ptx, re.MULTILINE) is not None


def registers_and_stack(resource_usage: str) -> tuple[int, int]:
    """(registers per thread, stack bytes) from `cuobjdump -res-usage`.

    Raises:
        ValueError: the text names no registers.
    """
    found = re.search(r"REG:(\d+) STACK:(\d+)", resource_usage)
    if found is None:
        raise ValueError(f"cuobjdump -res-usage printed {resource_usage[:200]!r}: expected REG:.. STACK:..")
    return int(found[1]), int(found[2])


def count_spills(sass: str) -> int:
    """Local loads and stores in `nvdisasm`'s text."""
    return len(re.findall(r"\b(?:LDL|STL)\b", sass))
