"""EngineConfig of a pool, and the same for a vision encoder: what goes into the revision's immutable ConfigMap.

The trap: a ConfigMap is named by the revision, so it may hold only what the revision covers. What changes without a rollout
(load and drain time-outs) goes onto the command line of new pods (engine_arguments).
"""

import json
from pathlib import PurePosixPath
from typing import Any

import msgspec

from prefill_operator.plan import PoolPlan, plan_settings
from prefill_operator.pool_api import ModelSource, PrefillPoolSpec
from prefill_operator.pool_vision import vision_settings
from prefill_operator.ports import GRPC_PORT, HANDOFF_PORT, METRICS_PORT, PROBE_PORT
from prefill_operator.quantity import quantity_bytes, quantity_value
from prefill_operator.ve_api import VEPoolSpec
from prefill_plan.config import Device, EngineConfig, StoreKind
from prefill_plan.encoder_config import EncoderConfig, check_encoder_config
from prefill_plan.model_spec import ModelSpec

CONFIG_DIR = "/etc/prefill"
ENGINE_CONFIG_FILE = "engine.json"
ENCODER_CONFIG_FILE = "encoder.json"
KVD_SOCKET = "/run/kvd/kvd.sock"
"""Where engine and kvd meet, in a volume of their own."""
MODEL_MOUNT = "/models"
"""Where pvc, hostPath and image sources are mounted; 3FS lies at its own mountPath."""

# The CPU profile's pools live inside the container's memory limit, not in memory that a plan adds (C27): at most these shares.
_CPU_STORE_SHARE = 4
_CPU_SNAPSHOT_SHARE = 8

MAX_ROWS_BYTES = 2 << 30
"""Shared memory for the rows of a vision encoder; less where encoder.memory is small."""
_ENCODER_ROWS_SHARE = 8
_CPUS_PER_DECODE_WORKER = 2


def num_ranks(plan: PoolPlan) -> int:
    """Engine processes of a pod: one per GPU, a single one on CPUs whatever the EP (C27)."""
    return 1 if plan.device is Device.CPU else plan.ep


def model_path(source: ModelSource) -> str:
    """Where the engine finds the checkpoint."""
    if source.three_fs is not None:
        return _join(source.three_fs.mount_path, source.three_fs.path)
    return _join(MODEL_MOUNT, source.pvc.path if source.pvc is not None else "")


def engine_config(spec: PrefillPoolSpec, plan: PoolPlan, *, model: ModelSpec) -> EngineConfig:
    """What the engine of such a pod runs with."""
    return msgspec.convert(_engine_settings(spec, plan, model=model), EngineConfig)


def engine_json(spec: PrefillPoolSpec, plan: PoolPlan, *, model: ModelSpec) -> str:
    """The EngineConfig as text: the values that follow from the spec, written out even where they equal a default.

    Values we do not set are left out, since the engine refuses fields that its version does not know.
    """
    settings = _engine_settings(spec, plan, model=model)
    msgspec.convert(settings, EngineConfig)
    return _json_text(settings)


def engine_arguments(*, load_timeout_seconds: int, drain_timeout_seconds: int) -> list[str]:
    """What every new engine is told beside its ConfigMap."""
    timeouts = {"load_timeout_seconds": load_timeout_seconds, "drain_seconds": drain_timeout_seconds}
    return [word for key, value in timeouts.items() for word in ("--set", f"server.{key}={value}")]


def encoder_config(spec: VEPoolSpec) -> EncoderConfig:
    """What a vision encoder of such a pool runs with."""
    return msgspec.convert(_encoder_settings(spec), EncoderConfig)


def encoder_json(spec: VEPoolSpec) -> str:
    """The EncoderConfig as text, as engine_json writes an EngineConfig."""
    settings = _encoder_settings(spec)
    check_encoder_config(msgspec.convert(settings, EncoderConfig))
    return _json_text(settings)


def balancing_json(spec: VEPoolSpec) -> str:
    """How routers shall spread images; it may change without a rollout, so it is not in the revision's ConfigMap."""
    limit = encoder_config(spec).max_queued_patches
    return _json_text({"policy": str(spec.balancing.policy), "max_pending_patches_per_ve": limit})


