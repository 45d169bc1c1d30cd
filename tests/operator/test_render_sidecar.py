"""Sidecars of a pod: kvd in its forms, and the mount of weights on 3FS (C32, k8s.md 4.9)."""

from typing import Any

import pytest

from prefill_testing.pools import (
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


def test_kvd_takes_the_pools_from_the_engines_memory() -> None:
    without = container_of(pod_of(pool_of(PREFILL_BODY)), "engine")["resources"]["limits"]["memory"]
    spec = {"kvd": {"enabled": True, "image": "kvd:1", "memory": "1Gi"}}
    pod = pod_of(pool_of(PREFILL_BODY, spec))
    engine, kvd = (container_of(pod, name)["resources"]["limits"]["memory"] for name in ("engine", "kvd"))

    assert int(without[:-2]) - int(engine[:-2]) == 80 * 1024
    assert kvd == f"{81 * 1024}Mi"


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
