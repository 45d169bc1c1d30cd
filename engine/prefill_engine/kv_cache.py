"""The preallocated KV tensors of one rank and their views: block pages, window rings, compressor state.

The model writes through the views at the slots a StepPlan names; the rank moves whole blocks and states in and out as
bytes. Which slot belongs to whom is not known here (BlockPool, SwaPool). The trap: page views are strided (a page is a
slice of a block), so index them as `pages[block_slot, entry]`; `reshape` would silently copy. Window rings and
compressor state are contiguous.

Layouts: prefill_plan.kv_layout (kv.md 1.3 to 1.5). A ring holds token p at row p % ring_rows; a snapshot, and each SWA
part of the hand-over state, holds it at row p % snapshot_rows and covers the last snapshot_rows tokens before its
position.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefill_engine.host_buffers import HostBuffers
from prefill_engine.kv.huge_pages import advise
from prefill_engine.kv.store import Buffer
from prefill_plan.kv_layout import BlockLayout, StateLayout
from prefill_plan.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _SourceViews:
    """Views of one KV source over all blocks; see KvCache.main_pages and index_pages."""

    ratio: int
    main: Tensor
    index_data: Tensor
    index_scales: Tensor


_Bytes = npt.NDArray[np.uint8]


class RingImages(Protocol):
    """prefill_kernels.gpu.ring_rows: ring images taken and restored in one launch each."""

    def take_images(
        self, rings_LZRB: Tensor, slot: int, images_LI: Tensor, *, image_rows: int, end: int, first_valid: int
    ) -> None: ...

    def restore_images(
        self, images_LI: Tensor, rings_LZRB: Tensor, slot: int, *, image_rows: int, end: int
    ) -> None: ...


class KvCache:
    """Owner of the KV memory of one rank. Sizes: num_blocks * stride plus num_state_slots * (rings + compressor state).

    raw_dtype None: records of bytes (production). A float dtype: the test-only raw format of decisions C8, same pages
    and rings with rows of floats instead of records; its bytes must never reach a store. images: for rings in device memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        layout: BlockLayout,
        state: StateLayout,
        num_blocks: int,
        num_state_slots: int,
        device: torch.device,
        raw_dtype: torch.dtype | None = None,
        images: RingImages | None = None,
    ) -> None:
        self.layout = layout
        self.state = state
        self._device = device
        self._images = images
        self._buffers = HostBuffers()
        if raw_dtype is None:
            self.blocks = _zeros(num_blocks, layout.stride_bytes, dtype=torch.uint8, device=device)
            self._block_bytes = layout.payload_bytes
            self._sources = _record_views(self.blocks, layout)
            row_width, row_dtype = state.window_record_bytes, torch.uint8
            self._image_bytes = state.snapshot_layer_bytes
        else:
            row = spec.head_dim + spec.index_head_dim
            width = sum(source.entries for source in layout.sources) * row
            self.blocks = _zeros(num_blocks, width, dtype=raw_dtype, device=device)
            self._block_bytes = width * raw_dtype.itemsize
            self._sources = _raw_views(self.blocks, layout, head_dim=spec.head_dim, index_dim=spec.index_head_dim)
            row_width, row_dtype = spec.head_dim, raw_dtype
            self._image_bytes = state.snapshot_rows * row_width * raw_dtype.itemsize
        # What a tensor tells of itself costs microseconds, and a hand-over has hundreds of blocks.
        self._num_blocks = num_blocks
        self._bytes = self.blocks.view(torch.uint8).view(-1).numpy().data if device.type == "cpu" else None
        self._rings = _zeros(
            state.num_layers, num_state_slots, state.ring_rows, row_width, dtype=row_dtype, device=device
        )
        # Seen as bytes, rows of records and rows of raw floats move alike.
        self._rings_u8 = self._rings.view(torch.uint8)
        pair_sources = [source.layer for source in layout.sources if source.ratio == 2]
        self._pair_index = {layer: index for index, layer in enumerate(pair_sources)}
        self._pairs = torch.zeros(
            len(pair_sources),
            num_state_slots,
            state.compress_state_rows,
            2,
            spec.head_dim,
            dtype=torch.float64 if raw_dtype == torch.float64 else torch.float32,
            device=device,
        )
        self._pairs_u8 = self._pairs.flatten(3).view(torch.uint8)
        content_bytes = state.num_layers * self._image_bytes + self._pairs_u8[:, 0].numel()
        self._handover_bytes = state.handover_bytes if raw_dtype is None else content_bytes

    def main_pages(self, source_layer: int) -> Tensor:
        """Main KV of a source, a strided view: [num_blocks, entries, main_record_bytes] uint8.

        Raw format: [num_blocks, entries, head_dim].

        Raises:
            KeyError: the layer is no KV source (so also for index_pages).
        """
        return self._sources[source_layer].main

    def index_pages(self, source_layer: int) -> tuple[Tensor, Tensor]:
        """Index keys of a source, strided views: data [num_blocks, entries, I/2], scales [num_blocks, entries, I/32]
        uint8.

        Raw format: [num_blocks, entries, I] and [num_blocks, entries, 0].
        """
        views = self._sources[source_layer]
        return views.index_data, views.index_scales

    def window_ring(self, layer: int) -> Tensor:
        """Window KV of a layer, contiguous: [num_state_slots, ring_rows, window_record_bytes] uint8 (raw: [..,
        head_dim]).

        Token p is at row p % ring_rows. Draft layers follow the model's layers.

        Raises:
            ValueError: no such layer.
        """
        if not 0 <= layer < len(self._rings):
            raise ValueError(
                f"no window ring for layer {layer}: the model has {len(self._rings)} layers, drafts included"
            )
        return self._rings[layer]

    def compress_state(self, source_layer: int) -> Tensor:
        """Open pairs of a source, contiguous: [num_state_slots, compress_state_rows, 2, head_dim] float32.

        [.., 0, :] is the score, [.., 1, :] the latent; token p is at row p % compress_state_rows (model.md 2.5). Raw
        format in float64: float64.

        Raises:
            KeyError: the layer is no KV source of ratio 2.
        """
        return self._pairs[self._pair_index[source_layer]]

    def block_view(self, slot: int) -> memoryview:
        """Payload bytes of one block (raw format: all its bytes), writable, shared with the tensors.

        Raises:
            ValueError: the cache is not in host memory, or no such slot.
        """
        if self._bytes is None:
            raise ValueError(f"blocks on {self._device} have no host address: expected a cache on the CPU")
        if not 0 <= slot < self._num_blocks:
            raise ValueError(f"block slot {slot} is outside [0, {self._num_blocks})")
        start = slot * (len(self._bytes) // self._num_blocks)
        return self._bytes[start : start + self._block_bytes]

    def zero_tail(self, slot: int, num_tokens: int) -> None:
        """Zeroes in place every entry of the block that is not complete within its first `num_tokens` tokens (C5)."""
        for views in self._sources.values():
            num_entries = num_tokens // views.ratio
            for pages in (views.main, views.index_data, views.index_scales):
                # By numpy where it can be: torch takes 7 us for each of a dozen of these.
                (pages.numpy() if self._bytes is not None else pages)[slot, num_entries:] = 0

    def take_snapshot(self, state_slot: int, position: int, *, first_valid: int) -> memoryview:
        """Encoder window KV before token `position`: ring images [encoder layers, snapshot_rows, row bytes] (kv.md
        1.4).

        The ring must still hold the last snapshot_rows tokens before `position`. Rows of positions below
        `first_valid`, and below 0, are absent and zero. Waits for the device.
        """
        data = self._buffers.take(self.state.num_encoder_layers * self._image_bytes)
        self._copy_out(data.reshape(-1, self._image_bytes), 0, state_slot, end=position, first=first_valid)
        return data.data

    def restore_snapshot(self, state_slot: int, position: int, data: Buffer) -> None:
        """Writes a snapshot's rows into the state's rings; every other row keeps what it holds.

        Absent rows arrive as zeros: the caller must not let a row below the snapshot's first_valid be attended to.

        Raises:
            ValueError: the data has another size than a snapshot of this layout.
        """
        image = _bytes_tensor(data, self.state.num_encoder_layers * self._image_bytes, what="snapshot")
        self._copy_in(image.view(self.state.num_encoder_layers, -1), 0, state_slot, end=position)

    def export_state(self, state_slot: int, num_tokens: int, *, first_valid: int, decoder_floor: int) -> memoryview:
        """Hand-over state after `num_tokens` tokens, handover_bytes long.

        In the order of kv.md 1.5: encoder SWA, decoder SWA, draft SWA, compressor rings, zero padding. Absent rows are
        zero: encoder rows below `first_valid`, decoder and draft rows below `decoder_floor`. Waits for the device.
        """
        data = self._buffers.take(self._handover_bytes)
        num_encoder, num_rings = self.state.num_encoder_layers, self._rings.shape[0] * self._image_bytes
        rings, rest = data[:num_rings].reshape(-1, self._image_bytes), data[num_rings:]
        self._copy_out(rings[:num_encoder], 0, state_slot, end=num_tokens, first=first_valid)
        self._copy_out(rings[num_encoder:], num_encoder, state_slot, end=num_tokens, first=decoder_floor)
        held = self._pairs_u8[:, state_slot].cpu().numpy()
        num_held = self._num_held_pairs(num_tokens)
        pairs = rest[: held.size].reshape(held.shape)
        pairs[:, :num_held], pairs[:, num_held:] = held[:, :num_held], 0
        rest[held.size :] = 0
        return data.data

    def import_state(self, state_slot: int, num_tokens: int, data: Buffer) -> None:
        """Counterpart of export_state; rows of no token of the hand-over keep what they hold.

        Raises:
            ValueError: the data has another size than the hand-over state of this layout.
        """
        rings, pairs = self._split(_bytes_tensor(data, self._handover_bytes, what="hand-over state"))
        self._copy_in(rings, 0, state_slot, end=num_tokens)
        num_held = self._num_held_pairs(num_tokens)
        self._pairs_u8[:, state_slot, :num_held] = pairs[:, :num_held].to(self._device)

    def clear_state(self, state_slot: int) -> None:
        """Zeroes rings and compressor state of one slot: a new attempt can never read its predecessor's rows."""
        self._rings[:, state_slot] = 0
        self._pairs[:, state_slot] = 0

    def _split(self, handover: Tensor) -> tuple[Tensor, Tensor]:
        """Views of hand-over bytes: ring images [layers, image bytes], compressor rows [pair sources, rows, row
        bytes]."""
        num_rings, num_pairs = self._rings.shape[0] * self._image_bytes, self._pairs_u8[:, 0].numel()
        pairs = handover[num_rings : num_rings + num_pairs]
        return handover[:num_rings].view(-1, self._image_bytes), pairs.view(self._pairs_u8[:, 0].shape)

    def _num_held_pairs(self, num_tokens: int) -> int:
        """Leading compressor-state rows that hold tokens of the sequence: token p stands in row p % rows."""
        return min(num_tokens, self.state.compress_state_rows)

    def _copy_out(self, images: _Bytes, first_layer: int, state_slot: int, *, end: int, first: int) -> None:
        """Copies rows [first, end) of consecutive layers into ring images [layers, image bytes] on the host; others are zero."""
        rows, row_bytes = self.state.snapshot_rows, self._rings_u8.shape[-1]
        layers = slice(first_layer, first_layer + len(images))
        if self._images is not None:
            taken = torch.empty(images.shape, dtype=torch.uint8, device=self._device)
            self._images.take_images(
                self._rings_u8[layers], state_slot, taken, image_rows=rows, end=end, first_valid=first
            )
            torch.from_numpy(images).copy_(taken)
            return
        start = min(end, max(0, first, end - rows))
        if end - start < rows:
            images[:] = 0
        images[:, rows * row_bytes :] = 0  # padding
        # By numpy: torch takes half as long again for the same bytes.
        ring = self._rings_u8[layers, state_slot].cpu().numpy()
        image = images[:, : rows * row_bytes].reshape(len(images), rows, row_bytes, copy=False)
        for ring_row, image_row, length in ring_runs(start, end, ring_rows=self.state.ring_rows, image_rows=rows):
            image[:, image_row : image_row + length] = ring[:, ring_row : ring_row + length]

    def _copy_in(self, images: Tensor, first_layer: int, state_slot: int, *, end: int) -> None:
        """Copies ring images [layers, image bytes] that end at `end` into the rings of consecutive layers."""
        rows = self.state.snapshot_rows
        rings = self._rings_u8[first_layer : first_layer + len(images)]
        if self._images is not None:
            self._images.restore_images(images.to(self._device), rings, state_slot, image_rows=rows, end=end)
            return
        ring, image = rings[:, state_slot], self._image_rows(images)
        for ring_row, image_row, length in ring_runs(
            max(0, end - rows), end, ring_rows=self.state.ring_rows, image_rows=rows
        ):
            ring[:, ring_row : ring_row + length] = image[:, image_row : image_row + length]

    def _image_rows(self, images: Tensor) -> Tensor:
        """[layers, snapshot_rows, row bytes] view of ring images, without the padding of each."""
        row_bytes = self._rings_u8.shape[-1]
        rows = self.state.snapshot_rows
        return images[:, : rows * row_bytes].view(len(images), rows, row_bytes)


def ring_runs(start: int, end: int, *, ring_rows: int, image_rows: int) -> list[tuple[int, int, int]]:
    """(ring row, image row, length) of stretches of tokens [start, end) that wrap in neither."""
    runs = []
    while start < end:
        ring_row, image_row = start % ring_rows, start % image_rows
        length = min(end - start, ring_rows - ring_row, image_rows - image_row)
        runs.append((ring_row, image_row, length))
        start += length
    return runs


def _record_views(blocks: Tensor, layout: BlockLayout) -> dict[int, _SourceViews]:
    """Views at the layout's offsets; index keys are sectioned: all data of the page, then all scales (kv.md 1.2)."""
    views = {}
    for source in layout.sources:
        data_end = source.index_offset + source.entries * source.index_data_bytes
        views[source.layer] = _SourceViews(
            ratio=source.ratio,
            main=_page(blocks, source.main_offset, source.entries, source.main_record_bytes),
            index_data=_page(blocks, source.index_offset, source.entries, source.index_data_bytes),
            index_scales=_page(blocks, data_end, source.entries, source.index_scale_bytes),
        )
    return views


def _raw_views(blocks: Tensor, layout: BlockLayout, *, head_dim: int, index_dim: int) -> dict[int, _SourceViews]:
    """The same pages in the same order, with rows of floats and no scales."""
    views, offset = {}, 0
    for source in layout.sources:
        main_offset = offset + source.entries * index_dim
        views[source.layer] = _SourceViews(
            ratio=source.ratio,
            main=_page(blocks, main_offset, source.entries, head_dim),
            index_data=_page(blocks, offset, source.entries, index_dim),
            index_scales=_page(blocks, offset, source.entries, 0),
        )
        offset = main_offset + source.entries * head_dim
    return views


def _zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU in huge pages, where the kernel gives them: copies of whole blocks miss the TLB on every small one."""
    memory = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        advise(memory.data_ptr(), memory.nbytes)
    return memory.zero_()


def _page(blocks: Tensor, offset: int, num_rows: int, width: int) -> Tensor:
    return blocks[:, offset : offset + num_rows * width].view(len(blocks), num_rows, width)


def _bytes_tensor(data: Buffer, num_bytes: int, *, what: str) -> Tensor:
    """A host copy of `data` as uint8; torch refuses to share read-only buffers."""
    if memoryview(data).nbytes != num_bytes:
        raise ValueError(f"{what} has {memoryview(data).nbytes} bytes: expected {num_bytes}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
