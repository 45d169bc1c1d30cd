"""The engine container of a PrefillPool's pod."""

import math

from prefill_operator.api_parts import Resources
from prefill_operator.engine_config import CONFIG_DIR, ENGINE_CONFIG_FILE, engine_arguments
from prefill_operator.host_memory import engine_memory_bytes
from prefill_operator.manifest import Manifest
from prefill_operator.names import ENGINE_CONTAINER
from prefill_operator.plan import PoolPlan
from prefill_operator.pool_api import PrefillPoolSpec
from prefill_operator.ports import HANDOFF_PORT, HANDOFF_PORT_NAME
from prefill_operator.quantity import quantity_value
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
from prefill_operator.reserved_arguments import ENGINE_SETTINGS, check_arguments
from prefill_plan.config import Device

ENGINE_SERVICE = "pe.v1.PrefillEngine"


def render_engine(spec: PrefillPoolSpec, plan: PoolPlan, volumes: tuple[MountedVolume, ...]) -> Manifest:
    """Raises PoolInvalid for engine arguments that contradict the operator's."""
    check_arguments(spec.engine.args, field="spec.engine.args", settings=ENGINE_SETTINGS)
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


def _resources(spec: PrefillPoolSpec, plan: PoolPlan) -> Manifest:
    devices: dict[str, int | str] = {}
    if plan.gpus:
        devices[spec.gpu.resource_name] = plan.gpus
    if spec.network.rdma_resource_name and spec.network.rdma_per_pe:
        devices[spec.network.rdma_resource_name] = spec.network.rdma_per_pe
    if spec.engine.resources is not None:
        given = spec.engine.resources
        return {"requests": {**given.requests, **devices}, "limits": {**given.limits, **devices}}
    memory = memory_text(engine_memory_bytes(spec, ep=plan.ep, engram_bytes=plan.engram_host_bytes))
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
