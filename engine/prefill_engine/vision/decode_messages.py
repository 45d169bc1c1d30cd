"""What the RPC process and a decode worker say to each other; one message is one packet of their socket.

Pixels and encoded bytes are not in it: they lie in the worker's memory file, encoded bytes from 0, the canvas from CANVAS_OFFSET.
The trap: a worker has decoded attackers' bytes, so what it says is checked, and it holds no memory but its own file.
"""

import msgspec

from prefill_engine.vision.image_intake import PixelPolicy
from prefill_plan.config import Struct
from prefill_plan.model_parts import VisionSpec

CANVAS_OFFSET = 32 << 20
"""Bytes; above MAX_IMAGE_BYTES."""
MAX_MESSAGE_BYTES = 8192


class WorkerArgs(Struct):
    """Command line of a worker. control_fd, data_fd: open descriptors it inherits. memory_bytes: limit of its address space.
    image_cpu_seconds: CPU time of one image, after which it is killed."""

    control_fd: int
    data_fd: int
    spec: VisionSpec
    memory_bytes: int
    image_cpu_seconds: float


class WorkerReady(Struct, tag="ready"):
    """pillow: its version. enforced: names of the limits that hold, see confinement.py."""

    pillow: str
    enforced: tuple[str, ...]


class DecodeJob(Struct):
    num_bytes: int
    policy: PixelPolicy
    final: tuple[int, int] | None


class CanvasReady(Struct, tag="canvas"):
    """The canvas lies in the file. rss_bytes: of the worker, now."""

    width: int
    height: int
    cpu_seconds: float
    rss_bytes: int


class JobRejected(Struct, tag="rejected"):
    """reason: name of a pe.v1.ErrorReason. is_worn: the worker should be replaced, as it ran out of memory."""

    message: str
    reason: str
    rss_bytes: int
    is_worn: bool


WorkerMessage = WorkerReady | CanvasReady | JobRejected

encode = msgspec.json.encode
decode_job = msgspec.json.Decoder(DecodeJob).decode
decode_worker_message = msgspec.json.Decoder(WorkerReady | CanvasReady | JobRejected).decode
