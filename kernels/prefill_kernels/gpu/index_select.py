"""Indexer: scores of compressed entries into a bounded scratch, then an exact top-k per row (model.md 2.6, 2.7).

The rows of a step are taken in passes, so that no tensor of [rows, entries] grows beyond SCRATCH_BYTES; each pass is two or
three launches on one stream, which reuse the scratch. Kernels and figures: index_scores, index_top_k. The trap: everything is
sized by max_visible, a host integer; num_visible is read by the kernels only and is cut to it.
"""

import torch
from torch import Tensor

from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.index_scores import ScoreInputs, dense_scores, scores_inside
from prefill_kernels.gpu.index_top_k import top_blocks, top_entries, top_entries_inside
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import IndexRows, IndexSelection

SCRATCH_BYTES = 1 << 30
"""1 GiB holds 4,096 rows of 131,072 entries or 8,192 of 65,536, enough to fill a chip many times over."""
MAX_PASS_ROWS = 8192
_KEY_BYTES = 2
# Rows of scratch start on 256 bytes.
_ALIGNED_KEYS = 128


def index_select(
    query: IndexRows,
    head_weight_NH: Tensor,
    keys: IndexRows,
    key_start_N: Tensor,
    num_visible_N: Tensor,
    *,
    topk: int,
    max_visible: int,
    numerics: Numerics,  # noqa: ARG001
    chip: Chip,
    candidates_NB: Tensor | None = None,
    candidate_block: int = 0,
    num_candidate_blocks: int = 0,
) -> IndexSelection:
    """As Ops.index_select. Candidates must be ascending and padded at the end, as this op returns them.

    Raises:
        ValueError: a number of heads or a head dim that the kernels are not built for; both candidates and their making.
    """
    if candidates_NB is not None and num_candidate_blocks:
        raise ValueError("index_select inside candidate blocks was asked for new candidates: no layer is both")
    inputs = ScoreInputs(
        query=query,
        head_weight_NH=head_weight_NH,
        keys=keys,
        key_start_N=key_start_N,
        num_visible_N=num_visible_N,
    )
    inputs.check(chip)
    num_rows, device = len(head_weight_NH), head_weight_NH.device
    entries_NK, rows_NK = (torch.empty(num_rows, topk, dtype=torch.int32, device=device) for _ in range(2))
    blocks_NB = torch.empty(num_rows, num_candidate_blocks, dtype=torch.int32, device=device)
    if candidates_NB is None:
        _select(inputs, entries_NK, rows_NK, blocks_NB, block=candidate_block, max_visible=max_visible, chip=chip)
    else:
        _select_inside(
            inputs, candidates_NB, entries_NK, rows_NK, block=candidate_block, max_visible=max_visible, chip=chip
        )
    return IndexSelection(entries=entries_NK, rows=rows_NK, candidates=blocks_NB if num_candidate_blocks else None)


def _select(
    inputs: ScoreInputs,
    entries_NK: Tensor,
    rows_NK: Tensor,
    blocks_NB: Tensor,
    *,
    block: int,
    max_visible: int,
    chip: Chip,
) -> None:
    """Fills entries, rows and blocks (none if it has no columns) from all that is visible."""
    scratch_TJ, passes = _scratch(inputs, max_visible)
    visible_N = inputs.num_visible_N
    for rows in passes:
        if max_visible:
            dense_scores(inputs, scratch_TJ, rows=rows, max_visible=max_visible, chip=chip)
        top_entries(scratch_TJ, visible_N, inputs.key_start_N, entries_NK, rows_NK, rows=rows, max_visible=max_visible)
        if blocks_NB.shape[1]:
            top_blocks(scratch_TJ, visible_N, blocks_NB, rows=rows, max_visible=max_visible, candidate_block=block)


def _select_inside(
    inputs: ScoreInputs,
    candidates_NB: Tensor,
    entries_NK: Tensor,
    rows_NK: Tensor,
    *,
    block: int,
    max_visible: int,
    chip: Chip,
) -> None:
    """Fills entries and rows from what is visible inside the row's blocks."""
    # Later blocks of an ascending list see nothing.
    num_slots = min(candidates_NB.shape[1], -(-max_visible // block)) * block
    scratch_TJ, passes = _scratch(inputs, num_slots)
    for rows in passes:
        if num_slots:
            scores_inside(
                inputs, candidates_NB, scratch_TJ, rows=rows, num_slots=num_slots, candidate_block=block, chip=chip
            )
        top_entries_inside(
            scratch_TJ,
            inputs.key_start_N,
            candidates_NB,
            entries_NK,
            rows_NK,
            rows=rows,
            num_slots=num_slots,
            candidate_block=block,
        )


def plan_passes(num_rows: int, width: int, *, scratch_bytes: int) -> list[range]:
    """Consecutive row ranges whose keys (width per row) fit the scratch; at least one row each, at most MAX_PASS_ROWS."""
    per_pass = max(1, min(MAX_PASS_ROWS, scratch_bytes // max(1, row_stride(width) * _KEY_BYTES)))
    return [range(first, min(first + per_pass, num_rows)) for first in range(0, num_rows, per_pass)]


def row_stride(width: int) -> int:
    """Keys from one row of scratch to the next."""
    return -(-width // _ALIGNED_KEYS) * _ALIGNED_KEYS


def _scratch(inputs: ScoreInputs, width: int) -> tuple[Tensor, list[range]]:
    """Keys of one pass, and the passes."""
    num_rows, device = len(inputs.head_weight_NH), inputs.head_weight_NH.device
    passes = plan_passes(num_rows, width, scratch_bytes=SCRATCH_BYTES)
    most_rows = max(map(len, passes), default=0)
    return torch.empty(most_rows, row_stride(width), dtype=torch.int16, device=device), passes
