"""index_select against ref, index for index: scores of quantised operands are exact in float32, so nothing may differ."""

import pytest
import torch
from torch import Tensor

from prefill_kernels import ref
from prefill_kernels.gpu import index_select as module
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.index_scores import ScoreInputs, dense_scores
from prefill_kernels.gpu.index_select import index_select, plan_passes
from prefill_kernels.gpu.index_top_k import top_entries
from prefill_kernels.number_formats import dequantise_fp4_ue8m0, pack_fp4, quantise_fp4_ue8m0
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ops import IndexRows, IndexSelection
from prefill_kernels.ref.fixed_math import tree_sum
from prefill_testing.numeric import assert_bitwise, random_tensor

pytestmark = pytest.mark.usefixtures("poisoned")
both_chips = pytest.mark.parametrize("chip", Chip)


class Inputs:
    """Random (or integer, hence full of ties) queries, weights and keys, as one chip's kernels and as ref read them."""

    def __init__(self, chip: Chip, num_rows: int, num_entries: int, *, heads: int = 32, dim: int = 128) -> None:
        self.chip = chip
        self.query = random_tensor(1, num_rows, heads, dim, scale=2)
        self.keys = random_tensor(2, num_entries, dim)
        self.weight = random_tensor(3, num_rows, heads, dtype=torch.bfloat16)

    def with_ties(self) -> "Inputs":
        self.query, self.keys, self.weight = self.query.sign(), self.keys.sign(), (2 * self.weight).round()
        return self

    def select(self, starts: Tensor, visible: Tensor, *, max_visible: int, **options: object) -> IndexSelection:
        query, keys = (_as_read(x, self.chip) for x in (self.query, self.keys))
        options |= {"max_visible": max_visible, "numerics": PRODUCTION, "chip": self.chip}
        return index_select(query, self.weight, keys, starts, visible, **options)  # type: ignore[arg-type]

    def select_by_ref(self, starts: Tensor, visible: Tensor, **options: object) -> IndexSelection:
        query, keys = (_as_read(x, Chip.SM_90) for x in (self.query, self.keys))
        options |= {"max_visible": int(visible.max()), "numerics": PRODUCTION}
        return ref.index_select(query, self.weight, keys, starts, visible, **options)  # type: ignore[arg-type]


def _as_read(x: Tensor, chip: Chip) -> IndexRows:
    codes, scales = quantise_fp4_ue8m0(x)
    if chip is Chip.SM_100:
        return IndexRows(data=pack_fp4(codes), scales=scales)
    return IndexRows(data=dequantise_fp4_ue8m0(codes, scales).bfloat16())


def _assert_equal(actual: IndexSelection, expected: IndexSelection) -> None:
    assert_bitwise(actual.entries, expected.entries)
    assert_bitwise(actual.rows, expected.rows)
    assert (actual.candidates is None) == (expected.candidates is None)
    if actual.candidates is not None and expected.candidates is not None:
        assert_bitwise(actual.candidates, expected.candidates)


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@both_chips
def test_rows_of_three_sequences_in_the_same_tiles_select_as_ref(chip: Chip) -> None:
    # Tiles of 8 or 4 rows: rows 0-4 see up to 141 entries, row 5 none, rows 6-11 up to 260 that start where row 5's would.
    starts = _ints(*[0] * 5, 141, *[141] * 6)
    visible = _ints(*range(137, 142), 0, *range(255, 261))
    inputs = Inputs(chip, 12, 401)
    options = {"topk": 50, "candidate_block": 8, "num_candidate_blocks": 12}
    actual = inputs.select(starts, visible, max_visible=300, **options)
    _assert_equal(actual, inputs.select_by_ref(starts, visible, **options))


