"""Sidecars of a pod: kvd in its forms, and the mount of weights on 3FS (C32, k8s.md 4.9)."""

import json
from typing import Any

import msgspec
import pytest

from prefill_operator.errors import PoolInvalid
from prefill_operator.model import OperatorTimes
from prefill_operator.render_sidecar import kvd_config_files
from prefill_plan.config import TlsConfig
from prefill_plan.kvd_config import KvdConfig
from prefill_testing.pools import (
    CPU_BODY,
    PREFILL_BODY,
    SHARED_WEIGHTS,
    USRBIO,
    container_of,
    mount_of,
    pod_of,
    pool_of,
    volume_of,
)


def test_no_sidecar_without_kvd() -> None:
    assert "initContainers" not in pod_of(pool_of(PREFILL_BODY))["spec"]


def test_kvd_shares_memory_and_socket_with_the_engine() -> None:
    kvd = {"enabled": True, "image": "kvd:1", "store": "file", "path": "/kv", "memory": "2Gi", "poolSize": "8Gi"}
    spec = {"kvd": {**kvd, "volume": {"pvc": {"claimName": "kv", "path": "/a"}}}, "engine": {"extraShm": "1Gi"}}
    pod = pod_of(pool_of(PREFILL_BODY, spec))
    sidecar, engine = container_of(pod, "kvd"), container_of(pod, "engine")

    assert sidecar["restartPolicy"] == "Always"
    assert pod["spec"]["initContainers"] == [sidecar]
    for path in ("/dev/shm", "/run/kvd", "/etc/prefill"):
        assert mount_of(sidecar, path)["name"] == mount_of(engine, path)["name"]
    # Pages count where they are first touched: the pool is kvd's.
    assert sidecar["resources"]["limits"]["memory"] == f"{10 * 1024}Mi"
    assert volume_of(pod, "shm")["emptyDir"]["sizeLimit"] == f"{9 * 1024}Mi"
    assert mount_of(sidecar, "/kv") == {"name": "kvd-store", "mountPath": "/kv", "subPath": "a"}
    assert sidecar["startupProbe"]["grpc"] == {"port": 50054, "service": "kvd"}


@pytest.mark.parametrize(
    ("extra", "enabled", "more_mib"), [("0", True, 4), ("1Mi", True, 4), ("8Mi", True, 8), ("0", False, 0)]
)
def test_pool_of_kvd_has_room_for_its_journal_whatever_extra_shm_says(extra: str, enabled: bool, more_mib: int) -> None:
    kvd = {"enabled": enabled, "image": "kvd:1", "memory": "1Gi"}
    pod = pod_of(pool_of(PREFILL_BODY, {"kvd": kvd, "engine": {"extraShm": extra}}))
    assert volume_of(pod, "shm")["emptyDir"]["sizeLimit"] == f"{80 * 1024 + more_mib}Mi"


def test_kvd_takes_the_pools_from_the_engines_memory() -> None:
    without = container_of(pod_of(pool_of(PREFILL_BODY)), "engine")["resources"]["limits"]["memory"]
    spec = {"kvd": {"enabled": True, "image": "kvd:1", "memory": "1Gi"}}
    pod = pod_of(pool_of(PREFILL_BODY, spec))
    engine, kvd = (container_of(pod, name)["resources"]["limits"]["memory"] for name in ("engine", "kvd"))

    assert int(without[:-2]) - int(engine[:-2]) == 80 * 1024
    assert kvd == f"{81 * 1024}Mi"


def _kvd_json(spec: dict[str, Any], body: Any = PREFILL_BODY) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(kvd_config_files(pool_of(body, spec).spec)["kvd.json"])
    return parsed


