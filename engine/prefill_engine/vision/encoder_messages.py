"""What the RPC process and the encoder process say to each other over their pipe. No pixels and no rows: both lie in slabs.

Each side opens the slabs by path; a message names offsets in them. Plans travel as the size of the canvas, from which the other
side plans again: a canvas is a fixed point of the plan (C53).
"""

import msgspec

from prefill_engine.messages import RankFailed
from prefill_plan.config import Struct

ENCODER_RANK = 0
"""The one encoder process of a VE, in last words and in termination messages."""


class EncoderArgs(Struct):
    """config: EncoderConfig as JSON. canvas_path, rows_path: slabs. fault: test hook, as of ranks."""

    config: bytes
    canvas_path: str
    rows_path: str
    fault: str


class ImageJob(Struct):
    """One image of a batch. canvas_offset, rows_offset: bytes in the slabs."""

    width: int
    height: int
    canvas_offset: int
    rows_offset: int


class BatchJob(Struct, tag="batch"):
    batch_id: int
    images: tuple[ImageJob, ...]


class Stop(Struct, tag="stop"):
    """End when the batch at hand is done."""


class Loading(Struct, tag="loading"):
    """stage: "load" or "warmup"; of the load in bytes."""

    stage: str
    done: int
    total: int


class EncoderReady(Struct, tag="ready"):
    """vision_digest: 32 bytes; covers numerics_class. columns: of a row. dtype: "bf16" or "fp32". device: as torch names it."""

    vision_digest: bytes
    numerics_class: str
    columns: int
    dtype: str
    device: str
    num_layers: int
    load_seconds: float


class Beat(Struct, tag="beat"):
    """A layer of the batch at hand is done."""


class BatchDone(Struct, tag="done"):
    """crc32c: of each image's rows; -1: it has values that are not finite. seconds: of the stages h2d, vit, align and deliver."""

    batch_id: int
    crc32c: tuple[int, ...]
    seconds: dict[str, float]


class EncoderFailed(Struct, tag="failed"):
    """Last words."""

    words: RankFailed


ToEncoder = BatchJob | Stop
FromEncoder = Loading | EncoderReady | Beat | BatchDone | EncoderFailed

encode = msgspec.msgpack.encode
decode_to_encoder = msgspec.msgpack.Decoder(BatchJob | Stop).decode
decode_from_encoder = msgspec.msgpack.Decoder(Loading | EncoderReady | Beat | BatchDone | EncoderFailed).decode
