"""The parts that engine and encoder containers share: identity, probes, drain hook, security, memory sizes.

The times of a pod's end are computed here and nowhere else (k8s.md 4.7).
"""

import math
from collections.abc import Iterable, Sequence

from prefill_operator.api_parts import LifecycleSpec
from prefill_operator.manifest import Manifest
from prefill_operator.model import OperatorTimes
from prefill_operator.names import PLAN_HASH_ANNOTATION
from prefill_operator.ports import (
    GRPC_PORT,
    GRPC_PORT_NAME,
    METRICS_PORT,
    METRICS_PORT_NAME,
    PROBE_PORT,
    PROBE_PORT_NAME,
)
from prefill_operator.render_volumes import MountedVolume

USER_ID = 10001
"""User and group of our images; a number, so that the kubelet can check that it is not root."""

IDENTITY_ENV = ("POD_NAME", "POD_IP", "POD_ZONE", "PLAN_HASH")
"""Who the engine is (prefill_engine.settings.load_identity)."""

# The startup probe allows half as much again: an engine whose load moves on may pass its time-out (C44).
_STARTUP_BUDGET = 1.5
_STARTUP_PERIOD_SECONDS = 2

KVD_DRAIN_SECONDS = 15
"""Longest write-back of kvd after the engine has ended; inside OperatorTimes.drained_grace_seconds."""


def grace_seconds(lifecycle: LifecycleSpec) -> int:
    """terminationGracePeriodSeconds: the drain (preStop), then one after the other the ends of engine, kvd and mounts."""
    return lifecycle.drain_timeout_seconds + OperatorTimes().drained_grace_seconds


def pod_security() -> Manifest:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        # Once per volume, not at each start: a store may hold millions of files.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Manifest:
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def pod_env() -> list[Manifest]:
    """Who a process is to its peers, and a home directory below which caches go: the root file system is read-only."""
    fields = {
        "POD_NAME": "metadata.name",
        "POD_IP": "status.podIP",
        # Kubernetes copies the node's zone to this label from 1.35 on; empty before.
        "POD_ZONE": "metadata.labels['topology.kubernetes.io/zone']",
    }
    env: list[Manifest] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]
    return [*env, {"name": "HOME", "value": "/tmp"}]


def identity_env(*, on_gpu: bool, num_threads: int | None) -> list[Manifest]:
    """Environment of an engine. num_threads: of a CPU engine, which would otherwise start one per core of the node."""
    plan_hash = {"fieldPath": f"metadata.annotations['{PLAN_HASH_ANNOTATION}']"}
    env = [*pod_env(), {"name": "PLAN_HASH", "valueFrom": {"fieldRef": plan_hash}}]
    if not on_gpu:
        # The image asks for all GPUs, which some container runtimes grant to pods that requested none.
        env.append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"})
    if num_threads is not None:
        env.append({"name": "OMP_NUM_THREADS", "value": str(num_threads)})
    return env


def container_ports() -> list[Manifest]:
    ports = ((GRPC_PORT_NAME, GRPC_PORT), (PROBE_PORT_NAME, PROBE_PORT), (METRICS_PORT_NAME, METRICS_PORT))
    return [container_port(name, port) for name, port in ports]


def container_port(name: str, port: int) -> Manifest:
    return {"name": name, "containerPort": port, "protocol": "TCP"}


def probes(*, service: str, load_timeout_seconds: int) -> Manifest:
    """Startup and readiness ask for the service, liveness for the whole process (C44)."""
    startup_failures = math.ceil(load_timeout_seconds * _STARTUP_BUDGET / _STARTUP_PERIOD_SECONDS)
    return {
        "startupProbe": grpc_probe(PROBE_PORT, service, period=_STARTUP_PERIOD_SECONDS, failures=startup_failures),
        "readinessProbe": grpc_probe(PROBE_PORT, service, period=5, failures=2),
        "livenessProbe": grpc_probe(PROBE_PORT, "", period=10, failures=3),
    }


def grpc_probe(port: int, service: str, *, period: int, failures: int) -> Manifest:
    return {
        "grpc": {"port": port, "service": service},
        "periodSeconds": period,
        "timeoutSeconds": max(2, period // 2),
        "failureThreshold": failures,
    }


def drain_hook(verb: Sequence[str], *, drain_timeout_seconds: int) -> Manifest:
    """preStop: the engine's own drain, so that evictions and `kubectl delete pod` lose no work either (C43)."""
    command = [*verb, "--endpoint", f"127.0.0.1:{GRPC_PORT}", "--deadline-seconds", str(drain_timeout_seconds)]
    return {"preStop": {"exec": {"command": command}}}


def mounts(volumes: Iterable[MountedVolume]) -> list[Manifest]:
    return [volume.volume_mount() for volume in volumes]


def memory_text(num_bytes: int) -> str:
    """Whole MiB, rounded up."""
    return f"{-(-num_bytes >> 20)}Mi"