def test_kvd_listens_where_the_pod_says() -> None:
    kvd = {"enabled": True, "image": "kvd:1", "directoryAddress": "directory:50061"}
    pod, config = pod_of(pool_of(PREFILL_BODY, {"kvd": kvd})), _kvd_json({"kvd": kvd})
    ports = {port["name"]: port["containerPort"] for port in container_of(pod, "kvd")["ports"]}

    assert ports == {"kvd-probe": 50054, "kvd-metrics": 50055, "kvd-peers": 50056}
    assert (config["probe_port"], config["metrics_port"]) == (50054, 50055)
    assert config["transport"] == {"kind": "tcp", "port": 50056, "require_rdma": False}
    assert config["directory"] == {"address": "directory:50061"}
    assert {"name": "handoff", "containerPort": 50060, "protocol": "TCP"} in container_of(pod, "engine")["ports"]
    numbers = [port["containerPort"] for name in ("kvd", "engine") for port in container_of(pod, name)["ports"]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("field", ["hostPool", "swaPool"])
def test_part_of_the_pool_without_a_size_is_refused_before_kvd_ends_over_it(field: str) -> None:
    pool = pool_of(PREFILL_BODY, {"kvd": {"enabled": True, "image": "kvd:1"}, "kvCache": {field: "0"}})
    with pytest.raises(PoolInvalid, match=rf"spec.kvCache.{field} is .*0.*: must be above 0 with kvd.enabled"):
        pod_of(pool)


def test_kvd_speaks_tls_with_the_secret_it_is_given() -> None:
    kvd = {"enabled": True, "image": "kvd:1", "transport": {"tlsSecretRef": {"name": "kv-tls"}}}
    pod, config = pod_of(pool_of(PREFILL_BODY, {"kvd": kvd})), _kvd_json({"kvd": kvd})
    secret = volume_of(pod, "kvd-tls")["secret"]
    mount = mount_of(container_of(pod, "kvd"), "/run/secrets/kvd-tls")
    tls = config["transport"]["tls"]

    assert secret["secretName"] == "kv-tls"
    files = {f"{mount['mountPath']}/{item['path']}": item["key"] for item in secret["items"]}
    assert {field: files[path] for field, path in tls.items()} == {
        "certificate": "tls.crt",
        "key": "tls.key",
        "authority": "ca.crt",
    }
    assert msgspec.convert(config, KvdConfig).transport.tls == msgspec.convert(tls, TlsConfig)
    assert mount["readOnly"] is True
    # kvd's key is not the engine's business; without a reference all is as it was.
    assert "kvd-tls" not in {item["name"] for item in container_of(pod, "engine")["volumeMounts"]}
    plain = pod_of(pool_of(PREFILL_BODY, {"kvd": {**kvd, "transport": {}}}))
    assert "kvd-tls" not in {volume["name"] for volume in plain["spec"]["volumes"]}


MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("volume", "most"),
    [
        ({"emptyDir": {"sizeLimit": "160Gi"}}, 150 * GIB),
        ({"emptyDir": {"sizeLimit": "1Gi"}}, 768 * MIB),
        ({"emptyDir": {"sizeLimit": "100Mi"}}, 50 * MIB),
        ({"emptyDir": {}}, 0),
        ({"pvc": {"claimName": "kv"}}, 0),
        ({"hostPath": {"path": "/mnt/models/kv"}}, 0),
    ],
    ids=["large", "small", "tiny", "no-limit", "pvc", "host-path"],
)
def test_store_stays_below_the_limit_of_an_empty_dir(volume: dict[str, Any], most: int) -> None:
    """Else it grows until the kubelet evicts the pod. 0: the medium's own free space decides."""
    kvd = {"enabled": True, "image": "kvd:1", "store": "file", "path": "/kv", "volume": volume}
    config = msgspec.convert(_kvd_json({"kvd": kvd}), KvdConfig)

    assert config.store.max_bytes == most


