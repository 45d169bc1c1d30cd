"""What spec.vision of a PrefillPool becomes: the engine's settings, bytes of /dev/shm, bytes of a GPU.

Pure; used by the plan, the rendered pod and the ConfigMap. The trap: a pool that encodes no images must render as it did before
this field existed, so vision_settings is empty then and every sum is 0.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from prefill_operator.names import Kind, object_base
from prefill_operator.pool_api import PoolVisionSpec, PrefillPoolSpec, VisionSource
from prefill_operator.ports import GRPC_PORT
from prefill_operator.quantity import quantity_bytes
from prefill_plan.config import Device, VisionMode
from prefill_plan.encoder_config import CANVAS_BYTES_PER_PIXEL, QUEUED_BATCHES, BatchingConfig

_MODES: Mapping[VisionSource, VisionMode] = MappingProxyType(
    {
        VisionSource.NONE: VisionMode.NONE,
        VisionSource.REMOTE: VisionMode.REMOTE,
        VisionSource.IN_ENGINE: VisionMode.IN_ENGINE,
    }
)

# As for the other pools of the CPU profile: a share of the container's memory limit at most (C27).
_CPU_ROWS_SHARE = 8

PATCH_PIXELS = 14 * 14
"""config.json: vision_config.patch_size of the released model."""

# The in-engine encoder on a GPU: weights (sum over vision.md 7), a full batch at 14,336 bytes per patch (tensors alive at once in
# attention), and a CUDA context of its own. The last is assumed, none of it measured.
_TOWER_BYTES = 970_536_960
_PASS_BYTES_PER_PATCH = 14_336
_CUDA_CONTEXT_BYTES = 500_000_000


def canvas_bytes(max_patches: int) -> int:
    """Shared memory of an encoder in whose queue so many patches may wait."""
    return max_patches * PATCH_PIXELS * CANVAS_BYTES_PER_PIXEL


def encoder_endpoints(vision: PoolVisionSpec) -> tuple[str, ...]:
    """host:port of the encoders to ask. A VEPool's headless Service has one address per ready VE; its short name resolves in
    the pods of its namespace."""
    if vision.ve_pool_ref is not None:
        return (f"{object_base(Kind.VE_POOL, vision.ve_pool_ref.name)}:{GRPC_PORT}",)
    return vision.endpoints


def rows_bytes(spec: PrefillPoolSpec) -> int:
    """Of the slab that holds rows of images; 0 without vision."""
    if spec.vision.mode is VisionSource.NONE:
        return 0
    wanted = quantity_bytes(spec.vision.rows_pool)
    given = spec.engine.resources
    limit = None if given is None else given.limits.get("memory") or given.requests.get("memory")
    return wanted if limit is None else min(wanted, quantity_bytes(limit) // _CPU_ROWS_SHARE)


def vision_shm_bytes(spec: PrefillPoolSpec) -> int:
    """Bytes of /dev/shm, allocated when the engine starts: the rows, and with InEngine the encoder's rows and canvases."""
    if spec.vision.mode is not VisionSource.IN_ENGINE:
        return rows_bytes(spec)
    return 2 * rows_bytes(spec) + canvas_bytes(QUEUED_BATCHES * BatchingConfig().max_patches_per_batch)


def vision_gpu_bytes(spec: PrefillPoolSpec) -> int:
    """What an in-engine encoder takes of a GPU, counted on every GPU of the PE since plans are even; 0 otherwise."""
    if spec.vision.mode is not VisionSource.IN_ENGINE or spec.engine.device is Device.CPU:
        return 0
    return _TOWER_BYTES + BatchingConfig().max_patches_per_batch * _PASS_BYTES_PER_PATCH + _CUDA_CONTEXT_BYTES


def vision_settings(spec: PrefillPoolSpec) -> dict[str, Any]:
    """The part `vision` of the EngineConfig; empty without vision."""
    vision = spec.vision
    if vision.mode is VisionSource.NONE:
        return {}
    return {
        "vision": {
            "mode": str(_MODES[vision.mode]),
            "endpoints": list(encoder_endpoints(vision)),
            **({"numerics_class": vision.numerics_class} if vision.numerics_class is not None else {}),
            "rows_bytes": rows_bytes(spec),
            "image_seconds": vision.image_seconds,
        }
    }
