"""No field of a VEPool is without effect: each has its row, which names what the field changes and must change it."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest

from prefill_operator.api import Pool
from prefill_operator.crd import load_crd, object_schema
from prefill_operator.intent import read_intent
from prefill_operator.model import ChildKind, CreatePod
from prefill_operator.names import Kind
from prefill_operator.references import referred_pool
from prefill_operator.render_objects import render_object
from prefill_operator.render_pod import render_pod
from prefill_operator.ve_api import VEPoolSpec
from prefill_plan.encoder_config import BatchingConfig, EncoderConfig
from prefill_plan.model_spec import released_model_spec
from prefill_testing.pools import OPEN_POLICY, VE_BODY, plan_of, pool_of

MODEL = released_model_spec()
FIXED = CreatePod(name="flash-ve-0a1b2c3d-1", revision="0a1b2c3d", incarnation=1)
SCALED: Mapping[str, Any] = {"actuator": "KEDA", "maxReplicas": 6}
HOST_PATH: Mapping[str, Any] = {"pvc": None, "hostPath": {"path": "/mnt/models/a"}}


def _object(kind: ChildKind, pool: Pool) -> dict[str, Any]:
    item = render_object(kind, pool, plan_of(pool), OPEN_POLICY, model=MODEL, freeze_scale_down=False)
    item["metadata"].pop("labels" if kind is ChildKind.CONFIG_MAP else "", None)
    return item


def encoder_settings(pool: Pool) -> EncoderConfig:
    """What the encoder's process reads: its file, then its arguments."""
    settings = json.loads(_object(ChildKind.CONFIG_MAP, pool)["data"]["encoder.json"])
    args = render_pod(pool, plan_of(pool), FIXED, OPEN_POLICY)["spec"]["containers"][0]["args"]
    for option, text in itertools.pairwise(args):
        if option == "--set":
            path, _, value = text.partition("=")
            *parents, last = path.split(".")
            node = settings
            for name in parents:
                node = node.setdefault(name, {})
            node[last] = json.loads(value)
    return msgspec.convert(settings, EncoderConfig)


def _pod(pool: Pool) -> object:
    """Without what only the revision's hash changes."""
    pod = render_pod(pool, plan_of(pool), FIXED, OPEN_POLICY)
    del pod["metadata"]["annotations"]["prefill.dev/plan-hash"]
    return pod


# What a field can change. The Intent is all that the planner sees of a spec, with the plan.
SEEN: Mapping[str, Callable[[Pool], object]] = {
    "encoder": encoder_settings,
    "pod": _pod,
    "revision": lambda pool: plan_of(pool).revision,
    "service": lambda pool: _object(ChildKind.SERVICE, pool),
    "scaler": lambda pool: _object(ChildKind.SCALED_OBJECT, pool),
    "monitor": lambda pool: _object(ChildKind.POD_MONITOR, pool),
    "planner": read_intent,
    "reference": referred_pool,
}