def test_kvd_gets_an_rdma_device_where_it_needs_one() -> None:
    network, kvd = {"rdmaResourceName": "rdma/hca", "rdmaPerPE": 4}, {"enabled": True, "image": "kvd:1"}
    nixl = {**kvd, "transport": {"kind": "NIXL", "requireRDMA": True}}
    for given, expected in ((kvd, None), (nixl, 1)):
        resources = container_of(pod_of(pool_of(PREFILL_BODY, {"kvd": given, "network": network})), "kvd")["resources"]
        assert resources["requests"].get("rdma/hca") == resources["limits"].get("rdma/hca") == expected
    assert _kvd_json({"kvd": nixl})["transport"] == {"kind": "nixl", "port": 50056, "require_rdma": True}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ({}, 10001),
        ({"spec": {"securityContext": {"runAsUser": 20000}}}, 20000),
        ({"spec": {"containers": [{"name": "engine", "securityContext": {"runAsUser": 30000}}]}}, 30000),
    ],
    ids=["image", "pod", "container"],
)
def test_kvd_knows_the_engines_user(template: dict[str, Any], expected: int) -> None:
    """kvd that mounts 3FS is root; socket and pool are the engine's."""
    spec = {"kvd": USRBIO, "podTemplate": template}
    pod = pod_of(pool_of(PREFILL_BODY, spec))

    assert _kvd_json(spec)["engine_uid"] == expected
    securities = (container_of(pod, "engine")["securityContext"], pod["spec"]["securityContext"])
    assert next(item["runAsUser"] for item in securities if "runAsUser" in item) == expected


def test_root_kvd_may_give_files_away() -> None:
    pod = pod_of(pool_of(PREFILL_BODY, {"kvd": {**USRBIO, "fuseDeviceResource": "smarter-devices/fuse"}}))

    assert container_of(pod, "kvd")["securityContext"]["capabilities"]["add"] == ["SYS_ADMIN", "IPC_LOCK", "CHOWN"]


@pytest.mark.parametrize(
    ("spec", "pool", "snapshots"),
    [
        ({}, 80 << 30, 16 << 30),
        ({"kvd": {"poolSize": "10Gi"}}, 10 << 30, 2 << 30),
        ({"kvd": {"poolSize": "8Gi"}, "kvCache": {"hostPool": "1Gi", "swaPool": "3Gi"}}, 8 << 30, 6 << 30),
    ],
)
def test_pool_always_has_room_for_blocks(spec: dict[str, Any], pool: int, snapshots: int) -> None:
    config = _kvd_json({**spec, "kvd": {"enabled": True, "image": "kvd:1", **spec.get("kvd", {})}})

    assert (config["pool_bytes"], config["snapshot_bytes"]) == (pool, snapshots)


@pytest.mark.parametrize("drain", [1, 120, 3600])
def test_kvd_ends_after_the_engine_and_within_the_pods_grace(drain: int) -> None:
    """A native sidecar is stopped when the engine has ended; preStop, the engine and the write-back share the grace."""
    spec = {"kvd": {"enabled": True, "image": "kvd:1"}, "lifecycle": {"drainTimeoutSeconds": drain}}
    pod = pod_of(pool_of(CPU_BODY, spec))
    (kvd,) = pod["spec"]["initContainers"]
    write_back = int(kvd["args"][kvd["args"].index("--drain-seconds") + 1])
    hook = container_of(pod, "engine")["lifecycle"]["preStop"]["exec"]["command"]

    assert "lifecycle" not in kvd
    assert int(hook[-1]) == drain
    # k8s.md 4.7: engine exit 20 s, kvd 15 s, unmount 10 s. Also what a pod has that the operator has drained before.
    assert 20 + write_back + 10 <= OperatorTimes().drained_grace_seconds
    assert pod["spec"]["terminationGracePeriodSeconds"] == drain + OperatorTimes().drained_grace_seconds


def test_failure_of_kvd_reaches_the_pool() -> None:
    """Its termination message, or the end of its log where it left none."""
    kvd = container_of(pod_of(pool_of(PREFILL_BODY, {"kvd": {"enabled": True, "image": "kvd:1"}})), "kvd")

    assert kvd["terminationMessagePolicy"] == "FallbackToLogsOnError"


