"""Volumes of a pod and their mounts.

One memory-backed emptyDir is /dev/shm of all containers: engine and kvd exchange KV through it (k8s.md 4.9). Root file
systems are read-only, so /tmp is an emptyDir, too.
"""

from dataclasses import dataclass, replace

from prefill_operator.api_parts import HostPathSource, PvcSource
from prefill_operator.engine_config import CONFIG_DIR, MODEL_MOUNT
from prefill_operator.manifest import Manifest
from prefill_operator.names import Kind, config_map_name
from prefill_operator.pool_api import KvdVolume, ThreeFSSource, WeightsMountMode
from prefill_operator.render_policy import RenderPolicy
from prefill_operator.ve_api import VEModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class MountedVolume:
    """A volume and how a container sees it. mount is without its name."""

    name: str
    source: Manifest
    mount: Manifest

    def volume(self) -> Manifest:
        return {"name": self.name, **self.source}

    def volume_mount(self) -> Manifest:
        return {"name": self.name, **self.mount}


def config_volume(kind: Kind, pool: str, revision: str) -> MountedVolume:
    source = {"configMap": {"name": config_map_name(kind, pool, revision)}}
    return MountedVolume(name="config", source=source, mount={"mountPath": CONFIG_DIR, "readOnly": True})


def tmp_volume(container: str) -> MountedVolume:
    """Scratch of one container: compiled kernels, Unix sockets between its processes."""
    return MountedVolume(name=f"{container}-tmp", source={"emptyDir": {}}, mount={"mountPath": "/tmp"})


def shm_volume(size_limit: str) -> MountedVolume:
    source = {"emptyDir": {"medium": "Memory", "sizeLimit": size_limit}}
    return MountedVolume(name="shm", source=source, mount={"mountPath": "/dev/shm"})


def pvc_volume(name: str, pvc: PvcSource, *, mount_path: str, read_only: bool) -> MountedVolume:
    claim: Manifest = {"claimName": pvc.claim_name}
    mount: Manifest = {"mountPath": mount_path}
    if read_only:
        # On the volume as well: the kubelet then leaves the owner of half a terabyte of files alone.
        claim["readOnly"] = True
        mount["readOnly"] = True
    return MountedVolume(name=name, source={"persistentVolumeClaim": claim}, mount=mount)


def host_volume(
    name: str, path: HostPathSource, *, mount_path: str, read_only: bool, field: str, policy: RenderPolicy
) -> MountedVolume:
    """Raises PoolInvalid if the policy does not allow the path. The directory must exist: we create none on nodes."""
    policy.check_host_path(path.path, field=field)
    mount: Manifest = {"mountPath": mount_path, **({"readOnly": True} if read_only else {})}
    return MountedVolume(name=name, source={"hostPath": {"path": path.path, "type": "Directory"}}, mount=mount)


def pe_model_volume(
    *, pvc: PvcSource | None, host_path: HostPathSource | None, three_fs: ThreeFSSource | None, policy: RenderPolicy
) -> MountedVolume:
    """The checkpoint, read-only. Exactly one source is given."""
    if pvc is not None:
        return pvc_volume("model", pvc, mount_path=MODEL_MOUNT, read_only=True)
    if host_path is not None:
        field = "spec.model.source.hostPath.path"
        return host_volume("model", host_path, mount_path=MODEL_MOUNT, read_only=True, field=field, policy=policy)
    assert three_fs is not None
    return weights_volume(three_fs, policy)


def weights_volume(three_fs: ThreeFSSource, policy: RenderPolicy) -> MountedVolume:
    """3FS as the engine sees it: mounts that appear on the node, or in the sidecar, appear here too."""
    mount = {"mountPath": three_fs.mount_path, "readOnly": True, "mountPropagation": "HostToContainer"}
    if three_fs.mount_mode is WeightsMountMode.SHARED:
        return MountedVolume(name="model", source={"emptyDir": {}}, mount=mount)
    policy.check_host_path(three_fs.mount_path, field="spec.model.source.threeFS.mountPath")
    source = {"hostPath": {"path": three_fs.mount_path, "type": "Directory"}}
    return MountedVolume(name="model", source=source, mount=mount)


def ve_model_volume(source: VEModelSource, policy: RenderPolicy, *, pull_policy: str) -> MountedVolume:
    """The encoder's weights, read-only."""
    if source.image is not None:
        image = {"image": {"reference": source.image.reference, "pullPolicy": pull_policy}}
        return MountedVolume(name="model", source=image, mount={"mountPath": MODEL_MOUNT, "readOnly": True})
    return pe_model_volume(pvc=source.pvc, host_path=source.host_path, three_fs=None, policy=policy)


def kvd_store_volume(volume: KvdVolume, *, mount_path: str, policy: RenderPolicy) -> MountedVolume:
    """Where kvd keeps its files (store: file)."""
    if volume.pvc is not None:
        store = pvc_volume("kvd-store", volume.pvc, mount_path=mount_path, read_only=False)
        below = volume.pvc.path.strip("/")
        return replace(store, mount={**store.mount, "subPath": below}) if below else store
    if volume.host_path is not None:
        field = "spec.kvd.volume.hostPath.path"
        return host_volume(
            "kvd-store", volume.host_path, mount_path=mount_path, read_only=False, field=field, policy=policy
        )
    assert volume.empty_dir is not None
    limit = volume.empty_dir.size_limit
    empty: Manifest = {} if limit is None else {"sizeLimit": limit}
    return MountedVolume(name="kvd-store", source={"emptyDir": empty}, mount={"mountPath": mount_path})
