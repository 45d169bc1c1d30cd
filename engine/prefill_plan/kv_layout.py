"""Byte-exact layout of what the engine keeps, stores and hands over: blocks, window state, request row (kv.md 1).

Pools, stores, kernels and the decode side all read offsets from here. Everything is little-endian. The trap: a block's
payload (stored, hashed into the layout digest) is shorter than its stride in the GPU pool, and shorter than its record
on disk.
"""

import hashlib
import struct
from math import lcm

from prefill_plan.config import RecordFormat, Struct
from prefill_plan.errors import KvError
from prefill_plan.layer_spec import BLOCK_TOKENS
from prefill_plan.model_spec import ModelSpec

__all__ = [
    "BLOCK_TOKENS",
    "REQUEST_ROW_BYTES",
    "BlockLayout",
    "RequestRow",
    "SourceLayout",
    "StateLayout",
    "block_layout",
    "main_record_bytes",
    "state_layout",
    "window_record_bytes",
]

# Sections and state parts start at multiples of this (kv.md 1.3, 1.4: pad32).
_SECTION_ALIGN = 32
# Kernels read block rows with 128-byte loads (kv.md 1.3: stride = align to lcm(128, record)).
_STRIDE_ALIGN = 128
# O_DIRECT and RDMA want whole pages (kv.md 2.3).
_PAGE_BYTES = 4096
# Fixed header fields without the CRC table: magic, version, digests, key, index, provenance, header CRC (C12).
_HEADER_FIXED_BYTES = 128
_LAYOUT_VERSION = b"prefill-block-layout\x001le"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def main_record_bytes(head_dim: int, record_format: RecordFormat) -> int:
    """Bytes of one main-KV entry, data then scales (kv.md 1.2): 288 (FP4) or 528 (FP8) for head_dim 512."""
    if record_format == RecordFormat.FP4:
        return head_dim // 2 + head_dim // 16
    return head_dim + head_dim // 32


def window_record_bytes(head_dim: int) -> int:
    """Bytes of one window-KV row: e4m3 data, then ue8m0 scales of 32 (always FP8, kv.md 1.2)."""
    return main_record_bytes(head_dim, RecordFormat.FP8)


class SourceLayout(Struct):
    """Where one KV source layer's group lies in a block. Offsets are bytes from the block's start.

    A group is [index data of all entries | index scales of all entries | pad | main records of all entries | pad].
    """

    layer: int
    ratio: int
    entries: int
    """Entries per block: block tokens / ratio."""
    group_offset: int
    index_offset: int
    index_bytes: int
    """Data and scales of the index section, pad excluded."""
    main_offset: int
    main_bytes: int
    group_bytes: int
    """Whole group, pads included."""
    main_record_bytes: int
    index_data_bytes: int
    """Per entry: index_head_dim x e2m1."""
    index_scale_bytes: int
    """Per entry: one ue8m0 byte per 32 channels."""


class BlockLayout(Struct):
    """One block of 128 tokens (kv.md 1.3)."""

    record_format: RecordFormat
    block_tokens: int
    sources: tuple[SourceLayout, ...]
    """Ascending by layer, back to back."""
    payload_bytes: int
    stride_bytes: int
    """Distance of two blocks in the GPU pool."""
    header_bytes: int
    record_bytes: int
    """Header + payload, whole pages: the unit of the store."""

    def digest(self) -> bytes:
        """32 bytes naming the payload's meaning; goes into the root of block keys (kv.md 2.2)."""
        digest = hashlib.sha256(_LAYOUT_VERSION)
        digest.update(self.record_format.encode())
        digest.update(struct.pack("<II", self.block_tokens, self.payload_bytes))
        for source in self.sources:
            digest.update(
                struct.pack(
                    "<10I",
                    source.layer,
                    source.ratio,
                    source.entries,
                    source.index_offset,
                    source.index_bytes,
                    source.index_data_bytes,
                    source.index_scale_bytes,
                    source.main_offset,
                    source.main_bytes,
                    source.main_record_bytes,
                )
            )
        return digest.digest()


def block_layout(spec: ModelSpec, record_format: RecordFormat) -> BlockLayout:
    """Layout of a block of this model. FP4 of the release: 113,920 B payload, 114,048 B stride, 114,688 B record."""
    record = main_record_bytes(spec.head_dim, record_format)
    index_data, index_scale = spec.index_head_dim // 2, spec.index_head_dim // 32
    sources = []
    offset = 0
    for layer in spec.kv_sources:
        ratio = spec.compress_ratios[layer]
        entries = BLOCK_TOKENS // ratio
        index_bytes = entries * (index_data + index_scale)
        main_offset = offset + _round_up(index_bytes, _SECTION_ALIGN)
        main_bytes = entries * record
        end = main_offset + _round_up(main_bytes, _SECTION_ALIGN)
        sources.append(
            SourceLayout(
                layer=layer,
                ratio=ratio,
                entries=entries,
                group_offset=offset,
                index_offset=offset,
                index_bytes=index_bytes,
                main_offset=main_offset,
                main_bytes=main_bytes,
                group_bytes=end - offset,
                main_record_bytes=record,
                index_data_bytes=index_data,
                index_scale_bytes=index_scale,
            )
        )
        offset = end
    record_bytes = _round_up(_HEADER_FIXED_BYTES + 4 * len(sources) + offset, _PAGE_BYTES)
    return BlockLayout(
        record_format=record_format,
        block_tokens=BLOCK_TOKENS,
        sources=tuple(sources),
        payload_bytes=offset,
        stride_bytes=_round_up(offset, lcm(_STRIDE_ALIGN, record)),
        header_bytes=record_bytes - offset,
        record_bytes=record_bytes,
    )


