"""An encoder process without torch: rows made of the canvas's checksum, so tests see which canvas they are of; faults on demand.

fault: "" | "hang" (answers no batch) | "gate=FILE" (answers none while it is there) |
"exit=CODE@batch" (ends with last words).
"""

import os
import zlib
from multiprocessing.connection import Connection
from pathlib import Path

import crc32c
import msgspec
import numpy as np

from prefill_engine.messages import RankFailed
from prefill_engine.vision.encoder_messages import (
    BatchDone,
    BatchJob,
    EncoderArgs,
    EncoderFailed,
    EncoderReady,
    ImageJob,
    Loading,
    decode_to_encoder,
    encode,
)
from prefill_engine.vision.plan import plan_image
from prefill_engine.vision.slab import AttachedSlab
from prefill_plan.encoder_config import EncoderConfig
from prefill_plan.model_spec import ModelSpec, load_model_spec

DIGEST = b"fake".ljust(32, b".")


def fake_encoder_main(args_bytes: bytes, pipe: Connection) -> None:
    args = msgspec.msgpack.decode(args_bytes, type=EncoderArgs)
    config = msgspec.json.decode(args.config, type=EncoderConfig)
    model = load_model_spec(Path(config.model.path))
    canvases, rows = AttachedSlab(args.canvas_path, writable=True), AttachedSlab(args.rows_path, writable=True)
    pipe.send_bytes(encode(Loading(stage="load", done=1, total=1)))
    ready = EncoderReady(
        vision_digest=DIGEST,
        numerics_class="fake",
        columns=model.hidden_size,
        dtype="bf16",
        device="fake",
        num_layers=3,
        load_seconds=0.0,
    )
    pipe.send_bytes(encode(ready))
    try:
        while isinstance(job := decode_to_encoder(pipe.recv_bytes()), BatchJob):
            _misbehave(args.fault, pipe)
            checksums = tuple(_encode(image, model, canvases, rows) for image in job.images)
            pipe.send_bytes(encode(BatchDone(batch_id=job.batch_id, crc32c=checksums, seconds={"vit": 0.001})))
    except (EOFError, OSError):
        os._exit(1)
    os._exit(0)


def _misbehave(fault: str, pipe: Connection) -> None:
    kind, _, value = fault.partition("=")
    if kind == "gate":
        # A message, or its end, is the RPC process telling us to stop.
        while os.path.exists(value) and not pipe.poll(0.005):
            pass
    if kind == "hang":
        pipe.recv_bytes()
    if kind == "exit":
        code = int(value.partition("@")[0])
        words = RankFailed(rank=0, exit_code=code, code="GpuFault", phase="serve", detail="fake fault")
        pipe.send_bytes(encode(EncoderFailed(words=words)))
        os._exit(code)


def _encode(image: ImageJob, model: ModelSpec, canvases: AttachedSlab, rows: AttachedSlab) -> int:
    assert model.vision is not None
    plan = plan_image(image.width, image.height, model.vision)
    start = image.canvas_offset
    canvas = canvases.memory[start : start + plan.width * plan.height * 3]
    data = np.full((plan.tokens, model.hidden_size), zlib.crc32(canvas) & 0x3FFF, dtype="<u2").tobytes()
    rows.memory[image.rows_offset : image.rows_offset + len(data)] = data
    return int(crc32c.crc32c(data))