@both_chips
@pytest.mark.parametrize(("heads", "dim"), [(32, 128), (4, 32)])
def test_keys_are_scores_rounded_at_every_point_of_profile_r(chip: Chip, heads: int, dim: int) -> None:
    inputs = Inputs(chip, 5, 70, heads=heads, dim=dim)  # 128 ** -0.5 is no power of two: weights are rounded
    # Large terms that cancel in the tree's first step and swallow the small ones in any other order.
    half, quarter = heads // 2, heads // 4
    inputs.query[:, half : half + quarter] = inputs.query[:, :quarter]
    inputs.weight[:, :quarter] *= 2.0**26
    inputs.weight[:, half : half + quarter] = -inputs.weight[:, :quarter]
    query, keys = (_as_read(x, chip) for x in (inputs.query, inputs.keys))
    starts, visible = _ints(*[7] * 5), _ints(*[63] * 5)
    out = torch.empty(5, 128, dtype=torch.int16)
    dense_scores(
        ScoreInputs(query=query, head_weight_NH=inputs.weight, keys=keys, key_start_N=starts, num_visible_N=visible),
        out,
        rows=range(5),
        max_visible=63,
        chip=chip,
    )
    query_NHI, keys_EI = (_as_read(x, Chip.SM_90).data.float() for x in (inputs.query, inputs.keys[7:]))
    weight_NH = (inputs.weight.float() * (heads * dim) ** -0.5).bfloat16()
    products_NHE = torch.relu((query_NHI @ keys_EI.T).bfloat16()) * weight_NH.unsqueeze(-1)
    expected = tree_sum(products_NHE.float(), dim=1).bfloat16()
    keys_NE = out[:, :63].int() & 0xFFFF
    bits = torch.where(keys_NE >= 0x8000, keys_NE - 0x8000, 0xFFFF - keys_NE - 0x10000)
    assert_bitwise(bits.short().view(torch.bfloat16) + 0, expected + 0)  # + 0: one zero
    assert (out[:, 63:].view(torch.uint8) == 0xA5).all()


@both_chips
def test_ties_go_to_the_lowest_entries_and_blocks(chip: Chip) -> None:
    inputs = Inputs(chip, 11, 200, heads=8, dim=32).with_ties()
    inputs.query[10], inputs.weight[10] = 0, -1  # every score is -0
    starts, visible = _ints(*[0] * 11), _ints(0, 1, 6, 7, 8, 63, 64, 65, 199, 200, 31)
    options = {"topk": 7, "candidate_block": 4, "num_candidate_blocks": 6}
    expected = inputs.select_by_ref(starts, visible, **options)
    _assert_equal(inputs.select(starts, visible, max_visible=200, **options), expected)


@both_chips
def test_consumers_select_inside_their_blocks_only(chip: Chip) -> None:
    inputs = Inputs(chip, 6, 290, heads=8, dim=32).with_ties()
    starts, visible = _ints(0, 0, 0, 0, 90, 90), _ints(90, 90, 87, 5, 200, 150)
    blocks = torch.full((6, 40), -1, dtype=torch.int32)
    blocks[0, :3] = _ints(0, 2, 11)  # the last block is cut by what is visible
    blocks[2, :1] = _ints(21)  # half visible; row 1 has no block at all
    blocks[3, :2] = _ints(1, 30)  # half visible, and beyond it
    blocks[4, :40] = torch.arange(10, 50)
    blocks[5, :38] = torch.arange(38)
    options = {"topk": 16, "candidates_NB": blocks, "candidate_block": 4}
    expected = inputs.select_by_ref(starts, visible, **options)
    assert (expected.entries[1] == -1).all()
    _assert_equal(inputs.select(starts, visible, max_visible=200, **options), expected)


@both_chips
def test_rows_longer_than_one_program_and_one_tile_select_as_ref(chip: Chip) -> None:
    inputs = Inputs(chip, 2, 4500, heads=8, dim=32)
    starts, visible = _ints(0, 100), _ints(4500, 4300)
    options = {"topk": 40, "candidate_block": 8, "num_candidate_blocks": 300}
    expected = inputs.select_by_ref(starts, visible, **options)
    actual = inputs.select(starts, visible, max_visible=4500, **options)
    _assert_equal(actual, expected)
    options = {"topk": 40, "candidates_NB": actual.candidates, "candidate_block": 8}
    _assert_equal(
        inputs.select(starts, visible, max_visible=4500, **options), inputs.select_by_ref(starts, visible, **options)
    )


