"""EncoderConfig: what `prefill-engine ve serve` runs with, rendered by the operator into encoder.json and read by the VE alone.

Same rules as EngineConfig: field docs give unit, range and the reason of the default; no default stands anywhere else.
"""

from prefill_plan.config import Device, ModelConfig, ServerConfig, Struct
from prefill_plan.errors import ConfigError

ENCODER_ACTIVATIONS = ("bf16", "fp32")
QUEUED_BATCHES = 4
"""Full batches that may wait where queue.max_patches does not say."""
CANVAS_BYTES_PER_PIXEL = 3 * 2
"""Of shared memory per pixel that may be queued: twice what it takes, since canvases come and go in any order."""


class BatchingConfig(Struct):
    """One pass through the tower (serving.md 4.1). An image is never split."""

    max_patches_per_batch: int = 16_384
    max_images_per_batch: int = 8
    max_delay_milliseconds: float = 2.0
    """How long an image that is ready waits for company while others are still being decoded."""
    max_patches_per_image: int = 9_216
    """1,024 tokens of 9 patches; the release's sizes reach 9,189 (C57)."""


class QueueConfig(Struct):
    max_patches: int = 0
    """Of all images that were accepted and are not encoded; more answer PATCH_QUEUE_FULL. 0 = four full batches."""
    max_image_bytes: int = 512 * 1024 * 1024
    """Encoded bytes that all waiting calls hold in memory: small pictures may be large files."""
    max_calls: int = 4096
    """Calls that wait, those for one and the same image included."""


class RowsConfig(Struct):
    """Span rows in shared memory; one image of the release takes at most 10 MiB."""

    memory_bytes: int = 2 * 1024 * 1024 * 1024
    """All rows: being computed, held for a caller, cached. Taken from /dev/shm at start."""
    cache_bytes: int = 1024 * 1024 * 1024
    """Rows that nobody holds, kept for the next one who sends the same image; least recently used go first. 0 = none. Small on
    purpose: images of earlier turns lie in the KV hit and are not sent again (serving.md 4.4)."""
    hold_seconds: float = 60.0
    """How long rows wait for their caller's Ack; renewable."""
    max_hold_seconds: float = 600.0
    """Total life of a hold, renewals included."""
    rejected_seconds: float = 60.0
    """How long a rejected image is remembered, so that it is not decoded again."""


class DecodeConfig(Struct):
    workers: int = 0
    """Processes that decode and resize; 0 = one per two CPUs this process may use."""
    worker_memory_bytes: int = 2560 * 1024 * 1024
    """Address space of one worker."""
    image_cpu_seconds: float = 5.0
    """CPU time of one image; then its worker is killed and the image rejected."""


class EncoderConfig(Struct):
    """Everything `prefill-engine ve serve` needs.

    Example: {"model": {"path": "/models/v41"}, "batching": {"max_patches_per_batch": 16384}}.
    """

    model: ModelConfig
    """path: a full checkpoint, of which the vision tensors alone are read, or a cut-out (make-checkpoint --vision-only)."""
    device: Device = Device.GPU
    ops: str = "triton"
    """Kernel set: "triton", or "ref" (plain torch, the CPU backend)."""
    activation: str = "bf16"
    """Of the tower and of the rows: "bf16"; "fp32" only to compare with golden data."""
    server: ServerConfig = ServerConfig()
    """max_waiting_requests, max_waiting_rows and max_tenant_rows are a PE's and mean nothing here."""
    batching: BatchingConfig = BatchingConfig()
    queue: QueueConfig = QueueConfig()
    rows: RowsConfig = RowsConfig()
    decode: DecodeConfig = DecodeConfig()
    image_seconds: float = 10.0
    """Longest an image may take from its arrival; then ENCODER_TIMEOUT (serving.md 4.6)."""

    @property
    def max_queued_patches(self) -> int:
        return self.queue.max_patches or QUEUED_BATCHES * self.batching.max_patches_per_batch


def check_encoder_config(config: EncoderConfig) -> None:
    """Values that make no sense together.

    Raises:
        ConfigError: key, value and what was expected.
    """
    batching, queue, rows = config.batching, config.queue, config.rows
    per_image, per_batch = batching.max_patches_per_image, batching.max_patches_per_batch
    problems = [
        (per_image < 1, "batching.max_patches_per_image", per_image, "at least 1"),
        (
            per_batch < per_image,
            "batching.max_patches_per_batch",
            per_batch,
            f"at least one image of {per_image} patches",
        ),
        (
            batching.max_images_per_batch < 1,
            "batching.max_images_per_batch",
            batching.max_images_per_batch,
            "at least 1",
        ),
        (
            config.max_queued_patches < per_image,
            "queue.max_patches",
            queue.max_patches,
            f"at least one image of {per_image} patches, or 0 for four batches",
        ),
        (
            not 0 <= rows.cache_bytes <= rows.memory_bytes,
            "rows.cache_bytes",
            rows.cache_bytes,
            f"0 to rows.memory_bytes = {rows.memory_bytes}",
        ),
        (
            not 0 < rows.hold_seconds <= rows.max_hold_seconds,
            "rows.hold_seconds",
            rows.hold_seconds,
            f"more than 0 and at most rows.max_hold_seconds = {rows.max_hold_seconds:g}",
        ),
        (queue.max_calls < 1, "queue.max_calls", queue.max_calls, "at least 1"),
        (config.decode.workers < 0, "decode.workers", config.decode.workers, "0 or more"),
        (
            config.decode.image_cpu_seconds <= 0,
            "decode.image_cpu_seconds",
            config.decode.image_cpu_seconds,
            "more than 0",
        ),
        (config.image_seconds <= 0, "image_seconds", config.image_seconds, "more than 0"),
        (
            config.activation not in ENCODER_ACTIVATIONS,
            "activation",
            config.activation,
            " or ".join(ENCODER_ACTIVATIONS),
        ),
    ]
    for is_wrong, key, value, expected in problems:
        if is_wrong:
            raise ConfigError(f"{key} = {value}, expected {expected}", key=key)