def _engine_settings(spec: PrefillPoolSpec, plan: PoolPlan, *, model: ModelSpec) -> dict[str, Any]:
    """Also the degraded tier's smaller settings come from the plan."""
    on_cpu = plan.device is Device.CPU
    ranks = num_ranks(plan)
    settings = plan.memory.settings if plan.memory is not None else plan_settings(spec, model)
    store_bytes, snapshot_bytes = _host_pools(spec)
    return {
        "model": {"name": spec.model.name, "path": model_path(spec.model.source)},
        "device": str(plan.device),
        "ops": "ref" if on_cpu else "triton",
        "parallel": {"dp_size": ranks, "ep_size": ranks},
        "max_context_tokens": settings.context_tokens,
        "server": _server_settings(),
        "handoff": {"data_port": HANDOFF_PORT},
        "replay": {"keep_tokens": settings.keep_tokens, "max_rollback_tokens": settings.rollback_tokens},
        "kv": {
            "record_format": str(settings.record_format),
            "pool_tokens": plan.kv_tokens_per_gpu or settings.pool_tokens,
            "state_slots": _state_slots(settings.max_sequences),
            "snapshot_bytes": snapshot_bytes // ranks,
        },
        "store": {
            "kind": str(StoreKind.MEMORY),
            "max_bytes": store_bytes // ranks,
            "required": spec.kvd.required,
        },
        "scheduler": {"chunk_cap_tokens": settings.chunk_tokens},
        **({"kvd": {"socket": KVD_SOCKET}} if spec.kvd.enabled else {}),
        **vision_settings(spec),
    }


def _encoder_settings(spec: VEPoolSpec) -> dict[str, Any]:
    source, encoder, batching = spec.model.source, spec.encoder, spec.batching
    on_cpu = encoder.device is Device.CPU
    rows_bytes = min(MAX_ROWS_BYTES, quantity_bytes(encoder.memory) // _ENCODER_ROWS_SHARE)
    max_patches = spec.balancing.max_pending_patches_per_ve
    return {
        "model": {"name": spec.model.name, "path": _join(MODEL_MOUNT, source.pvc.path if source.pvc else "")},
        "device": str(encoder.device),
        "ops": "ref" if on_cpu else "triton",
        "server": _server_settings(),
        "batching": {
            "max_patches_per_batch": batching.max_patches_per_batch,
            "max_patches_per_image": batching.max_patches_per_image,
            "max_delay_milliseconds": batching.max_delay_milliseconds,
        },
        **({"queue": {"max_patches": max_patches}} if max_patches is not None else {}),
        "rows": {"memory_bytes": rows_bytes, "cache_bytes": rows_bytes // 2},
        # Of the container's CPUs: the process itself would count the node's.
        "decode": {"workers": max(1, int(quantity_value(encoder.cpu)) // _CPUS_PER_DECODE_WORKER)},
    }


def _server_settings() -> dict[str, Any]:
    return {"host": "0.0.0.0", "port": GRPC_PORT, "probe_port": PROBE_PORT, "metrics_port": METRICS_PORT}


def _state_slots(max_sequences: int) -> int:
    """The slots that the memory sum counts: 1.2 x the sequences and a spare one, double for hand-over (perf.md 4.1)."""
    return 2 * (max_sequences * 12 // 10 + 1)


def _host_pools(spec: PrefillPoolSpec) -> tuple[int, int]:
    """Bytes of the engine's own block store and window snapshots, all ranks together; with kvd both are kvd's."""
    if spec.kvd.enabled:
        return 0, 0
    store, snapshots = quantity_bytes(spec.kv_cache.host_pool), quantity_bytes(spec.kv_cache.swa_pool)
    if spec.engine.resources is None:
        return store, snapshots
    limit = spec.engine.resources.limits.get("memory") or spec.engine.resources.requests.get("memory")
    if limit is None:
        return store, snapshots
    memory = quantity_bytes(limit)
    return min(store, memory // _CPU_STORE_SHARE), min(snapshots, memory // _CPU_SNAPSHOT_SHARE)


def _join(directory: str, below: str) -> str:
    return str(PurePosixPath(directory) / below.strip("/"))


def _json_text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
