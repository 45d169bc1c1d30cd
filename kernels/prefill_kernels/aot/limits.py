"""What a chip can hold and how fast it is at best: the figures that the gate, the occupancy estimate and the bounds use.

Sources: CUDA programming guide (compute capabilities 9.0 and 10.0) and perf.md 3.1 (dense peaks of H200 and B200). Nothing
here was measured by this project.
"""

from dataclasses import dataclass

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip

_WARP_REGISTERS_STEP = 256
_SHARED_BYTES_STEP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipLimits:
    """shared_bytes: of one program. sm_*: of one SM. reserved_shared_bytes: the driver's part of each resident program.
    peaks: FLOP/s by matrix family; Mma.NONE is float32 outside the matrix units."""

    device: str
    num_sms: int
    shared_bytes: int
    tensor_memory_columns: int
    sm_registers: int
    sm_shared_bytes: int
    sm_warps: int
    sm_programs: int
    reserved_shared_bytes: int
    memory_bytes_per_s: float
    peaks: dict[Mma, float]


LIMITS = {
    Chip.SM_90: ChipLimits(
        device="H200",
        num_sms=132,
        shared_bytes=227 << 10,
        tensor_memory_columns=0,
        sm_registers=64 << 10,
        sm_shared_bytes=228 << 10,
        sm_warps=64,
        sm_programs=32,
        reserved_shared_bytes=1 << 10,
        memory_bytes_per_s=4.8e12,
        # mma.sync reaches about 60 % of wgmma in published measurements; no figure for sm_100, taken as the same per SM.
        peaks={Mma.NONE: 67e12, Mma.SYNC_BF16: 600e12, Mma.BF16: 989e12, Mma.TF32: 494e12, Mma.FP8: 1979e12},
    ),
    Chip.SM_100: ChipLimits(
        device="B200",
        num_sms=148,
        shared_bytes=227 << 10,
        tensor_memory_columns=512,
        sm_registers=64 << 10,
        sm_shared_bytes=228 << 10,
        sm_warps=64,
        sm_programs=32,
        reserved_shared_bytes=1 << 10,
        memory_bytes_per_s=8.0e12,
        # Block-scaled products with an fp8 operand run at the fp8 rate; fp4 x fp4 would be twice as fast.
        peaks={
            Mma.NONE: 75e12,
            Mma.SYNC_BF16: 670e12,
            Mma.BF16: 2250e12,
            Mma.TF32: 1125e12,
            Mma.FP8: 4500e12,
            Mma.BLOCK_SCALED: 4500e12,
        },
    ),
}


def programs_per_sm(
    chip: Chip, *, registers: int, num_warps: int, shared_bytes: int, tensor_memory_columns: int
) -> int:
    """Programs that one SM can hold at a time; 0 if not even one fits."""
    limits = LIMITS[chip]
    warp_registers = _round_up(max(registers, 1) * 32, _WARP_REGISTERS_STEP)
    shared = _round_up(shared_bytes, _SHARED_BYTES_STEP) + limits.reserved_shared_bytes
    bounds = [
        limits.sm_programs,
        limits.sm_warps // num_warps,
        limits.sm_registers // (warp_registers * num_warps),
        limits.sm_shared_bytes // shared,
    ]
    if tensor_memory_columns:
        bounds.append(limits.tensor_memory_columns // tensor_memory_columns)
    return min(bounds)


def best_time(case: AotCase, chip: Chip) -> tuple[float, str]:
    """(least seconds of one launch by the chip's peaks, what bounds it: "memory" or "compute")."""
    limits = LIMITS[chip]
    memory = case.bytes_moved / limits.memory_bytes_per_s
    compute = case.flops / limits.peaks.get(case.mma, limits.peaks[Mma.NONE])
    return (memory, "memory") if memory >= compute else (compute, "compute")


def bound_text(case: AotCase, chip: Chip) -> str:
    """best_time for people: "memory 120 us"."""
    seconds, what = best_time(case, chip)
    digits = 0 if seconds >= 1e-4 else 1
    return f"{what} {seconds * 1e6:,.{digits}f} us"


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
