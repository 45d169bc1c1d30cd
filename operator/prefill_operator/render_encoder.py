"""The encoder container of a VEPool's pod: `prefill-engine ve serve`, configured by encoder_json, drained by `ve drain`."""

from prefill_operator.engine_config import CONFIG_DIR, ENCODER_CONFIG_FILE, encoder_config, engine_arguments
from prefill_operator.errors import PoolInvalid
from prefill_operator.manifest import Manifest
from prefill_operator.names import ENCODER_CONTAINER
from prefill_operator.pool_vision import canvas_bytes
from prefill_operator.quantity import quantity_bytes
from prefill_operator.render_container import (
    container_ports,
    container_security,
    drain_hook,
    identity_env,
    memory_text,
    mounts,
    probes,
)
from prefill_operator.render_volumes import MountedVolume
from prefill_operator.reserved_arguments import ENCODER_SETTINGS, check_arguments
from prefill_operator.ve_api import VEPoolSpec
from prefill_plan.config import Device

ENCODER_SERVICE = "pe.v1.VisionEncoder"

_LEAST_SHM_BYTES = 4 << 30
_SHM_SLACK_BYTES = 64 << 20
_CANVAS_SHARE = 4
"""Waiting images take at most this part of encoder.memory: decoders, tower and rows live of the rest."""


def render_encoder(spec: VEPoolSpec, volumes: tuple[MountedVolume, ...]) -> Manifest:
    """Raises PoolInvalid for arguments that contradict the operator's, and for a queue that the memory cannot hold."""
    check_arguments(spec.encoder.args, field="spec.encoder.args", settings=ENCODER_SETTINGS)
    _check_queue(spec)
    lifecycle = spec.lifecycle
    on_gpu = spec.encoder.device is Device.GPU
    devices: dict[str, int | str] = {spec.gpu.resource_name: 1} if on_gpu else {}
    if spec.network.rdma_resource_name and spec.network.rdma_per_ve:
        devices[spec.network.rdma_resource_name] = spec.network.rdma_per_ve
    memory = memory_text(quantity_bytes(spec.encoder.memory))
    arguments = ["ve", "serve", "--config", f"{CONFIG_DIR}/{ENCODER_CONFIG_FILE}"]
    arguments += engine_arguments(
        load_timeout_seconds=lifecycle.load_timeout_seconds, drain_timeout_seconds=lifecycle.drain_timeout_seconds
    )
    return {
        "name": ENCODER_CONTAINER,
        "image": spec.encoder.image,
        "imagePullPolicy": str(spec.encoder.image_pull_policy),
        "command": ["prefill-engine"],
        "args": arguments + list(spec.encoder.args),
        "env": identity_env(on_gpu=on_gpu, num_threads=None),
        "ports": container_ports(),
        "resources": {
            "requests": {"cpu": spec.encoder.cpu, "memory": memory, **devices},
            "limits": {"memory": memory, **devices},
        },
        **probes(service=ENCODER_SERVICE, load_timeout_seconds=lifecycle.load_timeout_seconds),
        "lifecycle": drain_hook(
            ["prefill-engine", "ve", "drain"], drain_timeout_seconds=lifecycle.drain_timeout_seconds
        ),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security(),
        "volumeMounts": mounts(volumes),
    }


def encoder_shm_text(spec: VEPoolSpec) -> str:
    """Size of /dev/shm: canvases of all patches that may wait, and rows; part of encoder.memory."""
    config = encoder_config(spec)
    needed = canvas_bytes(config.max_queued_patches) + config.rows.memory_bytes + _SHM_SLACK_BYTES
    return memory_text(max(_LEAST_SHM_BYTES, needed))


def _check_queue(spec: VEPoolSpec) -> None:
    patches = encoder_config(spec).max_queued_patches
    needed, memory = canvas_bytes(patches), quantity_bytes(spec.encoder.memory)
    if needed <= memory // _CANVAS_SHARE:
        return
    given = spec.balancing.max_pending_patches_per_ve
    field = "spec.batching.maxPatchesPerBatch" if given is None else "spec.balancing.maxPendingPatchesPerVE"
    rule = (
        f"{patches} waiting patches take {needed / 1e9:.2f} GB, expected at most a quarter of spec.encoder.memory "
        f"({memory / 1e9:.2f} GB)"
    )
    raise PoolInvalid(field, value=given or spec.batching.max_patches_per_batch, rule=rule)
