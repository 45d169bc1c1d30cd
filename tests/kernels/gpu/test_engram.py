"""Engram on the chip's kernels: hash and lookup bitwise, the gate within what the order of its sums explains."""

import numpy as np
import pytest
import torch
from torch import Tensor

from prefill_kernels import ref
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.engram import engram_gate, engram_hash, engram_lookup
from prefill_kernels.number_formats import dequantise_fp8_ue8m0, quantise_fp8_ue8m0, round_trip_fp8
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.weights import EngramTable
from prefill_testing.numeric import assert_bitwise, assert_close, random_tensor

pytestmark = pytest.mark.usefixtures("poisoned")
# The release's first layer (model.md 2.11): large multipliers and primes.
MULTIPLIERS = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
PRIMES = torch.tensor([16000057, 16000079, 16000081, 16000189, 16000207, 16000211, 16000339, 16000381, 16000393])
PAD = 77
EPS = 1e-20


@pytest.mark.parametrize("num_heads", [3, 1])
@pytest.mark.parametrize(
    "lengths",
    [[1], [5, 0, 1, 130, 2, 0], [128], [0, 3]],
    ids=["one", "several and a tile's edge", "a tile", "empty first"],
)
def test_hash_equals_ref(lengths: list[int], num_heads: int) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    ids = torch.randint(-1, 99092, (sum(lengths),), generator=generator)
    ids[::5] = -1
    history = torch.randint(-1, 99092, (len(lengths), 3), generator=generator)
    cu_rows = torch.tensor([0, *lengths]).cumsum(0).int()
    primes = PRIMES.view(3, 3)[:, :num_heads].contiguous()
    offsets = primes.flatten().cumsum(0) - primes.flatten() + 2**33
    constants = {"multipliers": MULTIPLIERS, "primes": primes, "offsets": offsets, "pad_id": PAD}
    rows = engram_hash(ids, history, cu_rows, **constants)
    assert_bitwise(rows, ref.engram_hash(ids, history, cu_rows, **constants))


def test_a_chunk_hashes_as_the_whole_prompt_does() -> None:
    ids = torch.randint(0, 99092, (40,), generator=torch.Generator().manual_seed(9))
    ids[17] = -1
    constants = {"multipliers": MULTIPLIERS, "primes": PRIMES.view(3, 3), "offsets": torch.arange(9), "pad_id": PAD}
    whole = engram_hash(ids, torch.full((1, 3), -1), torch.tensor([0, 40], dtype=torch.int32), **constants)
    for cut in (1, 2, 18, 19, 39):
        past = torch.cat([torch.full((3,), -1), ids[:cut]])[-3:].unsqueeze(0)
        tail = engram_hash(ids[cut:], past, torch.tensor([0, 40 - cut], dtype=torch.int32), **constants)
        assert_bitwise(tail, whole[cut:])


@pytest.mark.parametrize("chip", Chip)
@pytest.mark.parametrize(("num_rows", "per_token", "width"), [(1, 1, 32), (5, 24, 256), (23, 3, 96)])
def test_lookup_gives_values_and_the_form_a_product_reads(
    chip: Chip, num_rows: int, per_token: int, width: int
) -> None:
    table, index = _table(300, width), _index(num_rows, per_token, 300)
    rows = engram_lookup(table, index, numerics=PRODUCTION, chip=chip)
    assert_bitwise(rows.plain, ref.engram_lookup(table, index, numerics=PRODUCTION).plain)
    seen = round_trip_fp8(rows.plain, dtype=torch.bfloat16)
    if chip is Chip.SM_90:
        assert rows.scales is None
        assert rows.seen is not None
        assert_bitwise(rows.seen, seen)
    else:
        assert rows.seen is not None
        assert rows.scales is not None
        assert (rows.seen.dtype, rows.scales.dtype) == (torch.uint8, torch.uint8)
        # Requantised rows may carry another scale, never another value.
        assert_bitwise(dequantise_fp8_ue8m0(rows.seen, rows.scales).to(torch.bfloat16), seen)


