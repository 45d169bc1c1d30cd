"""A decode worker: one image after the other from its memory file into its memory file, until its socket closes.

Started by worker_process.py as `python -m prefill_engine.vision.decode_worker ARGS`. It never loads torch. The traps: everything
must be imported before confine(), which forbids opening files; an image's CPU limit is SIGPROF, which ends the process.
"""

import io
import os
import signal
import socket
import sys
import time
import warnings

import msgspec
import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image

from prefill_engine.vision.confinement import confine
from prefill_engine.vision.decode import decode_canvas, decode_rgb
from prefill_engine.vision.decode_messages import (
    CANVAS_OFFSET,
    MAX_MESSAGE_BYTES,
    CanvasReady,
    JobRejected,
    WorkerArgs,
    WorkerReady,
    decode_job,
    encode,
)
from prefill_engine.vision.image_header import read_header
from prefill_engine.vision.image_intake import WHITE
from prefill_engine.vision.pixels import check_pillow
from prefill_plan.errors import ConfigError, ExitCode, ImageRejected
from prefill_plan.model_parts import VisionSpec

_CHANNELS = 3
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def canvas_bytes(spec: VisionSpec) -> int:
    """Upper bound of a canvas: max_image_tokens cells."""
    side = spec.patch_size * spec.downsample_ratio
    return spec.max_image_tokens * side * side * _CHANNELS


class _Worker:
    """Owner of this process's ends of the socket and the memory file."""

    def __init__(self, args: WorkerArgs) -> None:
        self._args = args
        self._control = socket.socket(fileno=args.control_fd)
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)

    def serve(self) -> None:
        """Until the RPC process closes its end or is gone."""
        enforced = confine(
            memory_bytes=self._args.memory_bytes, file_bytes=CANVAS_OFFSET + canvas_bytes(self._args.spec)
        )
        self._control.send(encode(WorkerReady(pillow=PIL.__version__, enforced=enforced)))
        while packet := self._control.recv(MAX_MESSAGE_BYTES):
            self._control.send(encode(self._answer(packet)))

    def _answer(self, packet: bytes) -> CanvasReady | JobRejected:
        job = decode_job(packet)
        started = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, self._args.image_cpu_seconds)
        try:
            data = os.pread(self._args.data_fd, job.num_bytes, 0)
            canvas = decode_canvas(data, policy=job.policy, final=job.final, spec=self._args.spec)
            self._write(canvas.pixels)
        except ImageRejected as error:
            return self._rejected(error.message, error.reason, is_worn=False)
        except MemoryError:
            text = f"image needs more than the {self._args.memory_bytes >> 20} MiB a decoder has; not encoded"
            return self._rejected(text, "IMAGE_REJECTED", is_worn=True)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        plan = canvas.intake.plan
        seconds = time.process_time() - started
        return CanvasReady(width=plan.width, height=plan.height, cpu_seconds=seconds, rss_bytes=self._rss_bytes())

    def _rejected(self, message: str, reason: str, *, is_worn: bool) -> JobRejected:
        return JobRejected(message=message, reason=reason, rss_bytes=self._rss_bytes(), is_worn=is_worn)

    def _write(self, pixels: npt.NDArray[np.uint8]) -> None:
        rest, at = pixels.reshape(-1).data, CANVAS_OFFSET
        while rest:
            written = os.pwrite(self._args.data_fd, rest, at)
            rest, at = rest[written:], at + written

    def _rss_bytes(self) -> int:
        return int(os.pread(self._statm, 256, 0).split()[1]) * _PAGE_BYTES


def load_decoders() -> None:
    """Encodes and decodes a dot in each format: whatever Pillow imports late is imported now, and a broken build shows itself."""
    for name in ("PNG", "JPEG", "WEBP", "GIF"):
        for mode in ("RGB", "P", "LA"):
            file = io.BytesIO()
            image = Image.new(mode, (8, 8))
            (image.convert("RGB") if name == "JPEG" else image).save(file, name)
            data = file.getvalue()
            decode_rgb(data, read_header(data), background_rgb=WHITE)


def main(args_json: str) -> int:
    args = msgspec.json.decode(args_json, type=WorkerArgs)
    warnings.simplefilter("ignore")
    try:
        check_pillow()
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return ExitCode.CONFIG
    load_decoders()
    _Worker(args).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
