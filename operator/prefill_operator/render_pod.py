"""One pod of a pool as a Kubernetes object: pure, from spec, plan and the planner's CreatePod.

Used by apply and by `prefill-operator render`. What a pod is made from is fixed at its creation: fields that roll no pods
(scheduling, time-outs) reach it with its next replacement.
"""

import copy

from prefill_operator.api import Pool
from prefill_operator.errors import PoolInvalid
from prefill_operator.host_memory import shm_bytes
from prefill_operator.manifest import Manifest, object_metadata
from prefill_operator.model import CreatePod
from prefill_operator.names import (
    ACCEPTING_GATE,
    ENCODER_CONTAINER,
    ENGINE_CONTAINER,
    EP_ANNOTATION,
    KVD_CONTAINER,
    PLAN_HASH_ANNOTATION,
    POOL_UID_ANNOTATION,
    pod_labels,
)
from prefill_operator.overlay import apply_overlay
from prefill_operator.plan import PoolPlan
from prefill_operator.pool_api import KvdStore, MountMode, PrefillPoolSpec
from prefill_operator.render_container import grace_seconds, memory_text, pod_security
from prefill_operator.render_encoder import encoder_shm_text, render_encoder
from prefill_operator.render_engine import render_engine
from prefill_operator.render_placement import render_placement
from prefill_operator.render_policy import RenderPolicy
from prefill_operator.render_sidecar import (
    engine_view_of_kvd,
    kvd_socket_volume,
    kvd_volumes,
    mounts_weights,
    render_kvd,
    render_weights_mount,
    weights_volumes,
)
from prefill_operator.render_volumes import (
    MountedVolume,
    config_volume,
    pe_model_volume,
    shm_volume,
    tmp_volume,
    ve_model_volume,
)
from prefill_operator.ve_api import VEPoolSpec


def render_pod(pool: Pool, plan: PoolPlan, create: CreatePod, policy: RenderPolicy) -> Manifest:
    """The pod to POST.

    Args:
        plan: feasible; its revision is that of `create`.

    Raises:
        PoolInvalid: the overlay, an argument, a host path or a privileged part is refused; the message names the field.
    """
    spec = pool.spec
    if spec.network.host_network:
        policy.check_privileged("spec.network.hostNetwork", value=True, what="uses the network of the node")
    metadata = object_metadata(pool, create.name, labels=pod_labels(pool.kind, pool.name, create.revision))
    metadata["annotations"] = {
        POOL_UID_ANNOTATION: pool.uid,
        PLAN_HASH_ANNOTATION: plan.hash,
        EP_ANNOTATION: str(plan.ep),
    }
    pod_spec: Manifest = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": grace_seconds(spec.lifecycle),
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": pod_security(),
        **render_placement(pool, create),
    }
    if spec.network.host_network:
        pod_spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if policy.readiness_gate:
        pod_spec["readinessGates"] = [{"conditionType": ACCEPTING_GATE}]
    config = config_volume(pool.kind, pool.name, create.revision)
    if isinstance(spec, VEPoolSpec):
        pod_spec |= _encoder_parts(spec, config, policy)
    else:
        pod_spec |= _engine_parts(spec, plan, config, policy)
    pod: Manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec}
    # A copy: parts come from the spec, which is shared.
    return apply_overlay(copy.deepcopy(pod), spec.pod_template, policy, containers=_overlaid_containers(spec))


def refusal_text(pool: Pool, plan: PoolPlan, policy: RenderPolicy) -> str:
    """Why no pod of this pool can be made (Observed.config_refusal); "" = one can, or the plan already says no."""
    if not plan.feasible:
        return ""
    try:
        render_pod(pool, plan, CreatePod(name=pool.name, revision=plan.revision, incarnation=0), policy)
    except PoolInvalid as error:
        return error.message
    return ""


def _overlaid_containers(spec: PrefillPoolSpec | VEPoolSpec) -> tuple[str, ...]:
    """Containers that an overlay may touch."""
    if isinstance(spec, VEPoolSpec):
        return (ENCODER_CONTAINER,)
    return (ENGINE_CONTAINER, KVD_CONTAINER) if spec.kvd.enabled else (ENGINE_CONTAINER,)


def _engine_parts(spec: PrefillPoolSpec, plan: PoolPlan, config: MountedVolume, policy: RenderPolicy) -> Manifest:
    source = spec.model.source
    model = pe_model_volume(pvc=source.pvc, host_path=source.host_path, three_fs=source.three_fs, policy=policy)
    shares_node_ipc = _shares_node_ipc(spec)
    # In the node's IPC namespace /dev/shm is the node's: 3FS's client there must see our segments.
    shm = () if shares_node_ipc else (shm_volume(memory_text(shm_bytes(spec))),)
    engine_volumes = (config, model, *shm, tmp_volume(ENGINE_CONTAINER))
    parts: Manifest = {}
    sidecars: list[Manifest] = []
    volumes = list(engine_volumes)
    if mounts_weights(spec):
        weights = weights_volumes(spec, model, policy)
        sidecars.append(render_weights_mount(spec, (config, *weights)))
        volumes += weights
    if spec.kvd.enabled:
        own = kvd_volumes(spec.kvd, policy)
        sidecars.append(render_kvd(spec, (config, *shm, *own)))
        volumes += own
        engine_volumes += (kvd_socket_volume(), *engine_view_of_kvd(spec.kvd))
    if sidecars:
        parts["initContainers"] = sidecars
    if shares_node_ipc:
        parts["hostIPC"] = True
    elif spec.kvd.enabled and spec.kvd.store is KvdStore.USRBIO:
        # 3FS's client cleans up the segments of processes that ended, by their ids.
        parts["shareProcessNamespace"] = True
    parts["containers"] = [render_engine(spec, plan, engine_volumes)]
    parts["volumes"] = _unique(volumes)
    return parts


def _encoder_parts(spec: VEPoolSpec, config: MountedVolume, policy: RenderPolicy) -> Manifest:
    model = ve_model_volume(spec.model.source, policy, pull_policy=str(spec.encoder.image_pull_policy))
    volumes = (config, model, shm_volume(encoder_shm_text(spec)), tmp_volume(ENCODER_CONTAINER))
    return {"containers": [render_encoder(spec, volumes)], "volumes": _unique(list(volumes))}


def _shares_node_ipc(spec: PrefillPoolSpec) -> bool:
    kvd = spec.kvd
    return kvd.enabled and kvd.store is KvdStore.USRBIO and kvd.mount_mode is MountMode.HOST_MOUNT


def _unique(volumes: list[MountedVolume]) -> list[Manifest]:
    """One volume per name, in order; containers share them."""
    return list({volume.name: volume.volume() for volume in volumes}.values())
