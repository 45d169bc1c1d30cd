"""Pods of a pool: every rule of k8s.md 4.3 to 4.10 that shows in a pod, and golden files of the examples."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefill_operator.cli.render import render_pool
from prefill_operator.cli.yaml_text import dump_yaml
from prefill_operator.errors import PoolInvalid
from prefill_operator.model import ChildKind
from prefill_operator.plan import plan_pool
from prefill_operator.render_pod import refusal_text, render_pod
from prefill_operator.render_policy import RenderPolicy
from prefill_operator.reserved_arguments import ENCODER_SETTINGS, ENGINE_SETTINGS
from prefill_plan.config import EngineConfig
from prefill_plan.encoder_config import EncoderConfig
from prefill_plan.model_spec import released_model_spec
from prefill_testing.kube_schema import check_object
from prefill_testing.pools import (
    CPU_BODY,
    OPEN_POLICY,
    PREFILL_BODY,
    SHARED_WEIGHTS,
    STRICT_POLICY,
    USRBIO,
    VE_BODY,
    container_of,
    create_of,
    example_pools,
    mount_of,
    plan_of,
    pod_of,
    pool_of,
    volume_of,
)

GOLDEN = Path(__file__).parent / "data"
PROFILES = ("h200", "b200", "gb300", "h20", "laptop", "vepool")


@pytest.mark.parametrize("profile", PROFILES)
def test_objects_of_an_example_equal_the_golden_file(profile: str) -> None:
    """Make a new one with `prefill-operator render -f examples/<profile>.yaml` and the settings of OPEN_POLICY."""
    kinds = frozenset({ChildKind.POD_MONITOR, ChildKind.SCALED_OBJECT})
    objects = [
        item for pool in example_pools(profile) for item in render_pool(pool, OPEN_POLICY, num_pods=1, optional=kinds)
    ]

    assert dump_yaml(objects) == (GOLDEN / f"golden_{profile}.yaml").read_text()


@pytest.mark.parametrize("version", ["1.36.0", "1.37.0"])
@pytest.mark.parametrize("profile", PROFILES)
def test_pods_are_what_kubernetes_knows(profile: str, version: str) -> None:
    for pool in example_pools(profile):
        check_object(pod_of(pool), version)


@pytest.mark.parametrize(
    ("body", "spec"),
    [
        (PREFILL_BODY, {"kvd": USRBIO}),
        (PREFILL_BODY, {"kvd": {**USRBIO, "fuseDeviceResource": "smarter-devices/fuse"}}),
        (PREFILL_BODY, {"kvd": {**USRBIO, "mountMode": "Shared"}}),
        (PREFILL_BODY, {"kvd": {**USRBIO, "mountMode": "HostMount"}}),
        (PREFILL_BODY, {"model": {"source": SHARED_WEIGHTS}}),
        (PREFILL_BODY, {"network": {"hostNetwork": True, "rdmaResourceName": "rdma/hca", "rdmaPerPE": 4}}),
        (CPU_BODY, {"cpu": {"pretendGPUs": True}}),
        (VE_BODY, {"scheduling": {"placement": "SpreadRequired"}}),
    ],
    ids=["private", "device-plugin", "shared", "host-mount", "weights", "network", "pretend", "ve"],
)
def test_other_forms_are_what_kubernetes_knows(body: dict[str, Any], spec: dict[str, Any]) -> None:
    check_object(pod_of(pool_of(body, spec)), "1.36.0")


def test_rendering_is_deterministic() -> None:
    assert dump_yaml([pod_of(pool_of(PREFILL_BODY))]) == dump_yaml([pod_of(pool_of(PREFILL_BODY))])


def test_rendering_leaves_the_spec_as_it_is() -> None:
    taint = {"key": "gpu", "operator": "Exists"}
    pool = pool_of(
        PREFILL_BODY,
        {
            "scheduling": {"tolerations": [taint]},
            "podTemplate": {"spec": {"tolerations": [{"key": "other"}], "volumes": [{"name": "v", "emptyDir": {}}]}},
        },
    )
    before = pool.spec

    first, second = pod_of(pool), pod_of(pool)

    assert first == second
    assert pool.spec == before


def test_pod_belongs_to_its_pool() -> None:
    pool = pool_of(PREFILL_BODY)
    plan = plan_of(pool)
    metadata = pod_of(pool)["metadata"]

    assert metadata["name"] == f"flash-{plan.revision}-1"
    assert metadata["ownerReferences"] == [
        {
            "apiVersion": "prefill.dev/v1alpha1",
            "kind": "PrefillPool",
            "name": "flash",
            "uid": "uid-1",
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
    assert metadata["labels"] == {
        "app.kubernetes.io/managed-by": "prefill-operator",
        "prefill.dev/kind": "PrefillPool",
        "prefill.dev/pool": "flash",
        "prefill.dev/revision": plan.revision,
    }
    assert metadata["annotations"] == {
        "prefill.dev/pool-uid": "uid-1",
        "prefill.dev/plan-hash": plan.hash,
        "prefill.dev/ep": "4",
    }


def test_engine_requests_what_the_plan_says() -> None:
    pool = pool_of(PREFILL_BODY)
    plan = plan_of(pool)
    resources = container_of(pod_of(pool), "engine")["resources"]

    # 4 x 32 GiB of engine, 64 + 16 GiB of pools, 4 GiB of shared memory, and a copy of the Engram tables.
    memory = -(-((4 * 32 + 64 + 16 + 4) * (1 << 30) + plan.memory.host_bytes) >> 20) if plan.memory else 0
    assert resources["requests"] == {"cpu": 48, "memory": f"{memory}Mi", "nvidia.com/gpu": 4}
    assert resources["limits"] == {"memory": f"{memory}Mi", "nvidia.com/gpu": 4}
    assert memory << 20 >= plan.host_bytes_per_pod > (memory - 1) << 20


def test_shared_memory_holds_pools_and_more() -> None:
    pod = pod_of(pool_of(PREFILL_BODY, {"kvCache": {"hostPool": "10Gi", "swaPool": "2Gi"}}))

    assert volume_of(pod, "shm")["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{16 * 1024}Mi"}
    assert mount_of(container_of(pod, "engine"), "/dev/shm")["name"] == "shm"


def test_rdma_devices_are_requested_as_limits_too() -> None:
    spec = {"network": {"rdmaResourceName": "rdma/hca", "rdmaPerPE": 4}}
    resources = container_of(pod_of(pool_of(PREFILL_BODY, spec)), "engine")["resources"]

    assert resources["requests"]["rdma/hca"] == resources["limits"]["rdma/hca"] == 4


def test_no_rdma_device_is_requested_when_none_is_wanted() -> None:
    spec = {"network": {"rdmaResourceName": "rdma/hca", "rdmaPerPE": 0}}
    resources = container_of(pod_of(pool_of(PREFILL_BODY, spec)), "engine")["resources"]

    assert "rdma/hca" not in resources["requests"]


@pytest.mark.parametrize(
    ("spec", "gpus", "threads"),
    [
        ({}, None, "1"),
        ({"cpu": {"pretendGPUs": True}}, 2, "1"),
        ({"cpu": {"pretendGPUs": True}, "expertParallel": {"size": 4}}, 4, "1"),
        ({"engine": {"resources": {"limits": {"cpu": "2500m", "memory": "2Gi"}}}}, None, "3"),
    ],
    ids=["plain", "pretend", "pretend-ep4", "cpu-limit"],
)
def test_cpu_profile_requests_what_the_user_says(spec: dict[str, Any], gpus: int | None, threads: str) -> None:
    engine = container_of(pod_of(pool_of(CPU_BODY, spec)), "engine")
    env = {item["name"]: item.get("value") for item in engine["env"]}

    assert engine["resources"]["requests"]["memory"] == "1Gi"
    assert engine["resources"]["requests"].get("nvidia.com/gpu") == gpus
    assert engine["resources"]["limits"].get("nvidia.com/gpu") == gpus
    assert env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert env["OMP_NUM_THREADS"] == threads


def test_gpu_engine_sees_its_devices() -> None:
    names = {item["name"] for item in container_of(pod_of(pool_of(PREFILL_BODY)), "engine")["env"]}

    assert names == {"POD_NAME", "POD_IP", "POD_ZONE", "PLAN_HASH", "HOME"}


def test_probes_follow_the_load_timeout() -> None:
    engine = container_of(pod_of(pool_of(PREFILL_BODY, {"lifecycle": {"loadTimeoutSeconds": 601}})), "engine")
    startup = engine["startupProbe"]

    assert startup["grpc"] == {"port": 50052, "service": "pe.v1.PrefillEngine"}
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1.5 * 601
    assert startup["periodSeconds"] * (startup["failureThreshold"] - 1) < 1.5 * 601
    assert engine["readinessProbe"]["grpc"] == {"port": 50052, "service": "pe.v1.PrefillEngine"}
    assert engine["livenessProbe"]["grpc"] == {"port": 50052, "service": ""}
    assert "server.load_timeout_seconds=601" in engine["args"]


@pytest.mark.parametrize(("drain", "grace"), [(120, 165), (0, 45), (600, 645)])
def test_grace_period_covers_the_drain(drain: int, grace: int) -> None:
    pod = pod_of(pool_of(PREFILL_BODY, {"lifecycle": {"drainTimeoutSeconds": drain}}))
    engine = container_of(pod, "engine")
    command = ["prefill-engine", "drain", "--endpoint", "127.0.0.1:50051", "--deadline-seconds", str(drain)]

    assert pod["spec"]["terminationGracePeriodSeconds"] == grace
    assert engine["lifecycle"]["preStop"]["exec"]["command"] == command
    assert f"server.drain_seconds={drain}" in engine["args"]


def test_containers_are_confined() -> None:
    pod = pod_of(pool_of(PREFILL_BODY, {"kvd": {"enabled": True, "image": "kvd:1"}}), STRICT_POLICY)

    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["spec"]["automountServiceAccountToken"] is False
    for name in ("engine", "kvd"):
        container = container_of(pod, name)
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert mount_of(container, "/tmp")["name"] == f"{name}-tmp"


def test_identity_comes_from_the_pod_itself() -> None:
    env = {item["name"]: item for item in container_of(pod_of(pool_of(PREFILL_BODY)), "engine")["env"]}
    path = env["PLAN_HASH"]["valueFrom"]["fieldRef"]["fieldPath"]

    assert path == "metadata.annotations['prefill.dev/plan-hash']"
    assert env["POD_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


@pytest.mark.parametrize(
    ("source", "path", "volume"),
    [
        (
            {"pvc": {"claimName": "ckpt", "path": "/flash"}},
            "/models",
            {"persistentVolumeClaim": {"claimName": "ckpt", "readOnly": True}},
        ),
        (
            {"pvc": None, "hostPath": {"path": "/mnt/models/flash"}},
            "/models",
            {"hostPath": {"path": "/mnt/models/flash", "type": "Directory"}},
        ),
        (
            {"pvc": None, "threeFS": {"path": "/models/flash"}},
            "/3fs",
            {"hostPath": {"path": "/3fs", "type": "Directory"}},
        ),
    ],
    ids=["pvc", "hostPath", "threeFS"],
)
def test_checkpoint_is_mounted_read_only(source: dict[str, Any], path: str, volume: dict[str, Any]) -> None:
    pod = pod_of(pool_of(PREFILL_BODY, {"model": {"source": source}}))
    mount = mount_of(container_of(pod, "engine"), path)

    assert mount["readOnly"] is True
    assert volume_of(pod, "model") == {"name": "model", **volume}


def test_encoder_takes_its_weights_from_an_image() -> None:
    source = {"pvc": None, "image": {"reference": "weights:1"}}
    pod = pod_of(pool_of(VE_BODY, {"model": {"source": source}, "encoder": {"imagePullPolicy": "Never"}}))

    assert volume_of(pod, "model")["image"] == {"reference": "weights:1", "pullPolicy": "Never"}


def test_encoder_has_one_gpu_and_its_own_verbs() -> None:
    pod = pod_of(pool_of(VE_BODY))
    encoder = container_of(pod, "encoder")

    assert encoder["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert encoder["args"][:4] == ["ve", "serve", "--config", "/etc/prefill/encoder.json"]
    assert encoder["readinessProbe"]["grpc"]["service"] == "pe.v1.VisionEncoder"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 60 + 45
    assert pod["metadata"]["name"].startswith("flash-ve-")


def test_encoder_on_cpus_asks_for_no_gpu() -> None:
    pool = pool_of(VE_BODY, {"encoder": {"device": "cpu"}})
    encoder = container_of(pod_of(pool), "encoder")

    assert "nvidia.com/gpu" not in encoder["resources"]["limits"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in encoder["env"]
    assert (plan_of(pool).gpus, plan_of(pool).message) == (0, "CPU profile: no GPU, figures are not a GPU's")


@pytest.mark.parametrize("gate", [True, False])
def test_readiness_gate_is_the_installations_choice(gate: bool) -> None:
    pod = pod_of(pool_of(PREFILL_BODY), RenderPolicy(readiness_gate=gate))

    assert pod["spec"].get("readinessGates") == ([{"conditionType": "prefill.dev/accepting"}] if gate else None)


def test_scheduling_fields_reach_the_pod() -> None:
    scheduling = {
        "priorityClassName": "high",
        "schedulerName": "mine",
        "runtimeClassName": "nvidia",
        "nodeSelector": {"pool": "h200"},
    }
    spec = pod_of(pool_of(PREFILL_BODY, {"scheduling": scheduling}))["spec"]

    assert (spec["priorityClassName"], spec["schedulerName"], spec["runtimeClassName"]) == ("high", "mine", "nvidia")
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200", "pool": "h200"}


@pytest.mark.parametrize(
    ("body", "spec", "field"),
    [
        (PREFILL_BODY, {"network": {"hostNetwork": True}}, "spec.network.hostNetwork"),
        (PREFILL_BODY, {"kvd": USRBIO}, "spec.kvd.mountMode"),
        (PREFILL_BODY, {"model": {"source": SHARED_WEIGHTS}}, "spec.model.source.threeFS.mountMode"),
        (CPU_BODY, {}, "spec.model.source.hostPath.path"),
        (PREFILL_BODY, {"model": {"source": {"pvc": None, "threeFS": {"path": "/a"}}}}, "threeFS.mountPath"),
        (PREFILL_BODY, {"engine": {"args": ["--config", "/x"]}}, "spec.engine.args[0]"),
        (PREFILL_BODY, {"engine": {"args": ["--set=server.port=1"]}}, "spec.engine.args[0]"),
        (PREFILL_BODY, {"engine": {"args": ["--set", "parallel.ep_size=1"]}}, "spec.engine.args[1]"),
        (VE_BODY, {"encoder": {"args": ["--model", "/x"]}}, "spec.encoder.args[0]"),
        (
            PREFILL_BODY,
            {
                "kvd": {
                    "enabled": True,
                    "image": "kvd:1",
                    "store": "file",
                    "path": "/kv",
                    "volume": {"hostPath": {"path": "/etc"}},
                }
            },
            "spec.kvd.volume.hostPath.path",
        ),
    ],
    ids=[
        "host-network",
        "kvd-private",
        "weights",
        "host-path",
        "3fs-node",
        "config",
        "port",
        "parallel",
        "ve-model",
        "kvd-host-path",
    ],
)
def test_what_the_cluster_owner_did_not_allow_is_refused(body: Any, spec: dict[str, Any], field: str) -> None:
    pool = pool_of(body, spec)
    plan = plan_of(pool)
    with pytest.raises(PoolInvalid) as refusal:
        render_pod(pool, plan, create_of(pool, plan), STRICT_POLICY)

    assert field in refusal.value.path
    assert refusal_text(pool, plan, STRICT_POLICY) == refusal.value.message


@pytest.mark.parametrize("path", ["/mnt/modelsX", "/mnt", "/mnt/models/../x", "relative", "/3fs-other"])
def test_host_paths_beside_an_allowed_one_are_refused(path: str) -> None:
    with pytest.raises(PoolInvalid):
        OPEN_POLICY.check_host_path(path, field="f")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--conf", "/x"], "args[0] is '--conf': is short for --config; write options out"),
        (["--termination=/x"], "is short for --termination-log"),
        (["--se", "device=gpu"], "is short for --set"),
        (["--s=device=gpu"], "is short for --set"),
        (["--set", "device=gpu"], "is set by the operator, from spec.engine.device"),
        (["--set=kv.state_slots=9"], "from spec.kvCache.sequencesPerGPU"),
        (["--set", "scheduler.chunk_cap_tokens=65536"], "from spec.context.chunkTokensPerGPU"),
        (["--set", "max_context_tokens=9"], "from spec.context.maxTokens"),
        (["--set", "replay.keep_tokens=9"], "from spec.context.keepTokens"),
        (["--set", "store.max_bytes=9"], "from spec.kvCache.hostPool"),
        (["--set", "kv.record_format=fp8"], "is set by the operator, and no field changes it"),
        (["--set", 'kv={"state_slots": 9}'], "would replace all of kv, and kv.pool_tokens is set by the operator"),
        (["--set", "parallel={}"], "from spec.expertParallel"),
        (["--log-level", "DEBUG", "--set", "vision.mode=none"], "args[3]"),
    ],
)
def test_arguments_that_change_what_was_planned_are_refused(args: list[str], says: str) -> None:
    """However they are written: engines of before allow_abbrev=False took short forms of options."""
    pool = pool_of(PREFILL_BODY, {"engine": {"args": args}})

    assert says in refusal_text(pool, plan_of(pool), OPEN_POLICY)


def test_reserved_settings_are_settings() -> None:
    for settings, kind in ((ENGINE_SETTINGS, EngineConfig), (ENCODER_SETTINGS, EncoderConfig)):
        for path in settings:
            found: Any = kind
            for part in path.split("."):
                found = {field.name: field.type for field in msgspec.structs.fields(found)}[part]


def test_ordinary_arguments_are_appended() -> None:
    args = ["--set", "scheduler.age_seconds=5", "--set", "kv.max_ticket_fraction=0.4", "--log-level", "DEBUG"]
    args += ["--fault", "exit=12@warmup", "--set=devices=2"]
    engine = container_of(pod_of(pool_of(PREFILL_BODY, {"engine": {"args": args}})), "engine")

    assert engine["args"][-len(args) :] == args


def test_pool_without_a_plan_is_not_refused_for_its_pods() -> None:
    pool = pool_of(PREFILL_BODY, {"gpu": {"product": "UNKNOWN"}, "network": {"hostNetwork": True}})
    plan = plan_pool(pool, floor=None, nodes=None, model=released_model_spec())

    assert refusal_text(pool, plan, STRICT_POLICY) == ""