@pytest.mark.parametrize(
    ("changes", "security", "fuse"),
    [
        ({"fuseDeviceResource": "smarter-devices/fuse"}, "capabilities", False),
        ({}, "privileged", True),
        ({"mountMode": "Shared", "fuseDeviceResource": "smarter-devices/fuse"}, "privileged", False),
    ],
    ids=["device-plugin", "no-plugin", "shared"],
)
def test_kvd_mounts_3fs_with_as_little_as_it_can(changes: dict[str, Any], security: str, fuse: bool) -> None:
    pod = pod_of(pool_of(PREFILL_BODY, {"kvd": {**USRBIO, **changes}}))
    kvd = container_of(pod, "kvd")

    assert kvd["securityContext"]["runAsUser"] == 0
    assert security in kvd["securityContext"]
    assert ("fuse" in {volume["name"] for volume in pod["spec"]["volumes"]}) is fuse
    assert pod["spec"]["shareProcessNamespace"] is True
    assert volume_of(pod, "kvd-token")["secret"]["secretName"] == "token-3fs"
    assert container_of(pod, "engine")["securityContext"]["allowPrivilegeEscalation"] is False


def test_private_mount_is_not_seen_by_the_engine() -> None:
    pod = pod_of(pool_of(PREFILL_BODY, {"kvd": USRBIO}))

    assert "/3fs" not in {mount["mountPath"] for mount in container_of(pod, "engine")["volumeMounts"]}


def test_shared_mount_reaches_the_engine() -> None:
    pod = pod_of(pool_of(PREFILL_BODY, {"kvd": {**USRBIO, "mountMode": "Shared"}}))

    assert mount_of(container_of(pod, "kvd"), "/3fs")["mountPropagation"] == "Bidirectional"
    assert mount_of(container_of(pod, "engine"), "/3fs")["mountPropagation"] == "HostToContainer"


def test_mount_of_the_node_needs_the_nodes_shared_memory() -> None:
    spec = pod_of(pool_of(PREFILL_BODY, {"kvd": {**USRBIO, "mountMode": "HostMount"}}))["spec"]

    assert spec["hostIPC"] is True
    assert "shm" not in {volume["name"] for volume in spec["volumes"]}
    assert spec["initContainers"][0]["securityContext"]["allowPrivilegeEscalation"] is False


def test_weights_on_3fs_are_mounted_before_the_engine_starts() -> None:
    pod = pod_of(pool_of(PREFILL_BODY, {"model": {"source": SHARED_WEIGHTS}, "kvd": USRBIO}))
    weights = container_of(pod, "weights-mount")

    assert [container["name"] for container in pod["spec"]["initContainers"]] == ["weights-mount", "kvd"]
    assert weights["securityContext"]["privileged"] is True
    assert weights["startupProbe"]["exec"]["command"][-1] == "/3fs/models/flash/config.json"
    assert mount_of(weights, "/3fs")["mountPropagation"] == "Bidirectional"
    assert mount_of(container_of(pod, "engine"), "/3fs")["mountPropagation"] == "HostToContainer"


def _images(pod: dict[str, Any]) -> set[str]:
    containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
    return {str(container["image"]) for container in containers}


def test_images_come_from_the_pool_alone() -> None:
    """k8s.md 2 row 49: an operator that brought its own would restart every engine with its upgrade."""
    assert _images(pod_of(pool_of(PREFILL_BODY))) == {"engine:1"}
    everything = {"kvd": {"enabled": True, "image": "kvd:9"}, "model": {"source": {**SHARED_WEIGHTS, "pvc": None}}}
    assert _images(pod_of(pool_of(PREFILL_BODY, everything))) == {"engine:1", "kvd:9", "fuse:1"}
