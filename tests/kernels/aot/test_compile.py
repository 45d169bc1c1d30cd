"""Kernels made to break one rule each, really compiled: the gate's figures come from the compiler, not from our wishes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import triton
import triton.language as tl

from prefill_kernels.aot.__main__ import main
from prefill_kernels.aot.compile import compile_case, empty_cache
from prefill_kernels.aot.gate import Result, violations
from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip


@triton.jit
def _product_kernel(a_ptr, b_ptr, out_ptr, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for step in range(0, steps):
        a = tl.load(a_ptr + m * K * steps + step * K + k[None, :])
        b = tl.load(b_ptr + n * K * steps + step * K + k[:, None])
        acc = tl.dot(a, b, acc)
    tl.store(out_ptr + m * N + n, acc)


@pytest.fixture(autouse=True, scope="module")
def _cache() -> Iterator[None]:
    with empty_cache():
        yield


def product(tile: tuple[int, int, int], *, operand: str = "bf16", num_warps: int = 4, **changes: Any) -> AotCase:
    signature = {"a_ptr": f"*{operand}", "b_ptr": f"*{operand}", "out_ptr": "*fp32", "steps": "i32"}
    values: dict[str, Any] = {
        "op": "linear",
        "name": "product",
        "shape": "",
        "kernel": _product_kernel,
        "signature": signature | dict.fromkeys("MNK", "constexpr"),
        "constexprs": dict(zip("MNK", tile, strict=True)),
        "aligned": ("a_ptr", "b_ptr", "out_ptr"),
        "num_warps": num_warps,
        "num_stages": 2,
        "mma": Mma.BF16,
        "num_programs": 1,
        "bytes_moved": 1,
        "flops": 1,
    }
    return AotCase(**values | changes)


def judged(case: AotCase, chip: Chip) -> list[str]:
    return violations(Result(case=case, chip=chip, figures=compile_case(case, chip)))


@pytest.mark.parametrize(
    ("operand", "mma", "chip"),
    [
        ("bf16", Mma.BF16, Chip.SM_90),
        ("fp8e4nv", Mma.FP8, Chip.SM_90),
        ("bf16", Mma.BF16, Chip.SM_100),
        ("fp32", Mma.TF32, Chip.SM_100),
    ],
)
def test_a_plain_product_passes_with_its_own_family(operand: str, mma: Mma, chip: Chip) -> None:
    assert judged(product((64, 64, 64), operand=operand, mma=mma), chip) == []


def test_a_tile_too_small_for_the_matrix_unit_is_seen() -> None:
    assert judged(product((16, 64, 64)), Chip.SM_90) == ["matrix instructions mma.sync bf16: expected wgmma bf16 only"]


def test_too_much_tensor_memory_is_seen_as_the_trap_stub_it_becomes() -> None:
    found = judged(product((256, 512, 64), num_warps=8), Chip.SM_100)
    assert found[0].startswith("traps instead of computing")
    assert "1024 columns of tensor memory: at most 512" in found


def test_spills_and_too_much_shared_memory_are_seen() -> None:
    found = judged(product((128, 256, 128), num_stages=4, options={"maxnreg": 128}), Chip.SM_100)
    assert any("spill instructions" in text and not text.startswith("0 ") for text in found)
    assert any("bytes of shared memory: at most 232448" in text for text in found)


def test_a_signature_that_is_not_the_kernels_is_refused_before_compiling() -> None:
    signature = product((64, 64, 64)).signature
    with pytest.raises(ValueError, match="expected the kernel's arguments"):
        compile_case(product((64, 64, 64), signature=signature | {"d_ptr": "*fp32"}), Chip.SM_90)
    with pytest.raises(ValueError, match="expected the kernel's arguments"):
        compile_case(product((64, 64, 64), aligned=("c_ptr",)), Chip.SM_90)


def test_the_command_judges_a_module_in_two_processes_and_says_so_in_json() -> None:
    """As a command, from a shell that says nothing about triton."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, "-m", "prefill_kernels.aot", "--module", "rope_device"]
    done = subprocess.run([*command, "--jobs", "2", "--json"], capture_output=True, text=True, env=environ, timeout=300)
    report = json.loads(done.stdout)
    assert (done.returncode, report["passed"], report["problems"]) == (0, True, []), done.stderr
    assert {result["chip"] for result in report["results"]} == {"sm_90", "sm_100"}
    for result in report["results"]:
        assert result["figures"]["registers"] > 0
        assert result["programs_per_sm"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--op", "nonsense"], "no case of nonsense"),
        (["--module", "rope_device", "--write-readme", "x"], "--write-readme writes every row"),
    ],
)
def test_the_command_says_what_it_cannot_do(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert message in capsys.readouterr().err


def test_the_command_compiles_nothing_in_an_interpreting_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(triton.knobs, "propagate_env", False)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        assert main(["--module", "rope_device"]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


def test_the_command_fails_on_a_module_without_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--module", "rope_device", "--module", "formats", "--arch", "sm_90", "--jobs", "1"]) == 1
    assert "VIOLATION  prefill_kernels.gpu.formats has no aot_cases" in capsys.readouterr().out
