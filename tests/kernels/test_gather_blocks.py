"""gather_blocks in the Triton interpreter: which bytes go where. Speed and pinned memory are a GPU's business."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

_SCRIPT = """
import torch
from prefill_kernels.gpu.gather_blocks import gather_blocks
generator = torch.Generator().manual_seed(3)
cases = [(0, 64, 128, 96), (1, 32, 48, 32), (5, 22784, 24576, 22912), (17, 45568, 45584, 45568)]
for num_blocks, num_bytes, stride, target_stride in cases:
    source = torch.randint(0, 256, (20, stride), dtype=torch.uint8, generator=generator)
    assert source.data_ptr() % 16 == 0
    target = torch.full((24, target_stride), 0xA5, dtype=torch.uint8)
    before = target.clone()
    sources = torch.randperm(20, generator=generator)[:num_blocks].to(torch.int32)
    targets = torch.randperm(24, generator=generator)[:num_blocks].to(torch.int32)
    offset = 16 if stride - num_bytes >= 16 else 0
    room = target_stride - num_bytes
    into = 16 if room >= 16 else 0
    gather_blocks(source.data_ptr() + offset, sources, target, targets, source_stride_bytes=stride, target_offset_bytes=into,
                  num_bytes=num_bytes)
    before[targets.long(), into : into + num_bytes] = source[sources.long(), offset : offset + num_bytes]
    assert torch.equal(target, before), (num_blocks, num_bytes)
try:
    gather_blocks(8, sources, target, targets, source_stride_bytes=8, target_offset_bytes=0, num_bytes=8)
except ValueError as error:
    print("ok", error)
"""


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from prefill_kernels.gpu.gather_blocks import _BLOCK_WORDS, _gather_blocks_kernel
pointers = {"source_slots_ptr": "*i32", "target_ptr": "*i64", "target_slots_ptr": "*i32"}
sizes = dict.fromkeys(("source_stride", "target_stride", "num_words"), "i32")
signature = {"source_address": "i64", "num_blocks": "i32", "BLOCK_W": "constexpr"} | pointers | sizes
signature = {name: signature[name] for name in _gather_blocks_kernel.arg_names}
order = list(signature)
attrs = {(order.index(name),): [["tt.divisibility", 16]] for name in (*pointers, *sizes)}
for arch in (90, 100):
    source = ASTSource(_gather_blocks_kernel, signature, {"BLOCK_W": _BLOCK_WORDS}, attrs)
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["ptx"]
    assert "ld.global.v2.b64" in ptx and "st.global.v2.b64" in ptx, "16 bytes per load and store"
    assert ".local" not in ptx, "spills"
    print("compiled", arch)
"""


def run_script(text: str, tmp_path: Path, *, interpret: str) -> str:
    """In a process of its own: the interpreter is chosen by an environment variable when triton is imported."""
    script = tmp_path / "script.py"
    script.write_text(text)
    environ = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environ | {"TRITON_INTERPRET": interpret},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_gather_blocks_moves_the_named_bytes_and_no_others(tmp_path: Path) -> None:
    assert run_script(_SCRIPT, tmp_path, interpret="1").startswith("ok source address")


def test_gather_blocks_compiles_for_both_chips_with_wide_loads_and_no_spills(tmp_path: Path) -> None:
    assert run_script(_COMPILE, tmp_path, interpret="0").split() == ["compiled", "90", "compiled", "100"]