# Path, value, what it changes; then what the rest of the spec has to be.
ROWS: tuple[tuple[str, Any, str, Mapping[str, Any]], ...] = (
    ("replicas", 5, "planner", {}),
    ("paused", True, "planner", {}),
    ("prefillPoolRef.name", "other", "reference", {}),
    ("model.name", "mine", "encoder", {}),
    ("model.revision", "r2", "revision", {}),
    ("model.source.pvc.claimName", "other", "pod", {}),
    ("model.source.pvc.path", "/below", "encoder", {}),
    ("model.source.hostPath.path", "/mnt/models/b", "pod", {"model": {"source": HOST_PATH}}),
    ("model.source.image.reference", "w:2", "pod", {"model": {"source": {"pvc": None, "image": {"reference": "w:1"}}}}),
    ("gpu.resourceName", "example.com/gpu", "pod", {}),
    ("gpu.product", "NVIDIA-H20", "pod", {}),
    ("batching.maxPatchesPerBatch", 20_000, "encoder", {}),
    ("batching.maxPatchesPerImage", 9_000, "encoder", {}),
    ("batching.maxDelayMilliseconds", 7, "encoder", {}),
    ("balancing.policy", "RoundRobin", "service", {}),
    ("balancing.maxPendingPatchesPerVE", 40_000, "encoder", {}),
    ("quota.maxVEs", 9, "planner", {}),
    ("quota.spares", 3, "planner", {}),
    ("autoscaling.actuator", "HPA", "planner", {"autoscaling": SCALED}),
    ("autoscaling.minReplicas", 2, "scaler", {"autoscaling": SCALED}),
    ("autoscaling.maxReplicas", 7, "scaler", {"autoscaling": SCALED}),
    ("autoscaling.scaleUpStabilizationSeconds", 7, "scaler", {"autoscaling": SCALED}),
    ("autoscaling.scaleDownStabilizationSeconds", 7, "scaler", {"autoscaling": SCALED}),
    ("autoscaling.maxScaleUpPerMinute", 7, "scaler", {"autoscaling": SCALED}),
    ("autoscaling.maxScaleDownPerMinute", 7, "scaler", {"autoscaling": SCALED}),
    ("autoscaling.targetPendingPatchesPerVE", 7_000, "scaler", {"autoscaling": SCALED}),
    ("rollout.strategy", "OnDelete", "planner", {}),
    ("rollout.maxSurge", 2, "planner", {}),
    ("rollout.maxUnavailable", 2, "planner", {}),
    ("rollout.partition", 2, "planner", {}),
    ("rollout.minReadySeconds", 2, "planner", {}),
    ("rollout.progressDeadlineSeconds", 100, "planner", {}),
    ("lifecycle.loadTimeoutSeconds", 77, "encoder", {}),
    ("lifecycle.drainTimeoutSeconds", 77, "encoder", {}),
    ("lifecycle.nodeLostGraceSeconds", 7, "planner", {}),
    ("lifecycle.maxConcurrentDrains", 7, "planner", {}),
    ("lifecycle.maxConcurrentLoads", 7, "planner", {}),
    ("scheduling.placement", "Spread", "pod", {}),
    ("scheduling.priorityClassName", "high", "pod", {}),
    ("scheduling.schedulerName", "mine", "pod", {}),
    ("scheduling.runtimeClassName", "nvidia", "pod", {}),
    ("scheduling.nodeSelector", {"pool": "a"}, "pod", {}),
    ("scheduling.tolerations", [{"operator": "Exists"}], "pod", {}),
    (
        "scheduling.topologySpreadConstraints",
        [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        "pod",
        {},
    ),
    ("network.hostNetwork", True, "pod", {}),
    ("network.rdmaResourceName", "rdma/b", "pod", {}),
    ("network.rdmaPerVE", 2, "pod", {"network": {"rdmaResourceName": "rdma/a"}}),
    ("encoder.image", "engine:2", "pod", {}),
    ("encoder.imagePullPolicy", "Always", "pod", {}),
    ("encoder.device", "cpu", "encoder", {}),
    ("encoder.args", ["--set", "rows.cache_bytes=0"], "encoder", {}),
    ("encoder.cpu", 16, "encoder", {}),
    ("encoder.memory", "4Gi", "encoder", {}),
    ("podTemplate.metadata.labels", {"team": "a"}, "pod", {}),
    ("podTemplate.metadata.annotations", {"example.com/a": "b"}, "pod", {}),
    ("podTemplate.spec", {"imagePullSecrets": [{"name": "registry"}]}, "pod", {}),
    ("monitoring.podMonitor", True, "planner", {}),
    ("monitoring.intervalSeconds", 30, "monitor", {}),
    ("monitoring.labels", {"release": "a"}, "monitor", {}),
)


def leaves(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    if "properties" not in schema:
        yield path
        return
    for name, child in schema["properties"].items():
        yield from leaves(child, f"{path}.{name}" if path else name)


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    found: dict[str, Any] = value
    return found


def test_every_field_of_the_crd_has_a_row() -> None:
    spec = object_schema(load_crd(Kind.VE_POOL))["properties"]["spec"]

    assert sorted(path for path, *_ in ROWS) == sorted(leaves(spec))


@pytest.mark.parametrize(
    ("path", "value", "seen", "rest"), ROWS, ids=lambda item: item if isinstance(item, str) else ""
)
def test_field_has_an_effect(path: str, value: Any, seen: str, rest: Mapping[str, Any]) -> None:
    base = pool_of(VE_BODY, rest)
    body = {**VE_BODY, "spec": msgspec.to_builtins(base.spec)}
    changed = pool_of(body, nested(path, value))

    assert SEEN[seen](changed) != SEEN[seen](base)


def test_unset_fields_leave_the_encoder_its_own_defaults() -> None:
    """One default for what both name: the CRD's is the EncoderConfig's."""
    pool = pool_of(VE_BODY)
    config = encoder_settings(pool)

    assert config.batching == BatchingConfig()
    assert config.queue == EncoderConfig(model=config.model).queue
    assert isinstance(pool.spec, VEPoolSpec)
    assert config.max_queued_patches == 4 * pool.spec.batching.max_patches_per_batch
