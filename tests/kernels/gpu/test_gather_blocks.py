"""gather_blocks and save_blocks: which bytes go where. Speed and pinned memory are a GPU's business."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from prefill_kernels.gpu.gather_blocks import gather_blocks, save_blocks
from prefill_testing.interpreter_memory import memory_at
from prefill_testing.numeric import assert_bitwise

# blocks, bytes of a stretch, stride in host memory, stride in the pool
SIZES = [(0, 64, 128, 96), (1, 32, 48, 32), (5, 22784, 24576, 22912), (17, 45568, 45584, 45568)]


@pytest.mark.parametrize(("num_blocks", "num_bytes", "host_stride", "pool_stride"), SIZES)
def test_gather_moves_the_named_bytes_and_no_others(
    num_blocks: int, num_bytes: int, host_stride: int, pool_stride: int
) -> None:
    host, pool = _bytes(1, 20, host_stride), _bytes(2, 24, pool_stride)
    before, expected = host.clone(), pool.clone()
    in_host, in_pool = _slots(3, 20, num_blocks), _slots(4, 24, num_blocks)
    skip, offset = _room(host_stride - num_bytes), _room(pool_stride - num_bytes)
    with memory_at(host.data_ptr(), host.numel()):
        gather_blocks(
            host.data_ptr() + skip,
            in_host,
            pool,
            in_pool,
            source_stride_bytes=host_stride,
            target_offset_bytes=offset,
            num_bytes=num_bytes,
        )
    expected[in_pool.long(), offset : offset + num_bytes] = host[in_host.long(), skip : skip + num_bytes]
    assert_bitwise(pool, expected)
    assert_bitwise(host, before)


@pytest.mark.parametrize(("num_blocks", "num_bytes", "host_stride", "pool_stride"), SIZES)
def test_save_moves_the_named_bytes_and_no_others(
    num_blocks: int, num_bytes: int, host_stride: int, pool_stride: int
) -> None:
    host, pool = _bytes(1, 20, host_stride), _bytes(2, 24, pool_stride)
    before, expected = pool.clone(), host.clone()
    in_host, in_pool = _slots(3, 20, num_blocks), _slots(4, 24, num_blocks)
    skip, offset = _room(host_stride - num_bytes), _room(pool_stride - num_bytes)
    with memory_at(host.data_ptr(), host.numel()):
        save_blocks(
            pool,
            in_pool,
            host.data_ptr() + skip,
            in_host,
            source_offset_bytes=offset,
            target_stride_bytes=host_stride,
            num_bytes=num_bytes,
        )
    expected[in_host.long(), skip : skip + num_bytes] = pool[in_pool.long(), offset : offset + num_bytes]
    assert_bitwise(host, expected)
    assert_bitwise(pool, before)


@pytest.mark.parametrize(("address", "stride", "num_bytes"), [(8, 32, 32), (16, 40, 32), (16, 32, 24)])
def test_sizes_of_no_whole_loads_are_refused(address: int, stride: int, num_bytes: int) -> None:
    pool, slots = torch.zeros(2, 64, dtype=torch.uint8), _slots(1, 2, 1)
    with pytest.raises(ValueError, match="expected multiples of 16"):
        gather_blocks(
            address, slots, pool, slots, source_stride_bytes=stride, target_offset_bytes=0, num_bytes=num_bytes
        )
    with pytest.raises(ValueError, match="expected multiples of 16"):
        save_blocks(pool, slots, address, slots, source_offset_bytes=0, target_stride_bytes=stride, num_bytes=num_bytes)


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.gather_blocks import aot_cases
for chip in Chip:
    for case in aot_cases(chip):
        names = list(case.signature)
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
        source = ASTSource(case.kernel, case.signature, case.constexprs, attributes)
        ptx = triton.compile(source, target=GPUTarget("cuda", chip.value, 32)).asm["ptx"]
        assert "ld.global.v2.b64" in ptx and "st.global.v2.b64" in ptx, "16 bytes per load and store"
        print(case.name, chip.value)
"""


def test_both_ways_move_16_bytes_per_load_and_store_on_both_chips(tmp_path: Path) -> None:
    """In a process of its own, whose kernels are compiled."""
    environ = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], capture_output=True, text=True, env=environ, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == [
        f"{name} {chip}" for chip in (90, 100) for name in ("gather_blocks", "save_blocks")
    ]


def _bytes(seed: int, *shape: int) -> Tensor:
    data = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    assert data.data_ptr() % 16 == 0
    return data


def _slots(seed: int, num_slots: int, num_blocks: int) -> Tensor:
    return torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[:num_blocks].to(torch.int32)


def _room(spare: int) -> int:
    """Where a stretch starts within a stride that is this much longer."""
    return 16 if spare >= 16 else 0
