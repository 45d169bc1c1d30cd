"""Pools for tests of the operator's rendering: small valid manifests, and changes to them."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from prefill_operator.api import Pool, parse_pool
from prefill_operator.model import CreatePod
from prefill_operator.names import API_VERSION, Kind, PodIdentity, pod_name
from prefill_operator.plan import PoolPlan, plan_pool
from prefill_operator.render_pod import render_pod
from prefill_operator.render_policy import RenderPolicy
from prefill_plan.model_spec import released_model_spec

EXAMPLES = Path(__file__).parents[2] / "examples"

OPEN_POLICY = RenderPolicy(
    allowed_host_paths=("/mnt/models", "/3fs"),
    allow_privileged=True,
    readiness_gate=True,
    prometheus_address="http://prometheus:9090",
)
STRICT_POLICY = RenderPolicy(readiness_gate=False)

PREFILL_BODY: Mapping[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "PrefillPool",
    "metadata": {"name": "flash", "namespace": "ns", "uid": "uid-1"},
    "spec": {
        "replicas": 3,
        "model": {"name": "flash", "revision": "r1", "source": {"pvc": {"claimName": "ckpt", "path": "/flash"}}},
        "gpu": {"product": "NVIDIA-H200"},
        "engine": {"image": "engine:1"},
    },
}
CPU_BODY: Mapping[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "PrefillPool",
    "metadata": {"name": "tiny", "namespace": "ns", "uid": "uid-2"},
    "spec": {
        "model": {
            "name": "tiny",
            "architecture": "test-tiny",
            "revision": "r1",
            "source": {"hostPath": {"path": "/mnt/models/tiny"}},
        },
        "engine": {
            "image": "engine:1",
            "device": "cpu",
            "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
        },
    },
}
VE_BODY: Mapping[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "VEPool",
    "metadata": {"name": "flash", "namespace": "ns", "uid": "uid-3"},
    "spec": {
        "model": {"name": "flash", "revision": "r1", "source": {"pvc": {"claimName": "ckpt"}}},
        "encoder": {"image": "engine:1"},
    },
}

USRBIO: Mapping[str, Any] = {
    "enabled": True,
    "image": "kvd:1",
    "store": "usrbio",
    "path": "/3fs/kv",
    "clusterID": "prod",
    "mgmtdAddresses": ["RDMA://10.1.0.1:8000"],
    "tokenSecretRef": {"name": "token-3fs"},
}
SHARED_WEIGHTS: Mapping[str, Any] = {
    "pvc": None,
    "threeFS": {
        "path": "/models/flash",
        "mountMode": "Shared",
        "image": "fuse:1",
        "clusterID": "prod",
        "mgmtdAddresses": ["TCP://10.1.0.1:8000"],
        "tokenSecretRef": {"name": "weights-token"},
    },
}


def pool_of(body: Mapping[str, Any], spec: Mapping[str, Any] | None = None) -> Pool:
    """The pool with `spec` merged into the body's; None removes a field."""
    changed = copy.deepcopy(dict(body))
    _merge(changed["spec"], spec or {})
    return parse_pool(changed)


def example_pools(name: str) -> list[Pool]:
    """The pools of examples/<name>.yaml, with a UID as on an API server."""
    text = (EXAMPLES / f"{name}.yaml").read_text()
    bodies = [body for body in yaml.safe_load_all(text) if body and body["apiVersion"] == API_VERSION]
    return [
        parse_pool({**body, "metadata": {"namespace": "default", "uid": "uid-1", **body["metadata"]}})
        for body in bodies
    ]


def plan_of(pool: Pool) -> PoolPlan:
    plan = plan_pool(pool, floor=None, nodes=None, model=released_model_spec())
    assert plan.feasible, plan.message
    return plan


def create_of(pool: Pool, plan: PoolPlan, *, avoid: tuple[str, ...] = ()) -> CreatePod:
    name = pod_name(Kind(pool.kind), pool.name, PodIdentity(revision=plan.revision, incarnation=1))
    return CreatePod(name=name, revision=plan.revision, incarnation=1, avoid_nodes=avoid)


def pod_of(pool: Pool, policy: RenderPolicy = OPEN_POLICY) -> dict[str, Any]:
    plan = plan_of(pool)
    return render_pod(pool, plan, create_of(pool, plan), policy)


def container_of(pod: Mapping[str, Any], name: str) -> dict[str, Any]:
    containers: list[dict[str, Any]] = [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
    (found,) = [container for container in containers if container["name"] == name]
    return found


def volume_of(pod: Mapping[str, Any], name: str) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = pod["spec"]["volumes"]
    (found,) = [volume for volume in volumes if volume["name"] == name]
    return found


def mount_of(container: Mapping[str, Any], path: str) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = container["volumeMounts"]
    (found,) = [mount for mount in mounts if mount["mountPath"] == path]
    return found


def _merge(target: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = copy.deepcopy(value)
