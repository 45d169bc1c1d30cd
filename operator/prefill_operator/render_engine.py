"""The engine container of a PrefillPool's pod, and the host memory it needs (k8s.md 4.3)."""

import math

from prefill_operator.api_parts import Resources
from prefill_operator.engine_config import CONFIG_DIR, ENGINE_CONFIG_FILE, engine_arguments
from prefill_operator.errors import PoolInvalid
from prefill_operator.manifest import Manifest
from prefill_operator.names import ENGINE_CONTAINER
from prefill_operator.plan import PoolPlan
from prefill_operator.pool_api import PrefillPoolSpec
from prefill_operator.pool_vision import vision_shm_bytes
from prefill_operator.ports import HANDOFF_PORT, HANDOFF_PORT_NAME
from prefill_operator.quantity import quantity_bytes, quantity_value
from prefill_operator.render_container import (
    container_port,
    container_ports,
    container_security,
    drain_hook,
    identity_env,
    memory_text,
    mounts,
    probes,
)
from prefill_operator.render_volumes import MountedVolume
from prefill_plan.config import Device
from prefill_plan.kvd_config import JOURNAL_ROOM_BYTES

ENGINE_SERVICE = "pe.v1.PrefillEngine"

# What only the operator may set: pods, probes and the plan depend on it.
_RESERVED_OPTIONS = ("--config", "--model", "--ready-file", "--termination-log")
_RESERVED_SETTINGS = (
    "device=",
    "handoff.data_port",
    "kv.pool_tokens",
    "kvd.socket",
    "model.path",
    "parallel.",
    "server.drain_seconds",
    "server.host",
    "server.load_timeout_seconds",
    "server.metrics_port",
    "server.port",
    "server.probe_port",
    "vision.",
)


def render_engine(spec: PrefillPoolSpec, plan: PoolPlan, volumes: tuple[MountedVolume, ...]) -> Manifest:
    """Raises PoolInvalid for engine arguments that contradict the operator's."""
    check_arguments(spec.engine.args, field="spec.engine.args")
    lifecycle = spec.lifecycle
    arguments = ["serve", "--config", f"{CONFIG_DIR}/{ENGINE_CONFIG_FILE}"]
    arguments += engine_arguments(
        load_timeout_seconds=lifecycle.load_timeout_seconds, drain_timeout_seconds=lifecycle.drain_timeout_seconds
    )
    return {
        "name": ENGINE_CONTAINER,
        "image": spec.engine.image,
        "imagePullPolicy": str(spec.engine.image_pull_policy),
        "command": ["prefill-engine"],
        "args": arguments + list(spec.engine.args),
        "env": identity_env(on_gpu=plan.device is Device.GPU, num_threads=_num_threads(spec.engine.resources)),
        "ports": [*container_ports(), container_port(HANDOFF_PORT_NAME, HANDOFF_PORT)],
        "resources": _resources(spec, plan),
        **probes(service=ENGINE_SERVICE, load_timeout_seconds=lifecycle.load_timeout_seconds),
        "lifecycle": drain_hook(["prefill-engine", "drain"], drain_timeout_seconds=lifecycle.drain_timeout_seconds),
        # An engine that dies without a word leaves the end of its log; the operator reads JSON with "v" only.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security(),
        "volumeMounts": mounts(volumes),
    }


def engine_memory_bytes(spec: PrefillPoolSpec, plan: PoolPlan) -> int:
    """Host memory of the engine container: its processes, the Engram copy, rows of images, and the pools unless kvd holds
    them."""
    processes = plan.ep * quantity_bytes(spec.engine.memory_per_gpu)
    engram = plan.memory.host_bytes if plan.memory is not None else 0
    pools = 0 if spec.kvd.enabled else pool_bytes(spec)
    return processes + engram + pools + quantity_bytes(spec.engine.extra_shm) + vision_shm_bytes(spec)


def pool_bytes(spec: PrefillPoolSpec) -> int:
    """Host memory for KV blocks and window snapshots; kvd's may be given on its own."""
    if spec.kvd.enabled and spec.kvd.pool_size is not None:
        return quantity_bytes(spec.kvd.pool_size)
    return quantity_bytes(spec.kv_cache.host_pool) + quantity_bytes(spec.kv_cache.swa_pool)


def kvd_memory_bytes(spec: PrefillPoolSpec) -> int:
    """Host memory of the sidecar, its pool included: pages of /dev/shm count where they were first touched."""
    return quantity_bytes(spec.kvd.memory) + pool_bytes(spec) if spec.kvd.enabled else 0


def shm_text(spec: PrefillPoolSpec) -> str:
    """Size of the pod's /dev/shm: the pools, rows of images, and extraShm. A pool of kvd needs room for its lease journal beside
    it, whatever extraShm says."""
    extra = max(quantity_bytes(spec.engine.extra_shm), 2 * JOURNAL_ROOM_BYTES if spec.kvd.enabled else 0)
    return memory_text(pool_bytes(spec) + extra + vision_shm_bytes(spec))


def check_arguments(arguments: tuple[str, ...], *, field: str, reserved: tuple[str, ...] = _RESERVED_SETTINGS) -> None:
    """Raises PoolInvalid for an argument that would replace one of the operator's. reserved: beginnings of settings."""
    previous = ""
    for index, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        where = f"{field}[{index}]"
        if option in _RESERVED_OPTIONS:
            raise PoolInvalid(where, value=argument, rule="is set by the operator")
        setting = value if option == "--set" else argument if previous == "--set" else ""
        if setting.startswith(reserved):
            raise PoolInvalid(where, value=setting, rule="is set by the operator, from other fields of the spec")
        previous = argument


def _resources(spec: PrefillPoolSpec, plan: PoolPlan) -> Manifest:
    devices: dict[str, int | str] = {}
    if plan.gpus:
        devices[spec.gpu.resource_name] = plan.gpus
    if spec.network.rdma_resource_name and spec.network.rdma_per_pe:
        devices[spec.network.rdma_resource_name] = spec.network.rdma_per_pe
    if spec.engine.resources is not None:
        given = spec.engine.resources
        return {"requests": {**given.requests, **devices}, "limits": {**given.limits, **devices}}
    memory = memory_text(engine_memory_bytes(spec, plan))
    # No CPU limit: loading may use what the node has to spare, and throttling stalls a step.
    return {
        "requests": {"cpu": plan.ep * spec.engine.cpu_per_gpu, "memory": memory, **devices},
        "limits": {"memory": memory, **devices},
    }


def _num_threads(resources: Resources | None) -> int | None:
    """Threads of a CPU engine: its limit, or its request; None on GPUs and where neither is given."""
    if resources is None:
        return None
    cpus = resources.limits.get("cpu") or resources.requests.get("cpu")
    return None if cpus is None else max(1, math.ceil(quantity_value(cpus)))