@both_chips
def test_rows_do_not_depend_on_their_batch_or_on_the_passes(chip: Chip, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(chip, 7, 150)
    starts, visible = _ints(*[0] * 4, *[60] * 3), _ints(*range(57, 61), *range(88, 91))
    options = {"topk": 20, "candidate_block": 8, "num_candidate_blocks": 4}
    whole = inputs.select(starts, visible, max_visible=90, **options)
    monkeypatch.setattr(module, "SCRATCH_BYTES", 2 * 128 * 3)
    assert len(plan_passes(7, 90, scratch_bytes=module.SCRATCH_BYTES)) == 3
    _assert_equal(inputs.select(starts, visible, max_visible=90, **options), whole)
    alone = Inputs(chip, 7, 150)
    alone.query, alone.weight, alone.keys = inputs.query[5:6], inputs.weight[5:6], inputs.keys[60:150]
    one = alone.select(_ints(0), visible[5:6], max_visible=128, **options)
    assert whole.candidates is not None
    assert one.candidates is not None
    assert_bitwise(one.entries[0], whole.entries[5])
    assert_bitwise(one.candidates[0], whole.candidates[5])


@both_chips
def test_nothing_visible_and_no_rows(chip: Chip) -> None:
    inputs = Inputs(chip, 3, 1, heads=8, dim=32)
    options = {"topk": 5, "candidate_block": 4, "num_candidate_blocks": 3}
    nothing = inputs.select(_ints(0, 0, 1), _ints(0, 0, 0), max_visible=0, **options)
    assert nothing.candidates is not None
    for picked in (nothing.entries, nothing.rows, nothing.candidates):
        assert (picked == -1).all()
    inside = inputs.select(
        _ints(0, 0, 1), _ints(0, 0, 0), max_visible=0, topk=5, candidates_NB=nothing.candidates, candidate_block=4
    )
    assert (inside.entries == -1).all()
    empty = Inputs(chip, 0, 1, heads=8, dim=32).select(_ints(), _ints(), max_visible=9, **options)
    assert empty.entries.shape == empty.rows.shape == (0, 5)
    assert empty.candidates is not None
    assert empty.candidates.shape == (0, 3)


def test_visible_entries_beyond_the_bound_are_left_out() -> None:
    inputs = Inputs(Chip.SM_90, 2, 90, heads=8, dim=32)
    starts = _ints(0, 0)
    expected = inputs.select_by_ref(starts, _ints(70, 30), topk=9)
    _assert_equal(inputs.select(starts, _ints(90, 30), max_visible=70, topk=9), expected)


@pytest.mark.parametrize("topk", [1, 40, 512])
def test_top_k_of_any_distribution_of_keys(topk: int) -> None:
    generator = torch.Generator().manual_seed(topk)
    width = 4224
    keys = torch.randint(0, 1 << 16, (7, width), generator=generator)
    keys[1] = 40_000
    keys[2] = torch.where(keys[2] > 65_000, 65_535, 1)
    keys[3] = 0x8100 + keys[3] % 256  # one high byte
    keys[4] = (keys[4] % 64) * 256 + 7  # one low byte
    keys[5] = torch.where(keys[5] > 64_500, keys[5], 0)  # fewer competitors than 512
    num_visible = _ints(width, width, width - 3, 2049, 2048, width, 3)
    entries, rows = (torch.empty(7, topk, dtype=torch.int32) for _ in range(2))
    starts = _ints(*range(0, 70, 10))
    stored = torch.where(keys >= 1 << 15, keys - (1 << 16), keys).short()
    top_entries(stored, num_visible, starts, entries, rows, rows=range(7), max_visible=width)
    for row in range(7):
        ranked = sorted((-key, j) for j, key in enumerate(keys[row, : num_visible[row]].tolist()) if key)
        best = sorted(j for _, j in ranked[:topk])
        assert entries[row].tolist() == best + [-1] * (topk - len(best)), f"row {row}"
        assert rows[row, : len(best)].tolist() == [j + 10 * row for j in best]


@pytest.mark.parametrize(
    ("num_rows", "width", "scratch_bytes", "lengths"),
    [
        (0, 100, 1 << 20, []),
        (5, 0, 1 << 20, [5]),
        (5, 128, 1 << 20, [5]),
        (5, 129, 1024, [2, 2, 1]),  # a row of 129 keys takes 512 bytes
        (3, 1 << 20, 1024, [1, 1, 1]),  # one row is over the budget: row by row all the same
        (20_000, 64, 1 << 30, [8192, 8192, 3616]),
        (32_768, 131_072, 1 << 30, [4096] * 8),
        (32_768, 65_536, 1 << 30, [8192] * 4),
    ],
)
def test_passes_cover_all_rows_within_the_budget(
    num_rows: int, width: int, scratch_bytes: int, lengths: list[int]
) -> None:
    passes = plan_passes(num_rows, width, scratch_bytes=scratch_bytes)
    assert [len(rows) for rows in passes] == lengths
    assert [row for rows in passes for row in rows] == list(range(num_rows))


@pytest.mark.parametrize(
    ("heads", "dim", "options", "text"),
    [
        (6, 32, {}, "6 index heads"),
        (128, 32, {}, "128 index heads"),
        (8, 96, {}, "head dim is 96"),
        (8, 32, {"candidates_NB": torch.zeros(1, 1, dtype=torch.int32), "num_candidate_blocks": 1}, "new candidates"),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_shapes_without_a_kernel_are_refused(heads: int, dim: int, options: dict[str, object], text: str) -> None:
    inputs = Inputs(Chip.SM_90, 1, 4, heads=heads, dim=dim)
    with pytest.raises(ValueError, match=text):
        inputs.select(_ints(0), _ints(4), max_visible=4, topk=2, candidate_block=4, **options)
