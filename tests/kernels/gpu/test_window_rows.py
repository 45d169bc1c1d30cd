"""Window records and keys against ref, bit by bit: norm, RoPE and quantiser round in the same places."""

import pytest
import torch
from torch import Tensor

from prefill_kernels import ref
from prefill_kernels.gpu.window_rows import decode_window, window_rows
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ops import WindowRows
from prefill_kernels.ref.records import encode_window
from prefill_kernels.rope_tables import rope_frequencies
from prefill_testing.numeric import assert_bitwise, random_tensor

pytestmark = pytest.mark.usefixtures("poisoned")
EPS = 1e-20
# (head dim, rotated channels): the released model; the tiny ones, whose rotated channels are half a quantisation group.
DIMS = [(512, 64), (64, 16), (32, 32)]


def _case(num_rows: int, width: int, rope_dim: int) -> dict[str, Tensor]:
    """Rows of very different sizes, one of them zero; history of three sequences with gaps, in any order."""
    kv = random_tensor(1, num_rows, width) * torch.logspace(-4, 4, num_rows).unsqueeze(-1)
    if num_rows > 3:
        kv[2] = 0
    generator = torch.Generator().manual_seed(num_rows)
    slots = torch.randperm(3 * 40, generator=generator)[:21].int()
    slots[[0, 5, 20]] = -1
    ring = encode_window(random_tensor(3, 120, width, dtype=torch.bfloat16), numerics=PRODUCTION)
    return {
        "kv_NC": kv.bfloat16(),
        "norm_weight_C": random_tensor(2, width, dtype=torch.bfloat16),
        "positions_N": torch.randint(0, 131_072, (num_rows,), generator=generator, dtype=torch.int32),
        "frequencies": rope_frequencies(rope_dim=rope_dim, theta=160_000.0, yarn=(16.0, 32.0, 1.0, 65536)),
        "ring_ZRC": ring.view(3, 40, -1),
        "history_slots": slots,
    }


def _assert_equal(actual: WindowRows, expected: WindowRows) -> None:
    assert_bitwise(actual.records, expected.records)
    assert_bitwise(actual.keys, expected.keys)


@pytest.mark.parametrize(("width", "rope_dim"), DIMS)
@pytest.mark.parametrize("num_rows", [0, 1, 29])
def test_records_and_keys_have_the_bits_of_ref(num_rows: int, width: int, rope_dim: int) -> None:
    case = _case(num_rows, width, rope_dim)
    before = case["ring_ZRC"].clone()
    actual = window_rows(**case, eps=EPS, numerics=PRODUCTION)
    _assert_equal(actual, ref.window_rows(**case, eps=EPS, numerics=PRODUCTION))
    assert_bitwise(case["ring_ZRC"], before)


def test_float32_norm_weight_and_no_history() -> None:
    case = _case(9, 64, 16)
    case["norm_weight_C"] = random_tensor(4, 64)
    case["history_slots"] = case["history_slots"][:0]
    actual = window_rows(**case, eps=1e-6, numerics=PRODUCTION)
    _assert_equal(actual, ref.window_rows(**case, eps=1e-6, numerics=PRODUCTION))


def test_row_is_the_same_in_any_batch() -> None:
    case = _case(29, 64, 16)
    whole = window_rows(**case, eps=EPS, numerics=PRODUCTION)
    rows = torch.tensor([17, 3, 28, 2, 9])
    for name in ("kv_NC", "positions_N"):
        case[name] = case[name][rows]
    case["history_slots"] = case["history_slots"][:4]
    part = window_rows(**case, eps=EPS, numerics=PRODUCTION)
    assert_bitwise(part.records, whole.records[rows])
    assert_bitwise(part.keys, torch.cat([whole.keys[:4], whole.keys[21 + rows]]))


@pytest.mark.parametrize("num_rows", [0, 1, 13])
@pytest.mark.parametrize("width", [512, 32])
def test_decode_window_knows_every_code_and_scale(num_rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(5)
    records = torch.randint(0, 256, (num_rows, width + width // 32), generator=generator, dtype=torch.uint8)
    records[:, :width][records[:, :width] & 0x7F == 0x7F] = 1
    records[:, width:].clamp_(20, 230)
    assert_bitwise(decode_window(records, numerics=PRODUCTION), ref.decode_window(records, numerics=PRODUCTION))


def test_widths_that_no_tile_fits_are_refused() -> None:
    case = _case(3, 64, 16)
    case["kv_NC"] = case["kv_NC"][:, :48].contiguous()
    with pytest.raises(ValueError, match="head dim is 48: expected a power of two"):
        window_rows(**case, eps=EPS, numerics=PRODUCTION)
    case = _case(3, 64, 16)
    case["ring_ZRC"] = case["ring_ZRC"][..., :-1]
    with pytest.raises(ValueError, match="expected contiguous uint8 records of 66 bytes for 64 channels"):
        window_rows(**case, eps=EPS, numerics=PRODUCTION)
    case = _case(4, 64, 16)
    case["kv_NC"] = case["kv_NC"][::2]
    with pytest.raises(ValueError, match="expected contiguous rows"):
        window_rows(**case, eps=EPS, numerics=PRODUCTION)
