"""The encoder process of a VE: loads the tower, then encodes batch after batch from slab to slab. The only one here with torch.

Started by encoder_link.py. Every way out ends in an exit code of k8s.md 4.6, and an exception is reported first, as a rank's. The
trap: when the RPC process is gone the pipe closes, and this process ends at once.
"""

import logging
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import crc32c
import msgspec
import torch
from torch import Tensor

from prefill_engine.log import setup_logging
from prefill_engine.model.load_progress import LoadProgress
from prefill_engine.rank.errors_at_exit import InjectedFault, describe_failure, parse_fault
from prefill_engine.vision.encoder_messages import (
    ENCODER_RANK,
    BatchDone,
    BatchJob,
    Beat,
    EncoderArgs,
    EncoderFailed,
    EncoderReady,
    FromEncoder,
    Loading,
    decode_to_encoder,
    encode,
)
from prefill_engine.vision.plan import ImagePlan, plan_image
from prefill_engine.vision.slab import AttachedSlab
from prefill_engine.vision.tower import VisionTower
from prefill_engine.vision.weights import load_vision_parameters, vision_digest, vision_numerics
from prefill_kernels.vision_ops import load_vision_ops
from prefill_plan.config import Device
from prefill_plan.encoder_config import EncoderConfig
from prefill_plan.errors import ConfigError, ExitCode, PrefillError
from prefill_plan.model_parts import VisionSpec
from prefill_plan.model_spec import load_model_spec

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 0.25
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_WARMUP_SIZES = ((42882, 42), (1920, 1080), (1280, 720), (640, 480), (1, 1))
"""From the most patches that an image can have to the fewest."""


def encoder_main(args_bytes: bytes, pipe: Connection) -> None:
    """Runs until Stop; never returns, the process exits with an ExitCode."""
    args = msgspec.msgpack.decode(args_bytes, type=EncoderArgs)
    setup_logging(level="INFO", constants={"process": "encoder"})
    encoder = _Encoder(args, pipe)
    code = int(ExitCode.DRAINED)
    try:
        encoder.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        code = int(ExitCode.UNKNOWN)
    except Exception as error:
        failure = describe_failure(error, rank=ENCODER_RANK, phase=encoder.phase)
        extra = {"exit_code": failure.exit_code, "phase": encoder.phase, "detail": failure.detail}
        logger.error("encoder failed", extra=extra, exc_info=not isinstance(error, PrefillError))
        pipe.send_bytes(encode(EncoderFailed(words=failure)))
        code = failure.exit_code
    logging.shutdown()
    os._exit(code)


