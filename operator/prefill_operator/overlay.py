"""The overlay of a pool's pods (spec.podTemplate): an allow-list, and the merge (k8s.md 4.12).

Whoever may write a pool must not thereby get more than the operator's pods need: no further containers, no host namespaces,
no root, no foreign host paths. The trap: what is not on the list is refused with a message, never dropped in silence.
"""

from collections.abc import Mapping
from typing import Any

from prefill_operator.api_parts import OverlayMetadata, PodOverlay
from prefill_operator.errors import PoolInvalid
from prefill_operator.manifest import Manifest
from prefill_operator.overlay_affinity import merge_affinity
from prefill_operator.render_container import IDENTITY_ENV
from prefill_operator.render_placement import lost_node_tolerations
from prefill_operator.render_policy import RenderPolicy

_METADATA = "spec.podTemplate.metadata"
_SPEC = "spec.podTemplate.spec"

# Keys of labels and annotations that mean something to the operator, or to who selects its objects.
_RESERVED_PREFIXES = ("prefill.dev/", "app.kubernetes.io/")

POD_FIELDS = (
    "containers",
    "initContainers",
    "volumes",
    "imagePullSecrets",
    "serviceAccountName",
    "tolerations",
    "affinity",
    "hostAliases",
    "dnsConfig",
    "securityContext",
)
CONTAINER_FIELDS = ("name", "env", "envFrom", "volumeMounts", "securityContext")
POD_SECURITY_FIELDS = (
    "runAsUser",
    "runAsGroup",
    "fsGroup",
    "fsGroupChangePolicy",
    "supplementalGroups",
    "seLinuxOptions",
)
CONTAINER_SECURITY_FIELDS = ("runAsUser", "runAsGroup", "readOnlyRootFilesystem")

# Fields that users look for here and that have a place of their own in the spec.
_BETTER_PLACES = {
    "nodeSelector": "spec.scheduling.nodeSelector",
    "priorityClassName": "spec.scheduling.priorityClassName",
    "schedulerName": "spec.scheduling.schedulerName",
    "runtimeClassName": "spec.scheduling.runtimeClassName",
    "topologySpreadConstraints": "spec.scheduling.topologySpreadConstraints",
    "terminationGracePeriodSeconds": "spec.lifecycle.drainTimeoutSeconds",
    "hostNetwork": "spec.network.hostNetwork",
    "image": "spec.engine.image",
    "args": "spec.engine.args",
    "resources": "spec.engine",
}


def apply_overlay(pod: Manifest, overlay: PodOverlay, policy: RenderPolicy, *, containers: tuple[str, ...]) -> Manifest:
    """The pod with the overlay merged into it; `pod` is changed.

    Lists are appended to ours, an environment variable replaces ours of the same name.

    Args:
        containers: names of the containers that an overlay may touch.

    Raises:
        PoolInvalid: a part that is not on the list, or collides with one of ours; the message names field and reason.
    """
    _merge_metadata(pod["metadata"], overlay.metadata)
    spec = pod["spec"]
    for field, value in overlay.spec.items():
        path = f"{_SPEC}.{field}"
        if field not in POD_FIELDS:
            raise _not_allowed(path, field, POD_FIELDS)
        match field:
            case "containers" | "initContainers":
                _merge_containers(spec, field, _list(value, path), path, policy=policy, allowed=containers)
            case "volumes":
                _merge_volumes(spec, _list(value, path), path, policy)
            case "tolerations":
                _merge_tolerations(spec, _list(value, path))
            case "affinity":
                spec[field] = merge_affinity(spec.get(field, {}), _mapping(value, path), path=path)
            case "securityContext":
                _merge_security(spec[field], _mapping(value, path), path, policy=policy, allowed=POD_SECURITY_FIELDS)
            case "serviceAccountName":
                spec[field] = value
                # Whoever names an account wants its token.
                del spec["automountServiceAccountToken"]
            case _:
                spec[field] = value
    return pod


def user_of(overlay: PodOverlay, container: str, *, default: int) -> int:
    """User of a container of ours under this overlay; whether the overlay is allowed is another matter."""
    found = overlay.spec.get("containers")
    named = [one for one in found if isinstance(one, Mapping)] if isinstance(found, list | tuple) else []
    securities = [one.get("securityContext") for one in named if one.get("name") == container]
    for security in (*securities, overlay.spec.get("securityContext")):
        user = security.get("runAsUser") if isinstance(security, Mapping) else None
        if isinstance(user, int):
            return user
    return default


def _merge_metadata(metadata: Manifest, overlay: OverlayMetadata) -> None:
    for name, given in (("labels", overlay.labels), ("annotations", overlay.annotations)):
        for key in given:
            if key.startswith(_RESERVED_PREFIXES):
                raise PoolInvalid(f"{_METADATA}.{name}", value=key, rule="belongs to the operator")
        metadata[name] = {**given, **metadata[name]}


