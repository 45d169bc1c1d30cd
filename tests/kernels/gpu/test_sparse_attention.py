"""Sparse attention in the interpreter: against ref within bfloat16's tolerance, and rows, slots and tiles bit by bit."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from prefill_kernels import ref
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.sparse_attention import CONFIGS, sparse_attention, sparse_attention_records
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ref.records import encode_main
from prefill_kernels.ref.rope import rope
from prefill_kernels.rope_tables import rope_frequencies
from prefill_testing.numeric import assert_bitwise, assert_close, fraction_equal, random_tensor

pytestmark = pytest.mark.usefixtures("poisoned")
both_chips = pytest.mark.parametrize("chip", Chip)
Case = dict[str, Any]


def _case(
    num_rows: int, *, heads: int = 6, width: int = 64, rope_dim: int = 16, window: int = 11, topk: int = 7
) -> Case:
    """Rows of two sequences: each has empty slots at the start of its window and the end of its selection; keys that no
    slot names are NaN."""
    generator = torch.Generator().manual_seed(num_rows)
    num_keys, num_entries = 90, 75
    case: Case = {
        "query_NHC": random_tensor(1, num_rows, heads, width, dtype=torch.bfloat16, scale=1.5),
        "positions_N": torch.randint(0, 131_072, (num_rows,), generator=generator, dtype=torch.int32),
        "frequencies": rope_frequencies(rope_dim=rope_dim, theta=160_000.0, yarn=(16.0, 32.0, 1.0, 65536)),
        "window_keys_MC": random_tensor(2, num_keys, width, dtype=torch.bfloat16),
        "window_index_NW": torch.randint(0, num_keys, (num_rows, window), generator=generator, dtype=torch.int32),
        "entries_EC": random_tensor(3, num_entries, width, dtype=torch.bfloat16),
        "entry_index_NK": torch.randint(0, num_entries, (num_rows, topk), generator=generator, dtype=torch.int32),
        "sink_H": random_tensor(4, heads),
        "scale": width**-0.5,
        "numerics": PRODUCTION,
    }
    first = torch.randint(0, window, (num_rows, 1), generator=generator)
    end = torch.randint(0, topk + 1, (num_rows, 1), generator=generator)
    case["window_index_NW"].masked_fill_(torch.arange(window) < first, -1)
    case["entry_index_NK"].masked_fill_(torch.arange(topk) >= end, -1)
    for keys, index in (("window_keys_MC", "window_index_NW"), ("entries_EC", "entry_index_NK")):
        is_used = torch.zeros(len(case[keys]), dtype=torch.bool)
        is_used[case[index][case[index] >= 0].long()] = True
        case[keys][~is_used] = float("nan")
    return case


def _expected(case: Case) -> Tensor:
    return ref.sparse_attention(**case)


@both_chips
@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("has_entries", [True, False], ids=["entries", "window"])
def test_attention_matches_ref(num_rows: int, has_entries: bool, chip: Chip) -> None:
    case = _case(num_rows)
    if not has_entries:
        case["entries_EC"] = case["entry_index_NK"] = None
    assert_close(sparse_attention(**case, chip=chip), _expected(case), dtype=torch.bfloat16)


@both_chips
def test_released_heads_window_and_tiles(chip: Chip) -> None:
    """64 heads of 512; 128 window slots and 70 entries are tiles of both kinds, the last of them part empty."""
    case = _case(2, heads=64, width=512, rope_dim=64, window=128, topk=70)
    assert_close(sparse_attention(**case, chip=chip), _expected(case), dtype=torch.bfloat16)


@both_chips
def test_weights_are_rounded_below_a_power_of_two_and_not_in_the_denominator(chip: Chip) -> None:
    """The stated profile: only that rule gives the bits of almost all values."""
    case = _case(8, topk=40)
    actual = sparse_attention(**case, chip=chip)
    assert fraction_equal(actual, _with_whole_powers(case)) > 0.995
    assert fraction_equal(actual, _with_whole_powers(case, round_total=True)) < 0.97
    assert fraction_equal(actual, _expected(case)) < 0.97


@both_chips
def test_row_without_keys_is_zero_whatever_the_sink(chip: Chip) -> None:
    case = _case(5)
    case["window_index_NW"][2] = -1
    case["entry_index_NK"][2] = -1
    for sink in (-1e4, 0.0, 1e4):
        case["sink_H"] = torch.full((6,), sink)
        out = sparse_attention(**case, chip=chip)
        assert not out[2].any()
        assert torch.isfinite(out).all()
    assert not out.any(), "a sink of 1e4 takes all probability"


@both_chips
def test_a_later_key_may_be_far_above_all_before(chip: Chip) -> None:
    """References rise by hundreds of powers of two from tile to tile, and fall back never."""
    case = _case(4, window=40, topk=70)
    case["window_keys_MC"][case["window_index_NW"][:, -1].long()] *= 30
    far = torch.tensor([[0], [1], [40], [69]])
    case["entry_index_NK"] = torch.arange(70, dtype=torch.int32).expand(4, 70).contiguous()
    case["entries_EC"] = random_tensor(5, 75, 64, dtype=torch.bfloat16)
    case["entries_EC"][far.flatten()] = case["query_NHC"][:, 0] * 100
    assert_close(sparse_attention(**case, chip=chip), _expected(case), dtype=torch.bfloat16)


@both_chips
def test_tiles_without_keys_change_no_bit(chip: Chip) -> None:
    """Whole empty tiles before, between and behind the keys of both sets."""
    case = _case(4)
    expected = sparse_attention(**case, chip=chip)
    tile = CONFIGS[chip].key_tile
    window = torch.nn.functional.pad(case["window_index_NW"], (2 * tile, 3 * tile), value=-1)
    padded = case | {
        "window_index_NW": window,
        "entry_index_NK": torch.nn.functional.pad(case["entry_index_NK"], (tile, 2 * tile + 5), value=-1),
    }
    assert_bitwise(sparse_attention(**padded, chip=chip), expected)


@both_chips
def test_row_is_the_same_in_any_batch_and_key_buffer(chip: Chip) -> None:
    case = _case(8)
    whole = sparse_attention(**case, chip=chip)
    rows = torch.tensor([7, 0, 5])
    moved = case | {name: case[name][rows] for name in ("query_NHC", "positions_N")}
    for keys, index in (("window_keys_MC", "window_index_NW"), ("entries_EC", "entry_index_NK")):
        moved[keys] = torch.cat([random_tensor(9, 50, 64, dtype=torch.bfloat16), case[keys]])
        moved[index] = torch.where(case[index] < 0, -1, case[index] + 50)[rows]
    assert_bitwise(sparse_attention(**moved, chip=chip), whole[rows])


@both_chips
def test_inputs_stay_as_they_are(chip: Chip) -> None:
    case = _case(3)
    before = {name: value.clone() for name, value in case.items() if isinstance(value, Tensor)}
    sparse_attention(**case, chip=chip)
    for name, value in before.items():
        assert_bitwise(case[name], value)


@both_chips
def test_records_are_read_where_they_lie(chip: Chip) -> None:
    """fp4 records in strided pages, through slots in any order, give what their decoded values give."""
    case = _case(5, topk=40)
    entries = random_tensor(6, 75, 64, dtype=torch.bfloat16)
    records = encode_main(entries, record_format="fp4", numerics=PRODUCTION)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(1))[:75].int()
    blocks = torch.full((16, 24 + 5 * records.shape[1] + 8), 0xFF, dtype=torch.uint8)
    pages = blocks[:, 24 : 24 + 5 * records.shape[1]].unflatten(1, (5, -1))
    ref.scatter_rows(pages, slots, records)
    case["entries_EC"] = ref.load_main(pages, slots, record_format="fp4", numerics=PRODUCTION)
    expected = _expected(case)
    del case["entries_EC"], case["numerics"]
    actual = sparse_attention_records(**case, pages_ZER=pages, slots_E=slots, chip=chip)
    assert_close(actual, expected, dtype=torch.bfloat16)


@both_chips
def test_no_rows_give_no_rows(chip: Chip) -> None:
    assert sparse_attention(**_case(0), chip=chip).shape == (0, 6, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": 0.0}, "expected a power of two of at least 16, a multiple of 8 within it, and a positive scale"),
        ({"frequencies": torch.ones(6)}, "head dim 64, 12 rotated channels"),
        ({"query_NHC": torch.zeros(3, 6, 48, dtype=torch.bfloat16)}, "head dim 48, 16 rotated channels"),
        ({"query_NHC": torch.zeros(6, 3, 64, dtype=torch.bfloat16).transpose(0, 1)}, "expected contiguous rows"),
        ({"query_NHC": torch.zeros(3 * 6 * 64 + 1, dtype=torch.bfloat16)[1:].view(3, 6, 64)}, "at a multiple of 16"),
        ({"window_keys_MC": torch.zeros(90, 128, dtype=torch.bfloat16)[:, ::2]}, "expected contiguous tensors"),
        ({"entry_index_NK": torch.zeros(3, 14, dtype=torch.int32)[:, ::2]}, "expected contiguous tensors"),
    ],
)
def test_shapes_that_no_tile_fits_are_refused(changes: Case, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_attention(**(_case(3) | changes), chip=Chip.SM_90)


def _with_whole_powers(case: Case, *, round_total: bool = False) -> Tensor:
    """The kernel's rule as loops, in float64 but for the roundings to bfloat16."""
    query = rope(case["query_NHC"], case["positions_N"], case["frequencies"]).double()
    out = torch.zeros_like(query)
    for n, heads in enumerate(query):
        parts = [(case["window_keys_MC"], case["window_index_NW"][n]), (case["entries_EC"], case["entry_index_NK"][n])]
        keys_JC = torch.cat([keys[index[index >= 0].long()] for keys, index in parts]).double()
        powers_HJ = heads @ keys_JC.t() * (case["scale"] * math.log2(math.e))
        top_H1 = powers_HJ.amax(-1, keepdim=True).ceil()
        weight_HJ = torch.exp2(powers_HJ - top_H1)
        summed_HJ = weight_HJ.bfloat16().double() if round_total else weight_HJ
        total_H1 = summed_HJ.sum(-1, keepdim=True) + torch.exp2(
            case["sink_H"].double().unsqueeze(-1) * math.log2(math.e) - top_H1
        )
        out[n] = weight_HJ.bfloat16().double() @ keys_JC / total_H1
    return rope(out.bfloat16(), case["positions_N"], case["frequencies"], inverse=True)