class _Encoder:
    """Phases in order; `phase` is what a failure is reported with."""

    def __init__(self, args: EncoderArgs, pipe: Connection) -> None:
        self.phase = "start"
        self._args = args
        self._pipe = pipe
        self._config = msgspec.json.decode(args.config, type=EncoderConfig)
        self._canvases = AttachedSlab(args.canvas_path, writable=True)
        self._rows = AttachedSlab(args.rows_path, writable=True)
        self._last_beat = 0.0

    def run(self) -> None:
        started = time.monotonic()
        self._enter("load")
        tower, spec, digest, numerics = self._load()
        self._enter("warmup")
        self._warm_up(tower, spec)
        self._enter("serve")
        ready = EncoderReady(
            vision_digest=digest,
            numerics_class=numerics,
            columns=tower.columns,
            dtype=self._config.activation,
            device=str(tower.device),
            num_layers=spec.num_layers,
            load_seconds=time.monotonic() - started,
        )
        self._send(ready)
        while isinstance(job := decode_to_encoder(self._pipe.recv_bytes()), BatchJob):
            self._raise_fault("batch")
            self._send(self._run_batch(tower, spec, job))

    def _load(self) -> tuple[VisionTower, VisionSpec, bytes, str]:
        config = self._config
        path = Path(config.model.path)
        model = load_model_spec(path)
        if model.vision is None:
            raise ConfigError(f"model.path {path}: config.json has no vision_config, so there is nothing to serve")
        try:
            ops = load_vision_ops(config.ops)
        except ValueError as error:
            raise ConfigError(f"ops: {error}") from error
        device = _pick_device(config.device)
        parameters = load_vision_parameters(path, model, device=device, progress=self._note_load)
        numerics = vision_numerics(config.device, config.ops, config.activation)
        digest = vision_digest(path, model, numerics=numerics)
        tower = VisionTower(model.vision, parameters, ops=ops, activation=_DTYPES[config.activation])
        return tower, model.vision, digest, numerics

    def _note_load(self, progress: LoadProgress) -> None:
        self._send(Loading(stage="load", done=progress.done_bytes, total=progress.total_bytes))

    def _warm_up(self, tower: VisionTower, spec: VisionSpec) -> None:
        batches = warmup_batches(self._config, spec)
        for index, plans in enumerate(batches):
            tower.encode([torch.full((plan.height, plan.width, 3), 127, dtype=torch.uint8) for plan in plans], plans)
            self._send(Loading(stage="warmup", done=index + 1, total=len(batches)))

    def _run_batch(self, tower: VisionTower, spec: VisionSpec, job: BatchJob) -> BatchDone:
        plans = [plan_image(image.width, image.height, spec) for image in job.images]
        marks = {"start": time.monotonic()}

        def observe(name: str, _tensor: Tensor) -> None:
            if name in ("patches", "vit_out", "span"):
                if tower.device.type == "cuda":
                    torch.cuda.synchronize(tower.device)
                marks[name] = time.monotonic()
            self._beat()

        canvases = [self._canvas(image.canvas_offset, plan) for image, plan in zip(job.images, plans, strict=True)]
        rows = tower.encode(canvases, plans, observe=observe)
        checksums = tuple(self._deliver(image.rows_offset, each) for image, each in zip(job.images, rows, strict=True))
        del canvases
        ends = [marks["start"], marks["patches"], marks["vit_out"], marks["span"], time.monotonic()]
        names = ("h2d", "vit", "align", "deliver")
        seconds = {name: ends[index + 1] - ends[index] for index, name in enumerate(names)}
        return BatchDone(batch_id=job.batch_id, crc32c=checksums, seconds=seconds)

    def _canvas(self, offset: int, plan: ImagePlan) -> Tensor:
        num_bytes = plan.height * plan.width * 3
        flat = torch.frombuffer(self._canvases.memory, dtype=torch.uint8, count=num_bytes, offset=offset)
        return flat.view(plan.height, plan.width, 3)

    def _deliver(self, offset: int, rows: Tensor) -> int:
        """Copies one image's rows into the slab; their checksum, -1 if one is not finite."""
        if not bool(torch.isfinite(rows).all()):
            return -1
        target = torch.frombuffer(self._rows.memory, dtype=rows.dtype, count=rows.numel(), offset=offset)
        target.view(rows.shape).copy_(rows)
        view = memoryview(self._rows.memory)[offset : offset + rows.numel() * rows.element_size()]
        return crc32c.crc32c(view)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= _BEAT_SECONDS:
            self._last_beat = now
            self._send(Beat())

    def _send(self, message: FromEncoder) -> None:
        self._pipe.send_bytes(encode(message))

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._raise_fault(phase)

    def _raise_fault(self, phase: str) -> None:
        fault = parse_fault(self._args.fault)
        if fault is not None and fault[1] == phase:
            raise InjectedFault(fault[0])


def warmup_batches(config: EncoderConfig, spec: VisionSpec) -> list[list[ImagePlan]]:
    """The smallest image alone; on a GPU also a batch about as full as batches get, the largest image among it, so that memory
    fails at start and not later (serving.md 4.2). On a CPU that would take long."""
    plans = [plan_image(width, height, spec) for width, height in _WARMUP_SIZES]
    if config.device is Device.CPU:
        return [plans[-1:]]
    limits, full = config.batching, list[ImagePlan]()
    room = limits.max_patches_per_batch
    for plan in plans:
        if plan.num_patches <= limits.max_patches_per_image:
            count = min(room // plan.num_patches, limits.max_images_per_batch - len(full))
            full += [plan] * count
            room -= count * plan.num_patches
    return [plans[-1:], full] if full else [plans[-1:]]


def _pick_device(device: Device) -> torch.device:
    if device is Device.CPU:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "device = gpu, but torch finds no CUDA device here; set device=cpu and ops=ref for the CPU profile"
        )
    return torch.device("cuda")
