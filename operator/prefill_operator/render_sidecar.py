"""Native sidecars of a PrefillPool's pod: kvd (C32), and the mount of a checkpoint that lies on 3FS (k8s.md 4.9).

Both are init containers with restartPolicy Always: they start before the engine and end after it, kvd after its write-back.
kvd is `prefill-engine kv serve`; its configuration is checked against the struct that kvd reads.
"""

import json
from pathlib import PurePosixPath

import msgspec

from prefill_operator.engine_config import CONFIG_DIR, KVD_SOCKET, model_path
from prefill_operator.errors import PoolInvalid
from prefill_operator.host_memory import kvd_memory_bytes, pool_bytes
from prefill_operator.manifest import Manifest
from prefill_operator.names import ENGINE_CONTAINER, KVD_CONTAINER, WEIGHTS_MOUNT_CONTAINER
from prefill_operator.overlay import user_of
from prefill_operator.pool_api import (
    KvdSpec,
    KvdStore,
    KvdTransportKind,
    MountMode,
    PrefillPoolSpec,
    SecretKeyRef,
    TlsSecretRef,
    WeightsMountMode,
)
from prefill_operator.ports import (
    KVD_METRICS_PORT,
    KVD_METRICS_PORT_NAME,
    KVD_PEER_PORT,
    KVD_PEER_PORT_NAME,
    KVD_PROBE_PORT,
    KVD_PROBE_PORT_NAME,
)
from prefill_operator.quantity import quantity_bytes
from prefill_operator.render_container import (
    KVD_DRAIN_SECONDS,
    USER_ID,
    container_port,
    container_security,
    grpc_probe,
    memory_text,
    mounts,
    pod_env,
)
from prefill_operator.render_policy import RenderPolicy
from prefill_operator.render_volumes import MountedVolume, kvd_store_volume, tmp_volume
from prefill_plan.kvd_config import KvdConfig

KVD_CONFIG_FILE = "kvd.json"
KVD_FUSE_FILE = "kvd-3fs.toml"
WEIGHTS_FUSE_FILE = "weights-3fs.toml"
KVD_SERVICE = "kvd"
"""Name in kvd's health service of "the store answers, or I serve without it" (see startupTimeoutSeconds)."""

_KVD_MOUNT = "kvd-3fs"
_TOKEN_FILE = "token"
# 3FS's client while it reads a checkpoint; no limit, since a killed mount stops the engine.
_FUSE_REQUESTS = (("cpu", "2"), ("memory", "4Gi"))
# Root may read all, the group (fsGroup) as well; others nothing.
_SECRET_MODE = 0o440
_STARTUP_PERIOD_SECONDS = 2
# kvd itself gives up on an optional store when startupTimeoutSeconds are over; the probe must not kill it before.
_STARTUP_SLACK_SECONDS = 30
_TLS_DIR = f"/run/secrets/{KVD_CONTAINER}-tls"
# TlsConfig's field -> key of the Secret, and name of the file.
_TLS_FILES = (("certificate", "tls.crt"), ("key", "tls.key"), ("authority", "ca.crt"))
# Of an emptyDir, kept free of segments: what a restarted kvd writes before it has measured what is there, whole blocks of the
# file system, directories, leftovers of a kvd that was killed. A small volume gives at most half.
_STORE_ROOM_SHARE = 16
_STORE_ROOM_LEAST_BYTES = 256 << 20