def test_lookup_reaches_rows_beyond_32_bits_of_bytes() -> None:
    """8.4 million rows of 256 bytes: the last one starts behind 2**31. numpy's zeros cost no memory until touched."""
    num_rows = (2**31 // 256) + 3
    data, scale = (torch.from_numpy(np.zeros((num_rows, width), np.uint8)) for width in (256, 8))
    codes, scales = quantise_fp8_ue8m0(random_tensor(5, 2, 256))
    last = torch.tensor([[num_rows - 1, num_rows - 2]])
    data[last[0]], scale[last[0]] = codes, scales
    table = EngramTable(data=data.view(torch.float8_e4m3fn), scale=scale)
    rows = engram_lookup(table, last, numerics=PRODUCTION, chip=Chip.SM_100)
    assert_bitwise(rows.plain, dequantise_fp8_ue8m0(codes, scales).to(torch.bfloat16).view(1, 512))


def test_dense_table_is_gathered() -> None:
    table = EngramTable(data=random_tensor(3, 9, 5, dtype=torch.bfloat16), scale=None)
    rows = engram_lookup(table, torch.tensor([[8, 0], [3, 3]]), numerics=PRODUCTION, chip=Chip.SM_90)
    assert rows.seen is None
    assert_bitwise(rows.plain, table.data[[8, 0, 3, 3]].view(2, 10))


@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 64), (11, 96), (6, 1100)], ids=str)
def test_gate_equals_ref_but_for_the_order_of_sums(num_rows: int, hidden: int) -> None:
    streams, kv, query, key, is_image = _gate_inputs(num_rows, hidden)
    before = streams.clone()
    out, gates = engram_gate(streams, kv, query, key, is_image, rms_eps=EPS)
    expected_out, expected_gates = ref.engram_gate(streams, kv, query, key, is_image, rms_eps=EPS)
    assert_bitwise(streams, before)
    assert gates.dtype == torch.float32
    assert_close(gates, expected_gates, dtype=torch.float32)
    assert_bitwise(out[is_image], streams[is_image])
    assert not gates[is_image].any()
    steps = (out.view(torch.int16).int() - expected_out.view(torch.int16).int()).abs()
    assert steps.max() <= 1
    assert (steps > 0).double().mean() <= 1e-3


def test_gate_of_zero_streams_is_at_the_floor_and_image_rows_keep_every_bit() -> None:
    _, kv, query, key, _ = _gate_inputs(3, 64)
    streams = torch.full((3, 4, 64), -0.0, dtype=torch.bfloat16)
    streams[2] = float("nan")
    is_image = torch.tensor([False, True, True])
    out, gates = engram_gate(streams, kv, query, key, is_image, rms_eps=EPS)
    assert_close(gates[0], torch.full((4,), 0.001).sigmoid(), dtype=torch.float32)
    assert_bitwise(out[1:], streams[1:])


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    streams, kv, query, key, is_image = _gate_inputs(9, 96)
    out, gates = engram_gate(streams, kv, query, key, is_image, rms_eps=EPS)
    for row in (0, 3, 4, 8):
        one = slice(row, row + 1)
        alone = engram_gate(streams[one], kv[one], query, key, is_image[one], rms_eps=EPS)
        assert_bitwise(alone[0], out[one])
        assert_bitwise(alone[1], gates[one])


def test_no_rows_give_no_rows() -> None:
    none, history = torch.empty(0, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int64)
    constants = {"multipliers": MULTIPLIERS, "primes": PRIMES.view(3, 3), "offsets": PRIMES, "pad_id": PAD}
    assert engram_hash(none, history, torch.zeros(1, dtype=torch.int32), **constants).shape == (0, 9)
    rows = engram_lookup(_table(4, 64), none.view(0, 3), numerics=PRODUCTION, chip=Chip.SM_100)
    assert rows.plain.shape == (0, 192)
    assert rows.scales is not None
    assert rows.scales.shape == (0, 6)
    streams, kv, query, key, is_image = _gate_inputs(0, 64)
    assert engram_gate(streams, kv, query, key, is_image, rms_eps=EPS)[0].shape == (0, 4, 64)


def _table(num_rows: int, width: int) -> EngramTable:
    """As a checkpoint's quantiser makes it, with rows of zeros and of values below the scale's floor."""
    values = random_tensor(1, num_rows, width) * torch.exp2(random_tensor(2, num_rows, 1) * 8)
    values[::7] = 0
    values[1::7] *= 1e-9
    codes, scales = quantise_fp8_ue8m0(values)
    return EngramTable(data=codes.view(torch.float8_e4m3fn), scale=scales)


def _index(num_rows: int, per_token: int, num_table_rows: int) -> Tensor:
    return torch.randint(0, num_table_rows, (num_rows, per_token), generator=torch.Generator().manual_seed(4))


def _gate_inputs(num_rows: int, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    streams = random_tensor(4, num_rows, 4, hidden, dtype=torch.bfloat16, scale=2)
    kv = random_tensor(5, num_rows, 5 * hidden, dtype=torch.bfloat16)
    query, key = (random_tensor(seed, 4, hidden, dtype=torch.bfloat16) for seed in (6, 7))
    return streams, kv, query, key, torch.arange(num_rows) % 4 == 2
