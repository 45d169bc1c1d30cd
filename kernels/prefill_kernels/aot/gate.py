"""What the AOT gate refuses (decisions C23). Pure: figures of compiled kernels in, sentences out.

It holds for the configurations in use; alternatives are printed with their figures and judged by nobody.
"""

from dataclasses import dataclass

from prefill_kernels.aot.figures import Figures
from prefill_kernels.aot.limits import LIMITS, programs_per_sm
from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip

MAX_COMPILE_CPU_S = 60.0
"""Bound of one compilation, in processor seconds: kernels take 1 to 10 (a loop unrolled by mistake takes minutes)."""
_UNITS = {Chip.SM_90: "wgmma", Chip.SM_100: "tcgen05"}
_MAX_GRID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One case on one chip. figures None: it did not compile, and `failure` says why."""

    case: AotCase
    chip: Chip
    figures: Figures | None
    failure: str = ""


def violations(result: Result) -> list[str]:
    """What is wrong with a configuration in use, each with the value and the limit; [] for an alternative."""
    if not result.case.default:
        return []
    if result.figures is None:
        return [f"does not compile: {result.failure}"]
    return [*_size_violations(result.case, result.chip, result.figures), *_mma_violations(result)]


def _size_violations(case: AotCase, chip: Chip, figures: Figures) -> list[str]:
    limits = LIMITS[chip]
    found = []
    if figures.is_trap_stub:
        found.append("traps instead of computing (the PTX has a trap instruction): expected none")
    if figures.spills or figures.stack_bytes:
        found.append(f"{figures.spills} spill instructions, {figures.stack_bytes} stack bytes: expected 0 and 0")
    if figures.shared_bytes > limits.shared_bytes:
        found.append(f"{figures.shared_bytes} bytes of shared memory: at most {limits.shared_bytes}")
    if figures.tensor_memory_columns > limits.tensor_memory_columns:
        found.append(
            f"{figures.tensor_memory_columns} columns of tensor memory: at most {limits.tensor_memory_columns}"
        )
    if not found and occupancy(chip, figures) < 1:
        found.append(f"{figures.registers} registers x {figures.num_warps} warps: not one program fits an SM")
    if figures.compile_cpu_s > MAX_COMPILE_CPU_S:
        found.append(f"compiled in {figures.compile_cpu_s:.0f} s of processor time: at most {MAX_COMPILE_CPU_S:.0f}")
    if not 0 < case.num_programs <= _MAX_GRID:
        found.append(f"{case.num_programs} programs: expected 1 to {_MAX_GRID}")
    return found


def _mma_violations(result: Result) -> list[str]:
    """The expected family on the chip's own matrix unit (SYNC_BF16: by mma.sync), and nothing else."""
    assert result.figures is not None
    mma, unit = result.case.mma, _UNITS[result.chip]
    if mma not in LIMITS[result.chip].peaks:
        return [f"expects {mma} matrix instructions, which {result.chip.name.lower()} does not have"]
    match mma:
        case Mma.NONE:
            expected = []
        case Mma.SYNC_BF16:
            expected = [f"mma.sync {Mma.BF16}"]
        case _:
            expected = [f"{unit} {mma}"]
    found = list(result.figures.mma)
    if found == expected:
        return []
    return [f"matrix instructions {', '.join(found) or 'none'}: expected {', '.join(expected) or 'none'} only"]


def occupancy(chip: Chip, figures: Figures) -> int:
    """Programs per SM, estimated from registers, warps, shared and tensor memory."""
    return programs_per_sm(
        chip,
        registers=figures.registers,
        num_warps=figures.num_warps,
        shared_bytes=figures.shared_bytes,
        tensor_memory_columns=figures.tensor_memory_columns,
    )