class StateLayout(Struct):
    """Per-sequence state: window rings of all layers and compressor rings (kv.md 1.4, 1.5).

    A ring holds token p of a layer at row p % rows; the GPU ring is longer than a snapshot, so that both snapshot
    positions of a finished prefill are still in it (C2).
    """

    window_record_bytes: int
    window_tokens: int
    rollback_tokens: int
    snapshot_rows: int
    """Rows per layer of a snapshot and of the hand-over: window + rollback."""
    ring_rows: int
    """Rows per layer of the GPU ring: snapshot_rows + one block + keep tokens."""
    num_encoder_layers: int
    num_decoder_layers: int
    num_draft_layers: int
    compress_state_rows: int
    """Rows of a compressor ring: ratio 2 + (rollback - 1) (model.md 2.5)."""
    num_pair_sources: int
    """KV sources of ratio 2; only they carry an open pair."""
    head_dim: int

    @property
    def num_layers(self) -> int:
        """Layers with a window ring, draft layers included."""
        return self.num_encoder_layers + self.num_decoder_layers + self.num_draft_layers

    @property
    def snapshot_layer_bytes(self) -> int:
        """One layer's ring image in a snapshot or hand-over."""
        return _round_up(self.snapshot_rows * self.window_record_bytes, _SECTION_ALIGN)

    @property
    def snapshot_bytes(self) -> int:
        """Encoder layers only: decoder and draft windows are never stored (R5)."""
        return self.num_encoder_layers * self.snapshot_layer_bytes

    @property
    def decoder_offset(self) -> int:
        """Start of decoder windows in the hand-over; the encoder's are at 0 and have the snapshot's form."""
        return self.snapshot_bytes

    @property
    def draft_offset(self) -> int:
        return self.decoder_offset + self.num_decoder_layers * self.snapshot_layer_bytes

    @property
    def compress_state_offset(self) -> int:
        return self.draft_offset + self.num_draft_layers * self.snapshot_layer_bytes

    @property
    def compress_state_bytes(self) -> int:
        """Rings of (score, latent) float32 per pair source."""
        return self.num_pair_sources * self.compress_state_rows * 2 * self.head_dim * 4

    @property
    def handover_bytes(self) -> int:
        """Encoder, decoder, draft windows, compressor rings, pad."""
        return self._pad(self.compress_state_offset + self.compress_state_bytes)

    @property
    def gpu_slot_bytes(self) -> int:
        """What one state slot takes on the GPU, as the memory plan counts it: 9,213,600 for the release."""
        rings = self.num_layers * self.ring_rows * self.window_record_bytes
        return self._pad(rings + self.compress_state_bytes)

    def _pad(self, num_bytes: int) -> int:
        return _round_up(num_bytes, lcm(_SECTION_ALIGN, self.window_record_bytes))


def state_layout(spec: ModelSpec, *, keep_tokens: int, rollback_tokens: int) -> StateLayout:
    """State of this model under the replay settings (checked by positions.validate_keep)."""
    snapshot_rows = spec.window_tokens + rollback_tokens
    return StateLayout(
        window_record_bytes=window_record_bytes(spec.head_dim),
        window_tokens=spec.window_tokens,
        rollback_tokens=rollback_tokens,
        snapshot_rows=snapshot_rows,
        ring_rows=snapshot_rows + BLOCK_TOKENS + keep_tokens,
        num_encoder_layers=spec.first_decoder_layer,
        num_decoder_layers=spec.num_layers - spec.first_decoder_layer,
        num_draft_layers=spec.draft.num_layers if spec.draft else 0,
        compress_state_rows=2 + max(0, rollback_tokens - 1),
        num_pair_sources=sum(spec.compress_ratios[layer] == 2 for layer in spec.kv_sources),
        head_dim=spec.head_dim,
    )


# version, prompt_tokens, decoder_floor, window_floor as u32; last_tokens, first_token as i32.
_REQUEST_ROW = struct.Struct("<4I4i")
_REQUEST_ROW_VERSION = 1
REQUEST_ROW_BYTES = _REQUEST_ROW.size


class RequestRow(Struct):
    """Scalars of a finished prefill that the decode side needs beside the KV (C5)."""

    prompt_tokens: int
    decoder_floor: int
    """No decoder window key exists below this position."""
    window_floor: int
    """No encoder window key exists below this position; 0 unless the window was rebuilt by a replay."""
    last_tokens: tuple[int, int, int]
    """The last 3 token ids, oldest first; -1 = image or none. The Engram hash of the next token reads them."""
    first_token: int
    """-1 = none was chosen."""

    def encode(self) -> bytes:
        return _REQUEST_ROW.pack(
            _REQUEST_ROW_VERSION,
            self.prompt_tokens,
            self.decoder_floor,
            self.window_floor,
            *self.last_tokens,
            self.first_token,
        )

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> "RequestRow":
        """Inverse of encode.

        Raises:
            KvError: another length or version than ours.
        """
        if len(data) != REQUEST_ROW_BYTES:
            raise KvError(f"request row of {len(data)} bytes, expected {REQUEST_ROW_BYTES}; the hand-over is refused")
        version, prompt_tokens, decoder_floor, window_floor, *tokens = _REQUEST_ROW.unpack(data)
        if version != _REQUEST_ROW_VERSION:
            raise KvError(f"request row version {version}, expected {_REQUEST_ROW_VERSION}; the hand-over is refused")
        oldest, middle, newest, first_token = tokens
        return cls(
            prompt_tokens=prompt_tokens,
            decoder_floor=decoder_floor,
            window_floor=window_floor,
            last_tokens=(oldest, middle, newest),
            first_token=first_token,
        )
