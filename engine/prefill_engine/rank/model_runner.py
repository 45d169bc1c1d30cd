"""Loads the model of a rank and runs its steps. Owner of parameters and step numbers; slots come from the plan.

The trap: everything runs under torch.inference_mode, and a step blocks this thread until its bytes are written, on a GPU too:
only then may a block be published, a slot be given to a copy that no stream orders behind the step, or a step's time be believed.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from prefill_engine.batch import AttemptRows, build_batch
from prefill_engine.kv_cache import KvCache
from prefill_engine.model.digests import tokenizer_digest, weights_digest
from prefill_engine.model.engram_tables import build_engram_tables
from prefill_engine.model.flash import DeepseekV41Flash
from prefill_engine.model.load_progress import LoadProgress
from prefill_engine.model.step import never_wait
from prefill_engine.model.weights import load_parameters
from prefill_engine.step_plan import ChunkPlan, StepPlan
from prefill_engine.vision.weights import vision_digest, vision_numerics
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.op_sets import load_ops, ops_identity
from prefill_plan.config import EngineConfig, Truncation, VisionMode
from prefill_plan.errors import ConfigError
from prefill_plan.kv_layout import BlockLayout, StateLayout
from prefill_plan.model_spec import ModelSpec

_ENCODER_ACTIVATION = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """logits: [num finished prompts, V] wide, in chunk order; seconds: of the whole pass."""

    step_id: int
    logits: Tensor
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDigests:
    """32 bytes each; roots of the block keys (kv.md 2.2). vision: of the checkpoint's tower, b"" without vision; not a root,
    since every image's content key has it."""

    weights: bytes
    tokenizer: bytes
    layout: bytes
    numerics_class: str
    vision: bytes = b""


class ModelRunner:
    """One rank's model, cache and step counter."""

    def __init__(
        self,
        model: DeepseekV41Flash,
        cache: KvCache,
        *,
        truncation: Truncation,
        device: torch.device,
        wait_for_device: Callable[[], None],
    ) -> None:
        """wait_for_device: returns when everything that this thread has queued is done."""
        self.cache = cache
        self.num_steps = 0
        self._model = model
        self._truncation = truncation
        self._device = device
        self._wait_for_device = wait_for_device

    def run(
        self,
        chunks: tuple[ChunkPlan, ...],
        rows: Mapping[bytes, AttemptRows],
        *,
        on_layer: Callable[[int, int], None],
        wait_source: Callable[[int], None] = never_wait,
    ) -> StepResult:
        """One step; no chunks = placeholder. on_layer(step_id, layer) is called after each layer, wait_source as Step says."""
        self.num_steps += 1
        step_id = self.num_steps
        start = time.monotonic()
        with torch.inference_mode():
            batch = build_batch(
                StepPlan(step_id=step_id, chunks=chunks),
                rows,
                spec=self._model.spec,
                state=self.cache.state,
                truncation=self._truncation,
                device=self._device,
            )
            output = self._model.forward(
                batch, self.cache, on_layer=lambda layer: on_layer(step_id, layer), wait_source=wait_source
            )
            self._wait_for_device()
        return StepResult(step_id=step_id, logits=output.logits, seconds=time.monotonic() - start)


def load_model(
    config: EngineConfig, spec: ModelSpec, *, device: torch.device, progress: Callable[[LoadProgress], None]
) -> DeepseekV41Flash:
    """Reads the checkpoint and builds the model.

    Raises:
        CheckpointError: files do not match the config.
        ConfigError: the kernel set is not available.
    """
    try:
        ops = load_ops(config.ops)
    except ValueError as error:
        raise ConfigError(f"ops = {config.ops}: {error}") from error
    path = Path(config.model.path)
    parameters = load_parameters(path, spec, device=device, expert_range=range(spec.num_experts), progress=progress)
    tables = build_engram_tables(spec, path / "tokenizer.json")
    return DeepseekV41Flash(
        spec,
        parameters,
        ops=ops,
        numerics=PRODUCTION,
        engram_tables=tables.to(device) if tables is not None else None,
        record_format=config.kv.record_format,
    )


def read_digests(config: EngineConfig, spec: ModelSpec, layout: BlockLayout) -> ModelDigests:
    """What block keys of this engine are rooted in. The numerics class names everything that may change a byte.

    Raises:
        CheckpointError: vision is configured and the checkpoint has no tower whose digest encoders could be held against.
    """
    path = Path(config.model.path)
    return ModelDigests(
        weights=weights_digest(path),
        tokenizer=tokenizer_digest(path),
        layout=layout.digest(),
        numerics_class=f"{config.device}-{ops_identity(config.ops)}-{config.kv.record_format}-invariant",
        vision=_rows_digest(config, spec),
    )


def _rows_digest(config: EngineConfig, spec: ModelSpec) -> bytes:
    """Of the encoders whose rows will do; b"" without vision."""
    if config.vision.mode is VisionMode.NONE:
        return b""
    numerics = config.vision.numerics_class or vision_numerics(config.device, config.ops, _ENCODER_ACTIVATION)
    return vision_digest(Path(config.model.path), spec, numerics=numerics)


def build_cache(
    config: EngineConfig, spec: ModelSpec, *, layout: BlockLayout, state: StateLayout, device: torch.device
) -> KvCache:
    """The preallocated pools of a rank, sized by the configuration."""
    images = None
    if device.type == "cuda":
        # Here, because triton is no part of a CPU install.
        from prefill_kernels.gpu import ring_rows

        images = ring_rows
    return KvCache(
        spec,
        layout=layout,
        state=state,
        num_blocks=config.kv.pool_tokens // layout.block_tokens,
        num_state_slots=config.kv.state_slots,
        device=device,
        images=images,
    )
