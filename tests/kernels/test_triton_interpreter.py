"""The repaired interpreter against torch's casts and arithmetic, and the faults it must catch. Outside tests/kernels/gpu on
purpose: here nothing is interpreted unless the test says so."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from prefill_testing.interpreter_memory import MemoryFault, memory_at
from prefill_testing.numeric import assert_bitwise, assert_close, random_tensor
from prefill_testing.triton_interpreter import interpreted

EVERY_BFLOAT16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
EVERY_BYTE = torch.arange(256, dtype=torch.uint8)


@pytest.fixture
def _interpreter() -> Iterator[None]:
    with interpreted():
        yield


inside = pytest.mark.usefixtures("_interpreter")


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def _arithmetic_kernel(a_ptr, b_ptr, out_ptr, flags_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(a_ptr + i)
    b = tl.load(b_ptr + i)
    tl.store(out_ptr + i, a + b)
    tl.store(out_ptr + N + i, a - b)
    tl.store(out_ptr + 2 * N + i, a * b)
    tl.store(out_ptr + 3 * N + i, -a)
    tl.store(out_ptr + 4 * N + i, tl.where(a > b, a, b))
    tl.store(out_ptr + 5 * N + i, tl.maximum(a, b))
    tl.store(out_ptr + 6 * N + i, _twice(tl.abs(a)))
    tl.store(out_ptr + 7 * N + i, a * 1.5)
    tl.store(flags_ptr + i, ((a < b) & (a != b)).to(tl.uint8))


@triton.jit
def _sum_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out_ptr + tl.arange(0, M), tl.sum(x.to(tl.float32), axis=1))
    tl.store(out_ptr + M + tl.arange(0, M), tl.max(x, axis=1))


@triton.jit
def _raw_sum_kernel(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N)), axis=0))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    a = tl.load(a_ptr + tl.arange(0, M)[:, None] * K + tl.arange(0, K)[None, :])
    b = tl.load(b_ptr + tl.arange(0, N)[None, :] * K + tl.arange(0, K)[:, None])
    tl.store(out_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], tl.dot(a, b))


@triton.jit
def _dot_scaled_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    m, n = tl.arange(0, M), tl.arange(0, N)
    groups = tl.arange(0, K // 32)[None, :]
    a = tl.load(a_ptr + m[:, None] * K + tl.arange(0, K)[None, :])
    b = tl.load(b_ptr + n[None, :] * (K // 2) + tl.arange(0, K // 2)[:, None])
    a_scale = tl.load(a_scale_ptr + m[:, None] * (K // 32) + groups)
    b_scale = tl.load(b_scale_ptr + n[:, None] * (K // 32) + groups)
    acc = tl.dot_scaled(a, a_scale, "e4m3", b, b_scale, "e2m1")
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc)


@triton.jit
def _copy_kernel(x_ptr, out_ptr, num_rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < num_rows))


@triton.jit
def _address_kernel(address, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(address.to(tl.pointer_type(tl.int32)) + i))


@triton.jit
def _all_write_kernel(out_ptr):
    tl.store(out_ptr, tl.program_id(0))


@triton.jit
def _pass_on_kernel(x_ptr):
    program = tl.program_id(0)
    tl.store(x_ptr + program + 1, tl.load(x_ptr + program))


@triton.jit
def _runtime_loop_kernel(x_ptr, out_ptr, num_steps):
    total = 0.0
    for step in range(0, num_steps):
        total += tl.load(x_ptr + step)
    tl.store(out_ptr, total)


@triton.jit
def _count_kernel(out_ptr):
    tl.atomic_add(out_ptr, 1)


@triton.jit
def _wide_size_kernel(out_ptr, num_rows):
    tl.store(out_ptr, num_rows.to(tl.int64))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(len(x), dtype=dtype)
    _cast_kernel[(1,)](x, out, N=len(x))
    return out


def assert_equal_with_nan(actual: Tensor, expected: Tensor) -> None:
    """Bitwise; any NaN equals any other."""
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_bitwise(actual[~actual.isnan()], expected[~expected.isnan()])


@inside
def test_float32_becomes_bfloat16_as_in_torch_at_every_value_and_midpoint() -> None:
    # 16 lower bits: the value itself, just below the midpoint, the midpoint, just above, the next value's last neighbour.
    wide = EVERY_BFLOAT16.view(torch.int16).int()[:, None] << 16
    bits = wide | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xC000], dtype=torch.int32)
    x = bits.flatten().view(torch.float32)
    assert_equal_with_nan(cast(x, torch.bfloat16).float(), x.to(torch.bfloat16).float())
    assert_equal_with_nan(cast(EVERY_BFLOAT16, torch.float32), EVERY_BFLOAT16.float())


@inside
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_every_bfloat16_becomes_fp8_as_in_torch_and_saturates(dtype: torch.dtype, source: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    found = cast(EVERY_BFLOAT16.to(source), dtype).float()
    assert_equal_with_nan(found, EVERY_BFLOAT16.float().clamp(-limit, limit).to(dtype).float())
    values = EVERY_BYTE.view(dtype)
    between = values.float()[:-1].add(values.float()[1:]).div(2).nan_to_num(0, 0, 0)
    around = torch.cat([between, between * (1 + 2**-20), between * (1 - 2**-20), torch.zeros(259)]).to(source)
    assert_equal_with_nan(cast(around, dtype).float(), around.to(dtype).float())


@inside
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32])
def test_every_fp8_widens_as_in_torch(dtype: torch.dtype, target: torch.dtype) -> None:
    assert_equal_with_nan(cast(EVERY_BYTE.view(dtype), target).float(), EVERY_BYTE.view(dtype).to(target).float())


@inside
def test_bfloat16_and_integers_convert_as_in_torch() -> None:
    counts = torch.arange(-32768, 32768, dtype=torch.int32)
    assert_bitwise(cast(counts, torch.bfloat16), counts.to(torch.bfloat16))
    small = EVERY_BFLOAT16.float().abs().nan_to_num(0) < 2**31
    x = torch.where(small, EVERY_BFLOAT16, 0)
    assert_bitwise(cast(x, torch.int32), x.to(torch.int32))


@inside
def test_bfloat16_arithmetic_is_that_of_torch_on_random_bits() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = EVERY_BFLOAT16[torch.randint(0, 2**16, (2, 8192), generator=generator)].unbind()
    out, flags = torch.empty(8, 8192, dtype=torch.bfloat16), torch.empty(8192, dtype=torch.uint8)
    _arithmetic_kernel[(1,)](a, b, out, flags, N=8192)
    larger = torch.where(a.isnan(), b, torch.where(b.isnan(), a, torch.maximum(a, b)))
    expected = [a + b, a - b, a * b, -a, torch.where(a > b, a, b), larger, a.abs() + a.abs(), a * 1.5]
    for found, wanted in zip(out, expected, strict=True):
        assert_equal_with_nan(found + 0, wanted + 0)
    assert_bitwise(flags, ((a < b) & (a != b)).to(torch.uint8))


@inside
def test_sums_of_bfloat16_must_be_made_in_float32() -> None:
    x = random_tensor(1, 8, 256).to(torch.bfloat16)
    out = torch.empty(2, 8)
    _sum_kernel[(1,)](x, out, M=8, N=256)
    assert_close(out[0], x.double().sum(1), dtype=torch.float32)
    assert_bitwise(out[1], x.float().amax(1))
    with pytest.raises(NotImplementedError, match="reduce or scan over bf16: expected float32"):
        _raw_sum_kernel[(1,)](x, torch.empty(1, dtype=torch.bfloat16), N=64)


@inside
def test_loops_run_to_bounds_that_are_arguments() -> None:
    out = torch.zeros(1)
    _runtime_loop_kernel[(1,)](torch.arange(10.0), out, 10)
    assert out.item() == 45


@inside
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_products_are_exact_on_small_integers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randint(-8, 9, (rows, 64), generator=generator).to(dtype) for rows in (16, 32))
    out = torch.empty(16, 32)
    _dot_kernel[(1,)](a, b, out, M=16, N=32, K=64)
    assert_bitwise(out, a.float() @ b.float().T)


@inside
def test_a_float32_product_shows_the_precision_of_tf32() -> None:
    a, b = torch.full((16, 16), 1 + 2.0**-10 + 2.0**-11), torch.eye(16)
    out = torch.empty(16, 16)
    _dot_kernel[(1,)](a, b, out, M=16, N=16, K=16)
    assert (out == 1 + 2.0**-10).all()


@inside
@pytest.mark.skipif(triton.__version__ < "3.8", reason="the interpreter of older versions cannot trace dot_scaled")
def test_block_scaled_products_are_those_of_the_decoded_operands() -> None:
    from prefill_kernels.number_formats import (
        dequantise_fp4_ue8m0,
        dequantise_fp8_ue8m0,
        pack_fp4,
        quantise_fp4_ue8m0,
        quantise_fp8_ue8m0,
    )

    (a, a_scale), (b, b_scale) = (
        quantise_fp8_ue8m0(random_tensor(5, 16, 64)),
        quantise_fp4_ue8m0(random_tensor(6, 32, 64)),
    )
    out = torch.empty(16, 32)
    _dot_scaled_kernel[(1,)](a, a_scale, pack_fp4(b), b_scale, out, M=16, N=32, K=64)
    expected = dequantise_fp8_ue8m0(a, a_scale).double() @ dequantise_fp4_ue8m0(b, b_scale).double().T
    assert_close(out, expected, dtype=torch.float32)


@inside
def test_masked_off_lanes_without_other_are_poison() -> None:
    for dtype, poison in ((torch.float32, float("nan")), (torch.bfloat16, float("nan")), (torch.uint8, 0xA5)):
        out = torch.zeros(16, dtype=dtype)
        _copy_kernel[(1,)](torch.ones(16, dtype=dtype), out, 5, BLOCK=16)
        assert torch.equal(out.float(), torch.tensor([1.0] * 5 + [poison] * 11).float()) or out[5:].isnan().all()
        assert (out[:5] == 1).all()


@inside
def test_an_over_read_and_an_over_write_are_caught_to_the_lane() -> None:
    x, out = torch.ones(40)[:20], torch.zeros(32)
    with pytest.raises(MemoryFault, match=r"load in program 1: 1 of 5 active lanes out of bounds, up to 4 bytes"):
        _copy_kernel[(2,)](x, out, 21, BLOCK=16)
    with pytest.raises(MemoryFault, match=r"store in program 1: 2 of 16 active lanes out of bounds, up to 8 bytes"):
        _copy_kernel[(2,)](x, out[:30], 20, BLOCK=16)
    _copy_kernel[(2,)](x, out, 20, BLOCK=16)
    assert (out[:20] == 1).all()


@inside
def test_a_bare_address_must_be_declared() -> None:
    source, out = torch.arange(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    with pytest.raises(MemoryFault, match="load in program 0"):
        _address_kernel[(1,)](source.data_ptr(), out, N=16)
    with memory_at(source.data_ptr(), 64):
        _address_kernel[(1,)](source.data_ptr(), out, N=16)
    assert_bitwise(out, source)


@inside
def test_races_between_programs_are_caught() -> None:
    with pytest.raises(MemoryFault, match="race: program 1 writes where program 0 has written"):
        _all_write_kernel[(2,)](torch.zeros(1, dtype=torch.int32))
    with pytest.raises(MemoryFault, match="race: program 1 reads what program 0 has written"):
        _pass_on_kernel[(2,)](torch.zeros(3, dtype=torch.int32))
    count = torch.zeros(1, dtype=torch.int32)
    _count_kernel[(3,)](count)
    assert count.item() == 3


@inside
@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (lambda out: _wide_size_kernel[(1,)](out, 1), "'int' object has no attribute 'to'"),
        (lambda out: _wide_size_kernel[(1,)](out, 2, num_wraps=4), "unknown arguments .'num_wraps'"),
        (lambda out: _wide_size_kernel[(0,)](out, 2), "grid .0,.: no chip takes an empty one"),
    ],
)
def test_what_a_gpu_would_refuse_is_refused(launch: Any, message: str) -> None:
    with pytest.raises((AttributeError, TypeError, ValueError), match=message):
        launch(torch.zeros(1, dtype=torch.int64))


def test_nothing_of_it_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    before = (triton.JITFunction.run, tl.core.reduce, tl.load, triton.runtime.interpreter.InterpreterBuilder.binary_op)
    with interpreted():
        assert "TRITON_INTERPRET" not in os.environ
        _sum_kernel[(1,)](torch.ones(16, 16), torch.empty(2, 16), M=16, N=16)
    after = (triton.JITFunction.run, tl.core.reduce, tl.load, triton.runtime.interpreter.InterpreterBuilder.binary_op)
    assert before == after
    assert not triton.knobs.runtime.interpret
    signature = {"x_ptr": "*bf16", "out_ptr": "*fp32", "M": "constexpr", "N": "constexpr"}
    source = ASTSource(_sum_kernel, signature, {"M": 16, "N": 16})
    assert "ld.global" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
