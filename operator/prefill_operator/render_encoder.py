"""The encoder container of a VEPool's pod: `prefill-engine ve serve`, configured by encoder_json, drained by `ve drain`."""

from prefill_operator.engine_config import CONFIG_DIR, ENCODER_CONFIG_FILE, engine_arguments
from prefill_operator.manifest import Manifest
from prefill_operator.names import ENCODER_CONTAINER
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
from prefill_operator.render_engine import check_arguments
from prefill_operator.render_volumes import MountedVolume
from prefill_operator.ve_api import VEPoolSpec
from prefill_plan.config import Device

ENCODER_SERVICE = "pe.v1.VisionEncoder"

ENCODER_SHM = "4Gi"
"""Canvases and rows of an encoder (at most MAX_ROWS_BYTES and 1 GiB); part of encoder.memory."""


def render_encoder(spec: VEPoolSpec, volumes: tuple[MountedVolume, ...]) -> Manifest:
    """Raises PoolInvalid for arguments that contradict the operator's."""
    check_arguments(spec.encoder.args, field="spec.encoder.args")
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
