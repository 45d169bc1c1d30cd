"""Host integers of a StepPlan -> the index tensors of one forward pass. The one place where positions become tensors.

Called by the rank's step, by `check` and by `equivalence`; pure. Visibility, what is stored and where, and which rows run the
decoder are all decided here, so the model only gathers, computes and scatters. The trap: a slot of -1 writes nowhere and reads
zeros, and that is how replayed rows, placeholders and masked window keys are expressed; there is no other mask.

Legend: N rows of the step, M decoder rows, B sequences, W window, G entries that close in the step, E visible entries of all
sequences back to back, D hidden.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefill_engine.step_plan import ChunkPlan, StepPlan
from prefill_plan.config import Truncation
from prefill_plan.kv_layout import BLOCK_TOKENS, StateLayout
from prefill_plan.model_spec import ModelSpec

Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
T = TypeVar("T")

PLACEHOLDER_ID = b"\0" * 16
_PLACEHOLDER = ChunkPlan(
    attempt_id=PLACEHOLDER_ID,
    start=0,
    end=1,
    hit_tokens=1,
    window_floor=0,
    decoder_floor=0,
    prompt_tokens=1,
    block_slots=(-1,),
    state_slot=-1,
    snapshot_positions=(),
    is_last=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEmbeddings:
    """Input rows of one image span (or of any contiguous part of one).

    start: token position of the first row. data: [length, D], any float dtype.
    """

    start: int
    data: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRows:
    """What an attempt feeds the model, for its whole prompt.

    token_ids: [L] int32; values at image positions are ignored. is_image: [L] bool, every token of an image span, delimiters
    included; None = no image. embeddings: cover every image row that is computed (C3: a missing one is an error).
    """

    token_ids: npt.NDArray[np.int32]
    is_image: Mask | None = None
    embeddings: tuple[SpanEmbeddings, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PerRatio(Generic[T]):
    """One value per compress ratio."""

    r1: T
    r2: T

    def of(self, ratio: int) -> T:
        """The value for layers of that ratio (1 or 2)."""
        return self.r1 if ratio == 1 else self.r2


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryBatch:
    """Compressed entries of one ratio, all int32. Slots are flat: block_slot * entries per block + entry in block, -1 = none.

    write_slots: [G] of each group that closes in the step, sequences in order; -1 where the group lies below the hit (R3).
    write_positions: [G] first token of the group, its RoPE position (model.md 2.4).
    gather_slots: [E] of every entry of each sequence up to its chunk's end, in block-table order; at least one (-1) a sequence.
    """

    write_slots: Tensor
    write_positions: Tensor
    gather_slots: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRange:
    """Entries a row may see, [N] int32 each: gathered entries first .. first + num_visible (model.md 2.6).

    max_visible: the largest num_visible, known to the host.
    """

    first: Tensor
    num_visible: Tensor
    max_visible: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Rows of one half of the model, M of them; int32 but where said.

    positions: [M] absolute token positions.
    is_image: [M] bool.
    history_slots: [B * W] flat ring slots (state_slot * ring_rows + position % ring_rows) of the W positions before each chunk,
        -1 where no row may look.
    window_index: [M, W] rows of the key buffer [history B * W | step M]; slot w is always position p - W + 1 + w, so that sums
        over the window have one order whatever the chunking; -1 = masked.
    ring_slots: [M] flat ring slot where the row's window key is kept, -1 = not kept.
    entries: visible entries by ratio.
    """

    positions: Tensor
    is_image: Tensor
    history_slots: Tensor
    window_index: Tensor
    ring_slots: Tensor
    entries: PerRatio[EntryRange]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Everything one forward pass reads besides parameters and caches.

    token_ids: [N] int32, -1 at image rows.
    image_rows, image_embeddings: [R] int32 rows of the step and [R, D] their input; both None without images.
    history_ids: [B, max n-gram - 1] int64 token ids before each chunk, oldest first, -1 = image or before the start.
    cu_rows: [B + 1] int32. starts: [B] int32 first position of each chunk. state_slots: [B] int32, -1 = no state.
    encoder: all N rows. decoder: the M rows that run the decoder (model.md 5.2): kept rows, or one placeholder for a chunk below
        the decoder floor. decoder_rows: [M] int32, their rows in the step.
    entries: by ratio.
    last_rows: [F] int32 rows of the decoder batch that end a prompt, in chunk order.
    """

    token_ids: Tensor
    image_rows: Tensor | None
    image_embeddings: Tensor | None
    history_ids: Tensor
    cu_rows: Tensor
    starts: Tensor
    state_slots: Tensor
    encoder: RowBatch
    decoder: RowBatch
    decoder_rows: Tensor
    entries: PerRatio[EntryBatch]
    last_rows: Tensor


def build_batch(
    plan: StepPlan,
    rows: Mapping[bytes, AttemptRows],
    *,
    spec: ModelSpec,
    state: StateLayout,
    truncation: Truncation,
    device: torch.device,
) -> Batch:
    """Index tensors of one step.

    Args:
        plan: chunks in batch order. None at all gives the placeholder batch: one row that writes nowhere and ends nothing,
            so that an idle rank runs the same operations.
        rows: inputs by attempt_id.
        truncation: COMPACT runs decoder layers on kept rows, MASK on all rows with the same visibility (model.md 5.4).

    Raises:
        ValueError: a chunk that its attempt does not have: empty or outside the prompt, odd hit, too few block slots, or an image
            row without its embedding.
    """
    builder = _Builder(spec=spec, state=state, truncation=truncation, device=device)
    if not plan.chunks:
        return builder.build((_PLACEHOLDER,), {PLACEHOLDER_ID: AttemptRows(token_ids=np.zeros(1, dtype=np.int32))})
    for chunk in plan.chunks:
        _check_chunk(chunk, rows[chunk.attempt_id])
    return builder.build(plan.chunks, rows)


def first_decoder_row(chunk: ChunkPlan, truncation: Truncation) -> int:
    """Position of the chunk's first row that runs the decoder (clip of model.md 5.2)."""
    if truncation is Truncation.MASK:
        return chunk.start
    return min(max(chunk.decoder_floor, chunk.start), chunk.end - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Builder:
    spec: ModelSpec
    state: StateLayout
    truncation: Truncation
    device: torch.device

    def build(self, chunks: Sequence[ChunkPlan], rows: Mapping[bytes, AttemptRows]) -> Batch:
        kept = [first_decoder_row(chunk, self.truncation) for chunk in chunks]
        starts = [chunk.start for chunk in chunks]
        cu_rows = np.concatenate([[0], np.cumsum([chunk.end - chunk.start for chunk in chunks])])
        cu_kept = np.concatenate(
            [[0], np.cumsum([chunk.end - first for chunk, first in zip(chunks, kept, strict=True)])]
        )
        is_image = [_image_mask(rows[chunk.attempt_id], chunk.start, chunk.end) for chunk in chunks]
        image_rows, image_embeddings = self._embeddings(chunks, rows, is_image, cu_rows)
        decoder_rows = [np.arange(cu_rows[b] + kept[b] - chunk.start, cu_rows[b + 1]) for b, chunk in enumerate(chunks)]
        floors = [chunk.window_floor for chunk in chunks]
        decoder_floors = [max(chunk.window_floor, chunk.decoder_floor) for chunk in chunks]
        return Batch(
            token_ids=self._ints(_token_ids(rows[c.attempt_id], c.start, c.end) for c in chunks),
            image_rows=image_rows,
            image_embeddings=image_embeddings,
            history_ids=self._history_ids(chunks, rows),
            cu_rows=self._ints([cu_rows]),
            starts=self._ints([np.array(starts)]),
            state_slots=self._ints([np.array([chunk.state_slot for chunk in chunks])]),
            encoder=self._row_batch(chunks, starts, floors, is_image),
            decoder=self._row_batch(
                chunks, kept, decoder_floors, [m[k - c.start :] for m, k, c in zip(is_image, kept, chunks, strict=True)]
            ),
            decoder_rows=self._ints(decoder_rows),
            entries=PerRatio(r1=self._entry_batch(chunks, 1), r2=self._entry_batch(chunks, 2)),
            last_rows=self._ints([np.array([cu_kept[b + 1] - 1 for b, chunk in enumerate(chunks) if chunk.is_last])]),
        )

    def _row_batch(
        self, chunks: Sequence[ChunkPlan], firsts: Sequence[int], floors: Sequence[int], is_image: Sequence[Mask]
    ) -> RowBatch:
        """Rows [first, end) of each chunk; no window key below the chunk's floor is visible or kept."""
        window, num_history = self.state.window_tokens, len(chunks) * self.state.window_tokens
        positions, history, index, ring = [], [], [], []
        num_rows = 0
        for b, (chunk, first, floor) in enumerate(zip(chunks, firsts, floors, strict=True)):
            position = np.arange(first, chunk.end)
            before = np.arange(chunk.start - window, chunk.start)
            key = position[:, None] + np.arange(1 - window, 1)
            in_step = num_history + num_rows + key - first
            in_history = b * window + key - chunk.start + window
            index.append(np.where(key >= max(floor, 0), np.where(key >= chunk.start, in_step, in_history), -1))
            positions.append(position)
            history.append(np.where(before >= max(floor, 0), self._ring_slots(chunk, before), -1))
            is_kept = position >= max(floor, chunk.end - self.state.ring_rows)
            ring.append(np.where(is_kept, self._ring_slots(chunk, position), -1))
            num_rows += len(position)
        return RowBatch(
            positions=self._ints(positions),
            is_image=torch.from_numpy(np.concatenate(is_image)).to(self.device),
            history_slots=self._ints(history),
            window_index=self._ints(index),
            ring_slots=self._ints(ring),
            entries=PerRatio(r1=self._entry_range(chunks, positions, 1), r2=self._entry_range(chunks, positions, 2)),
        )

    def _ring_slots(self, chunk: ChunkPlan, positions: Positions) -> Positions:
        if chunk.state_slot < 0:
            return np.full_like(positions, -1)
        return chunk.state_slot * self.state.ring_rows + positions % self.state.ring_rows

    def _entry_batch(self, chunks: Sequence[ChunkPlan], ratio: int) -> EntryBatch:
        write_slots, write_positions, gather_slots = [], [], []
        for chunk in chunks:
            closing = np.arange(chunk.start // ratio, chunk.end // ratio)
            is_new = closing * ratio >= chunk.hit_tokens
            write_slots.append(np.where(is_new, _entry_slots(chunk, closing, ratio), -1))
            write_positions.append(closing * ratio)
            visible = _entry_slots(chunk, np.arange(chunk.end // ratio), ratio)
            gather_slots.append(visible if len(visible) else np.array([-1]))
        return EntryBatch(
            write_slots=self._ints(write_slots),
            write_positions=self._ints(write_positions),
            gather_slots=self._ints(gather_slots),
        )

    def _entry_range(self, chunks: Sequence[ChunkPlan], positions: Sequence[Positions], ratio: int) -> EntryRange:
        num_entries = [max(1, chunk.end // ratio) for chunk in chunks]
        firsts = np.cumsum([0, *num_entries[:-1]])
        return EntryRange(
            first=self._ints(np.full_like(p, first) for p, first in zip(positions, firsts, strict=True)),
            num_visible=self._ints((p + 1) // ratio for p in positions),
            max_visible=max((int(p[-1]) + 1) // ratio for p in positions),
        )

    def _history_ids(self, chunks: Sequence[ChunkPlan], rows: Mapping[bytes, AttemptRows]) -> Tensor:
        width = self.spec.engram.max_ngram - 1 if self.spec.engram else 0
        history = np.full((len(chunks), width), -1, dtype=np.int64)
        for b, chunk in enumerate(chunks):
            held = min(width, chunk.start)
            history[b, width - held :] = _token_ids(rows[chunk.attempt_id], chunk.start - held, chunk.start)
        return torch.from_numpy(history).to(self.device)

    def _embeddings(
        self,
        chunks: Sequence[ChunkPlan],
        rows: Mapping[bytes, AttemptRows],
        is_image: Sequence[Mask],
        cu_rows: Positions,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Step rows of image tokens and their embeddings, or (None, None)."""
        indices, data = [], []
        for b, chunk in enumerate(chunks):
            missing = is_image[b].copy()
            for span in rows[chunk.attempt_id].embeddings:
                first, last = max(span.start, chunk.start), min(span.start + len(span.data), chunk.end)
                if first < last:
                    indices.append(np.arange(first, last) - chunk.start + cu_rows[b])
                    data.append(span.data[first - span.start : last - span.start])
                    missing[first - chunk.start : last - chunk.start] = False
            if missing.any():
                raise ValueError(
                    f"{int(missing.sum())} image rows of chunk [{chunk.start}, {chunk.end}) have no embedding, the first at "
                    f"position {chunk.start + int(missing.argmax())}: expected one for every computed image row"
                )
        if not data:
            return None, None
        return self._ints(indices), torch.cat([part.to(self.device) for part in data])

    def _ints(self, parts: Iterable[Positions]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(parts)).astype(np.int32)).to(self.device)


def _entry_slots(chunk: ChunkPlan, entries: Positions, ratio: int) -> Positions:
    per_block = BLOCK_TOKENS // ratio
    slots = np.array(chunk.block_slots, dtype=np.int64)[entries // per_block]
    return np.where(slots < 0, -1, slots * per_block + entries % per_block)


def _image_mask(rows: AttemptRows, start: int, end: int) -> Mask:
    return np.zeros(end - start, dtype=np.bool_) if rows.is_image is None else rows.is_image[start:end]


def _token_ids(rows: AttemptRows, start: int, end: int) -> Positions:
    return np.where(_image_mask(rows, start, end), -1, rows.token_ids[start:end]).astype(np.int64)


def _check_chunk(chunk: ChunkPlan, rows: AttemptRows) -> None:
    where = f"chunk [{chunk.start}, {chunk.end}) of a prompt of {chunk.prompt_tokens} tokens"
    if not 0 <= chunk.start < chunk.end <= chunk.prompt_tokens:
        raise ValueError(f"{where}: expected 0 <= start < end <= prompt tokens")
    if chunk.window_floor > chunk.start:
        raise ValueError(f"{where}: window floor {chunk.window_floor} is above its start")
    if len(rows.token_ids) != chunk.prompt_tokens:
        raise ValueError(f"{where}: the attempt has {len(rows.token_ids)} token ids")
    if chunk.hit_tokens % 2:
        raise ValueError(f"{where}: hit {chunk.hit_tokens} is odd, a ratio-2 pair would be open")
    needed = -(-chunk.end // BLOCK_TOKENS)
    if len(chunk.block_slots) < needed:
        raise ValueError(f"{where}: {len(chunk.block_slots)} block slots, expected at least {needed}")
