"""An engine as a bare pod, without the operator, shaped like those it makes: light image, packages of the host."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from prefill_bed.api import Json
from prefill_bed.cluster import ROOT

IMAGE = "docker.io/local/prefill-engine:light"
GRPC_PORT, PROBE_PORT, METRICS_PORT = 50051, 50052, 9090
SITE_PACKAGES = ROOT / ".venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
"""What the light image lacks, mounted read-only: torch alone is 6 GB."""


def tiny_checkpoint(cache: Path) -> Path:
    """A random checkpoint of the tiny preset; the same bytes each time."""
    preset = ROOT / "engine" / "prefill_engine" / "data" / "tiny.json"
    out = cache / f"checkpoint-tiny-{hashlib.sha256(preset.read_bytes()).hexdigest()[:8]}"
    if not (out / "config.json").exists():
        run_engine("make-checkpoint", "--out", str(out), "--preset", "tiny", "--force")
    return out


def run_engine(*arguments: str, seconds: float = 180) -> subprocess.CompletedProcess[str]:
    """The prefill-engine command line of this checkout, on this machine."""
    return subprocess.run(
        [sys.executable, "-m", "prefill_engine", *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def engine_config(**server: Any) -> Json:
    """EngineConfig for the tiny checkpoint on a CPU."""
    ports = {"host": "0.0.0.0", "port": GRPC_PORT, "probe_port": PROBE_PORT, "metrics_port": METRICS_PORT}
    return {
        "model": {"path": "/models", "name": "tiny"},
        "device": "cpu",
        "ops": "ref",
        "server": {**ports, "drain_seconds": 20.0, **server},
        "replay": {"keep_tokens": 24},
        "kv": {"pool_tokens": 16384, "state_slots": 4},
        "max_context_tokens": 4096,
    }


def engine_objects(
    name: str, namespace: str, checkpoint: Path, *, config: Json | None = None, **pod: Any
) -> list[Json]:
    """ConfigMap and Pod of one engine; keywords replace fields of the pod's spec."""
    metadata = {"name": name, "namespace": namespace}
    grpc = {"grpc": {"port": PROBE_PORT, "service": "pe.v1.PrefillEngine"}, "timeoutSeconds": 5}
    directory = {"type": "Directory"}
    container = {
        "name": "engine",
        "image": IMAGE,
        "args": ["serve", "--config", "/etc/prefill/engine.json", "--termination-log", "/dev/termination-log"],
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "OMP_NUM_THREADS", "value": "1"},
        ],
        "ports": [{"name": "grpc", "containerPort": GRPC_PORT}, {"name": "metrics", "containerPort": METRICS_PORT}],
        "startupProbe": {**grpc, "periodSeconds": 2, "failureThreshold": 300},
        "readinessProbe": {**grpc, "periodSeconds": 2},
        "livenessProbe": {"grpc": {"port": PROBE_PORT}, "timeoutSeconds": 5, "periodSeconds": 10},
        "lifecycle": {"preStop": {"exec": {"command": ["prefill-engine", "drain", "--deadline-seconds", "20"]}}},
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
        "securityContext": {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "config", "mountPath": "/etc/prefill", "readOnly": True},
            {"name": "models", "mountPath": "/models", "readOnly": True},
            {"name": "site", "mountPath": "/opt/site", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    spec = {
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": name}},
            {"name": "models", "hostPath": {"path": str(checkpoint), **directory}},
            {"name": "site", "hostPath": {"path": str(SITE_PACKAGES), **directory}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
            {"name": "tmp", "emptyDir": {}},
        ],
        **pod,
    }
    data = {"engine.json": json.dumps(config or engine_config())}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "labels": {"app": name}}, "spec": spec},
    ]


class Answer(msgspec.Struct):
    """What a request to an engine brought."""

    ok: bool
    text: str


def ask(endpoint: str, checkpoint: Path, work: Path, *, tokens: int = 300) -> Answer:
    """A real prefill with the decode probe: the next token computed from the hand-off must be the one computed from scratch."""
    ids = work / "tokens.json"
    ids.write_text(json.dumps([5 + (7 * index) % 400 for index in range(tokens)]))
    done = run_engine("request", "--endpoint", endpoint, "--token-ids", str(ids), "--probe", "--model", str(checkpoint))
    return Answer(ok=done.returncode == 0, text=done.stdout + done.stderr)