def kvd_socket_volume() -> MountedVolume:
    """Where engine and kvd meet."""
    source = {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
    return MountedVolume(name="kvd-socket", source=source, mount={"mountPath": str(PurePosixPath(KVD_SOCKET).parent)})


def kvd_volumes(kvd: KvdSpec, policy: RenderPolicy) -> tuple[MountedVolume, ...]:
    """Volumes that kvd alone mounts.

    Raises:
        PoolInvalid: a host path or a privileged mount that the policy does not allow.
    """
    volumes = [tmp_volume(KVD_CONTAINER), kvd_socket_volume()]
    if kvd.transport.tls_secret_ref is not None:
        volumes.append(_tls_volume(kvd.transport.tls_secret_ref))
    if kvd.store is KvdStore.FILE:
        assert kvd.volume is not None
        assert kvd.path is not None
        volumes.append(kvd_store_volume(kvd.volume, mount_path=kvd.path, policy=policy))
    if kvd.store is KvdStore.USRBIO:
        assert kvd.token_secret_ref is not None
        volumes.append(_three_fs_volume(kvd, policy))
        if kvd.mount_mode is not MountMode.HOST_MOUNT:
            volumes.append(_token_volume(KVD_CONTAINER, kvd.token_secret_ref))
            if not kvd.fuse_device_resource:
                volumes.append(_fuse_volume())
    return tuple(volumes)


def engine_view_of_kvd(kvd: KvdSpec) -> tuple[MountedVolume, ...]:
    """kvd's 3FS mount in the engine, where it is shared (mountMode Shared); the volume itself is kvd's."""
    if kvd.store is not KvdStore.USRBIO or kvd.mount_mode is not MountMode.SHARED:
        return ()
    mount = {"mountPath": kvd.mount_path, "mountPropagation": "HostToContainer"}
    return (MountedVolume(name=_KVD_MOUNT, source={"emptyDir": {}}, mount=mount),)


def render_kvd(spec: PrefillPoolSpec, volumes: tuple[MountedVolume, ...]) -> Manifest:
    """The sidecar; call only when spec.kvd.enabled.

    Raises:
        PoolInvalid: a part of its pool has no size; kvd would end with exit 10.
    """
    kvd = spec.kvd
    _check_pools(spec)
    memory = memory_text(kvd_memory_bytes(spec))
    devices = _kvd_devices(spec)
    budget = kvd.startup_timeout_seconds + _STARTUP_SLACK_SECONDS
    return {
        "name": KVD_CONTAINER,
        "image": kvd.image,
        "imagePullPolicy": str(kvd.image_pull_policy),
        "restartPolicy": "Always",
        "command": ["prefill-engine", "kv", "serve", "--config", f"{CONFIG_DIR}/{KVD_CONFIG_FILE}"],
        # The kubelet ends sidecars when the engine has ended: nothing is committed any more, and the rest can be written.
        "args": ["--drain-seconds", str(KVD_DRAIN_SECONDS)],
        "env": pod_env(),
        "ports": [
            container_port(KVD_PROBE_PORT_NAME, KVD_PROBE_PORT),
            container_port(KVD_METRICS_PORT_NAME, KVD_METRICS_PORT),
            container_port(KVD_PEER_PORT_NAME, KVD_PEER_PORT),
        ],
        "resources": {
            "requests": {"cpu": kvd.cpu, "memory": memory, **devices},
            "limits": {"memory": memory, **devices},
        },
        "startupProbe": grpc_probe(
            KVD_PROBE_PORT, KVD_SERVICE, period=_STARTUP_PERIOD_SECONDS, failures=-(-budget // _STARTUP_PERIOD_SECONDS)
        ),
        "livenessProbe": grpc_probe(KVD_PROBE_PORT, "", period=10, failures=3),
        # Why it can't start, e.g. /dev/shm too small, is shown in the pool's conditions.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _kvd_security(kvd),
        "volumeMounts": mounts(volumes),
    }


def kvd_config_files(spec: PrefillPoolSpec) -> dict[str, str]:
    """Files for the revision's ConfigMap; every value is of a field that rolls pods."""
    kvd = spec.kvd
    if not kvd.enabled:
        return {}
    config = {
        "socket": KVD_SOCKET,
        "probe_port": KVD_PROBE_PORT,
        "metrics_port": KVD_METRICS_PORT,
        "engine_uid": user_of(spec.pod_template, ENGINE_CONTAINER, default=USER_ID),
        "pool_bytes": pool_bytes(spec),
        "snapshot_bytes": _snapshot_bytes(spec),
        "required": kvd.required,
        "startup_timeout_seconds": kvd.startup_timeout_seconds,
        "store": {"kind": str(kvd.store), "path": kvd.path or "", **_store_limit(kvd)},
        "transport": {
            "kind": str(kvd.transport.kind).lower(),
            "port": KVD_PEER_PORT,
            "require_rdma": kvd.transport.require_rdma,
            **_tls_files(kvd),
        },
        "directory": {"address": kvd.directory_address or ""},
    }
    files: dict[str, str] = {}
    if kvd.store is KvdStore.USRBIO and kvd.mount_mode is not MountMode.HOST_MOUNT:
        config["fuse_config"] = f"{CONFIG_DIR}/{KVD_FUSE_FILE}"
        files[KVD_FUSE_FILE] = _fuse_config(
            cluster=kvd.cluster_id or "",
            mount=kvd.mount_path,
            servers=kvd.mgmtd_addresses,
            token=_token_path(KVD_CONTAINER),
        )
    msgspec.convert(config, KvdConfig)
    return {KVD_CONFIG_FILE: json.dumps(config, indent=2, sort_keys=True) + "\n", **files}


def mounts_weights(spec: PrefillPoolSpec) -> bool:
    """Whether a sidecar of ours mounts the checkpoint's 3FS."""
    three_fs = spec.model.source.three_fs
    return three_fs is not None and three_fs.mount_mode is WeightsMountMode.SHARED


def weights_volumes(spec: PrefillPoolSpec, model: MountedVolume, policy: RenderPolicy) -> tuple[MountedVolume, ...]:
    """What the weights mount sees: the engine's model volume with propagation outwards, the token, /dev/fuse."""
    three_fs = spec.model.source.three_fs
    assert three_fs is not None
    assert three_fs.token_secret_ref is not None
    field = "spec.model.source.threeFS.mountMode"
    policy.check_privileged(field, value=str(three_fs.mount_mode), what="needs a privileged sidecar")
    shared = {"mountPath": three_fs.mount_path, "mountPropagation": "Bidirectional"}
    return (
        MountedVolume(name=model.name, source=model.source, mount=shared),
        tmp_volume(WEIGHTS_MOUNT_CONTAINER),
        _token_volume(WEIGHTS_MOUNT_CONTAINER, three_fs.token_secret_ref),
        _fuse_volume(),
    )


def render_weights_mount(spec: PrefillPoolSpec, volumes: tuple[MountedVolume, ...]) -> Manifest:
    """3FS's own client in a privileged container: only such a mount is seen by other containers."""
    three_fs = spec.model.source.three_fs
    assert three_fs is not None
    # A dead predecessor leaves its mount behind. The client makes a table as long as the limit of open files.
    script = (
        f"umount -l {three_fs.mount_path} 2>/dev/null; ulimit -n 1048576; "
        f"exec hf3fs_fuse_main --launcher_cfg {CONFIG_DIR}/{WEIGHTS_FUSE_FILE}"
    )
    return {
        "name": WEIGHTS_MOUNT_CONTAINER,
        "image": three_fs.image,
        "restartPolicy": "Always",
        "command": ["/bin/sh", "-c", script],
        "resources": {"requests": dict(_FUSE_REQUESTS)},
        "startupProbe": {
            # One 4 KiB read proves the mount and the path.
            "exec": {"command": ["head", "-c", "4096", f"{model_path(spec.model.source)}/config.json"]},
            "periodSeconds": _STARTUP_PERIOD_SECONDS,
            "timeoutSeconds": 5,
            "failureThreshold": -(-three_fs.startup_timeout_seconds // _STARTUP_PERIOD_SECONDS),
        },
        "securityContext": _root_security(privileged=True),
        "volumeMounts": mounts(volumes),
    }


def weights_config_files(spec: PrefillPoolSpec) -> dict[str, str]:
    three_fs = spec.model.source.three_fs
    if three_fs is None or not mounts_weights(spec):
        return {}
    text = _fuse_config(
        cluster=three_fs.cluster_id or "",
        mount=three_fs.mount_path,
        servers=three_fs.mgmtd_addresses,
        token=_token_path(WEIGHTS_MOUNT_CONTAINER),
    )
    return {WEIGHTS_FUSE_FILE: text}


def _check_pools(spec: PrefillPoolSpec) -> None:
    for path, size in (
        ("spec.kvCache.hostPool", spec.kv_cache.host_pool),
        ("spec.kvCache.swaPool", spec.kv_cache.swa_pool),
    ):
        if quantity_bytes(size) == 0:
            raise PoolInvalid(
                path, value=size, rule="must be above 0 with kvd.enabled: kvd's pool has blocks and snapshots"
            )


def _snapshot_bytes(spec: PrefillPoolSpec) -> int:
    """The snapshots' part of the pool; of a pool with a size of its own the same share."""
    blocks, snapshots = quantity_bytes(spec.kv_cache.host_pool), quantity_bytes(spec.kv_cache.swa_pool)
    return pool_bytes(spec) * snapshots // max(1, blocks + snapshots)


def _store_limit(kvd: KvdSpec) -> dict[str, int]:
    """max_bytes of a store in an emptyDir, below its sizeLimit: beyond that the kubelet evicts the pod. Empty = the medium's free
    space counts, as on other volumes and in an emptyDir without a limit."""
    empty_dir = kvd.volume.empty_dir if kvd.store is KvdStore.FILE and kvd.volume is not None else None
    if empty_dir is None or empty_dir.size_limit is None:
        return {}
    limit = quantity_bytes(empty_dir.size_limit)
    room = max(limit // _STORE_ROOM_SHARE, min(_STORE_ROOM_LEAST_BYTES, limit // 2))
    return {"max_bytes": limit - room}


def _tls_files(kvd: KvdSpec) -> dict[str, dict[str, str]]:
    """For peers and the directory alike; empty = plain TCP, as rendered before there was a choice."""
    if kvd.transport.tls_secret_ref is None:
        return {}
    return {"tls": {field: f"{_TLS_DIR}/{name}" for field, name in _TLS_FILES}}


def _kvd_devices(spec: PrefillPoolSpec) -> dict[str, int]:
    devices = {spec.kvd.fuse_device_resource: 1} if spec.kvd.fuse_device_resource else {}
    if spec.kvd.transport.kind is KvdTransportKind.NIXL and spec.network.rdma_resource_name:
        devices[spec.network.rdma_resource_name] = 1
    return devices


def _three_fs_volume(kvd: KvdSpec, policy: RenderPolicy) -> MountedVolume:
    """The place of kvd's 3FS mount, by who mounts it."""
    mount: Manifest = {"mountPath": kvd.mount_path}
    field = "spec.kvd.mountMode"
    match kvd.mount_mode:
        case MountMode.PRIVATE:
            policy.check_privileged(field, value="Private", what="kvd needs root and SYS_ADMIN to mount 3FS")
            source: Manifest = {"emptyDir": {}}
        case MountMode.SHARED:
            policy.check_privileged(field, value="Shared", what="kvd must be privileged to share its mount")
            source, mount["mountPropagation"] = {"emptyDir": {}}, "Bidirectional"
        case MountMode.HOST_MOUNT:
            policy.check_privileged(
                field, value="HostMount", what="the node's 3FS client needs the pod in its IPC namespace"
            )
            policy.check_host_path(kvd.mount_path, field="spec.kvd.mountPath")
            source = {"hostPath": {"path": kvd.mount_path, "type": "Directory"}}
            mount["mountPropagation"] = "HostToContainer"
    return MountedVolume(name=_KVD_MOUNT, source=source, mount=mount)


def _kvd_security(kvd: KvdSpec) -> Manifest:
    if kvd.store is not KvdStore.USRBIO or kvd.mount_mode is MountMode.HOST_MOUNT:
        return container_security()
    return _root_security(privileged=kvd.mount_mode is MountMode.SHARED or not kvd.fuse_device_resource)


def _root_security(*, privileged: bool) -> Manifest:
    """For a container that mounts a file system. Not privileged: the device plugin grants /dev/fuse, we what mount() asks."""
    root: Manifest = {"runAsUser": 0, "runAsNonRoot": False, "readOnlyRootFilesystem": True}
    if privileged:
        return {**root, "privileged": True}
    return {
        **root,
        "allowPrivilegeEscalation": True,
        # CHOWN: socket and pool go to the engine's user (KvdConfig.engine_uid).
        "capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN", "IPC_LOCK", "CHOWN"]},
        "appArmorProfile": {"type": "Unconfined"},
    }


def _token_volume(container: str, token: SecretKeyRef) -> MountedVolume:
    """The kubelet mounts the token and renews it in place; the operator needs no access to Secrets."""
    items = [{"key": token.key, "path": _TOKEN_FILE}]
    source = {"secret": {"secretName": token.name, "items": items, "defaultMode": _SECRET_MODE}}
    mount = {"mountPath": str(PurePosixPath(_token_path(container)).parent), "readOnly": True}
    return MountedVolume(name=f"{container}-token", source=source, mount=mount)


def _tls_volume(secret: TlsSecretRef) -> MountedVolume:
    """Named keys, so that the kubelet says which one a Secret lacks."""
    items = [{"key": name, "path": name} for _, name in _TLS_FILES]
    source = {"secret": {"secretName": secret.name, "items": items, "defaultMode": _SECRET_MODE}}
    return MountedVolume(name=f"{KVD_CONTAINER}-tls", source=source, mount={"mountPath": _TLS_DIR, "readOnly": True})


def _token_path(container: str) -> str:
    return f"/run/secrets/{container}/{_TOKEN_FILE}"


def _fuse_volume() -> MountedVolume:
    source = {"hostPath": {"path": "/dev/fuse", "type": "CharDevice"}}
    return MountedVolume(name="fuse", source=source, mount={"mountPath": "/dev/fuse"})


def _fuse_config(*, cluster: str, mount: str, servers: tuple[str, ...], token: str) -> str:
    """hf3fs_fuse_main_launcher.toml. JSON strings and lists of strings are TOML, too."""
    lines = [
        f"cluster_id = {json.dumps(cluster)}",
        f"mountpoint = {json.dumps(mount)}",
        f"token_file = {json.dumps(token)}",
        "allow_other = true",
        "[ib_devices]",
        "device_filter = []",
        "[mgmtd_client]",
        f"mgmtd_server_addresses = {json.dumps(list(servers))}",
    ]
    return "\n".join(lines) + "\n"