def _merge_containers(
    spec: Manifest, field: str, overlays: list[Any], path: str, *, policy: RenderPolicy, allowed: tuple[str, ...]
) -> None:
    known = {container["name"]: container for container in spec.get(field, ()) if container["name"] in allowed}
    for index, item in enumerate(overlays):
        where = f"{path}[{index}]"
        overlay = _mapping(item, where)
        container = known.get(overlay.get("name"))
        if container is None:
            rule = f"no further containers; only {', '.join(known) or 'none'} can be changed here"
            raise PoolInvalid(f"{where}.name", value=overlay.get("name", ""), rule=rule)
        for key, value in overlay.items():
            if key not in CONTAINER_FIELDS:
                raise _not_allowed(f"{where}.{key}", key, CONTAINER_FIELDS)
            _merge_container_field(container, key, value, f"{where}.{key}", policy)


def _merge_container_field(container: Manifest, key: str, value: Any, path: str, policy: RenderPolicy) -> None:
    match key:
        case "env":
            _merge_env(container, _list(value, path), path)
        case "envFrom":
            container[key] = _list(value, path)
        case "volumeMounts":
            _merge_mounts(container, _list(value, path), path)
        case "securityContext":
            security = container[key]
            _merge_security(security, _mapping(value, path), path, policy=policy, allowed=CONTAINER_SECURITY_FIELDS)


def _merge_env(container: Manifest, given: list[Any], path: str) -> None:
    named: dict[str, Manifest] = {item["name"]: item for item in container.get("env", ())}
    for index, item in enumerate(given):
        variable = _mapping(item, f"{path}[{index}]")
        name = variable.get("name")
        if not isinstance(name, str):
            raise PoolInvalid(f"{path}[{index}].name", value=name, rule="is required, as text")
        if name in IDENTITY_ENV:
            raise PoolInvalid(f"{path}[{index}].name", value=name, rule="is set by the operator")
        named[name] = dict(variable)
    container["env"] = list(named.values())


def _merge_mounts(container: Manifest, given: list[Any], path: str) -> None:
    taken = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    for index, item in enumerate(given):
        mount = _mapping(item, f"{path}[{index}]")
        target = mount.get("mountPath")
        if not isinstance(target, str) or not target.startswith("/"):
            raise PoolInvalid(f"{path}[{index}].mountPath", value=target, rule="must be an absolute path")
        if target.rstrip("/") in taken:
            rule = f"is where the operator mounts {taken[target.rstrip('/')]}"
            raise PoolInvalid(f"{path}[{index}].mountPath", value=target, rule=rule)
        if mount.get("mountPropagation") not in (None, "None", "HostToContainer"):
            rule = "only HostToContainer is allowed; Bidirectional needs a privileged container"
            raise PoolInvalid(f"{path}[{index}].mountPropagation", value=mount["mountPropagation"], rule=rule)
        container["volumeMounts"].append(dict(mount))


def _merge_volumes(spec: Manifest, given: list[Any], path: str, policy: RenderPolicy) -> None:
    taken = {volume["name"] for volume in spec["volumes"]}
    for index, item in enumerate(given):
        where = f"{path}[{index}]"
        volume = _mapping(item, where)
        if volume.get("name") in taken:
            raise PoolInvalid(f"{where}.name", value=volume["name"], rule="is a volume of the operator, or named twice")
        if "hostPath" in volume:
            source = _mapping(volume["hostPath"], f"{where}.hostPath")
            policy.check_host_path(source.get("path"), field=f"{where}.hostPath.path")
        taken.add(volume.get("name"))
        spec["volumes"].append(dict(volume))


def _merge_tolerations(spec: Manifest, given: list[Any]) -> None:
    """Ours for lost nodes give way to the user's for the same taints."""
    ours = lost_node_tolerations([])
    kept = [toleration for toleration in spec["tolerations"] if toleration not in ours]
    merged = kept + given
    spec["tolerations"] = merged + lost_node_tolerations([item for item in merged if isinstance(item, dict)])


def _merge_security(
    security: Manifest, given: Mapping[str, Any], path: str, *, policy: RenderPolicy, allowed: tuple[str, ...]
) -> None:
    for key, value in given.items():
        if key not in allowed:
            raise _not_allowed(f"{path}.{key}", key, allowed)
        if key == "runAsUser" and value == 0:
            policy.check_privileged(f"{path}.{key}", value=0, what="is root")
            security["runAsNonRoot"] = False
        security[key] = value


def _not_allowed(path: str, field: str, allowed: tuple[str, ...]) -> PoolInvalid:
    if place := _BETTER_PLACES.get(field):
        return PoolInvalid(path, value=None, rule=f"is not allowed here; set {place}")
    return PoolInvalid(path, value=None, rule=f"is not allowed; allowed are {', '.join(allowed)}")


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise PoolInvalid(path, value=value, rule="must be a list")
    return value


def _mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PoolInvalid(path, value=value, rule="must be an object")
    return value
