"""The kinds of objects we read or write: where their URLs are, and the key by which pools are known inside the process."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from prefill_operator.model import ChildKind
from prefill_operator.names import API_GROUP, MANAGED_BY, MANAGED_BY_LABEL, Kind

Json = dict[str, Any]
"""An object of the API as it came over the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolKey:
    """Which pool; what the work queue holds."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One resource of the API."""

    group: str
    """"" for the core group."""
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def group_path(self) -> str:
        """URL of the group and version, whose answer lists what it serves."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, *, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """URL path. No namespace: all of them. No name: the collection."""
        path = self.group_path
        if namespace and self.namespaced:
            path += f"/namespaces/{namespace}"
        return path + "".join(f"/{part}" for part in (self.plural, name, subresource) if part)


PODS = Resource(group="", version="v1", plural="pods", kind="Pod")
NODES = Resource(group="", version="v1", plural="nodes", kind="Node", namespaced=False)
EVENTS = Resource(group="", version="v1", plural="events", kind="Event")
LEASES = Resource(group="coordination.k8s.io", version="v1", plural="leases", kind="Lease")

POOLS: Mapping[Kind, Resource] = MappingProxyType(
    {kind: Resource(group=API_GROUP, version="v1alpha1", plural=kind.plural, kind=str(kind)) for kind in Kind}
)

_CHILD_NAMES = {
    ChildKind.CONFIG_MAP: ("", "v1", "configmaps"),
    ChildKind.SERVICE: ("", "v1", "services"),
    ChildKind.DISRUPTION_BUDGET: ("policy", "v1", "poddisruptionbudgets"),
    ChildKind.HPA: ("autoscaling", "v2", "horizontalpodautoscalers"),
    ChildKind.SCALED_OBJECT: ("keda.sh", "v1alpha1", "scaledobjects"),
    ChildKind.POD_MONITOR: ("monitoring.coreos.com", "v1", "podmonitors"),
    ChildKind.NETWORK_POLICY: ("networking.k8s.io", "v1", "networkpolicies"),
}
CHILDREN: Mapping[ChildKind, Resource] = MappingProxyType(
    {
        kind: Resource(group=group, version=version, plural=plural, kind=str(kind))
        for kind, (group, version, plural) in _CHILD_NAMES.items()
    }
)
CHILD_KINDS: Mapping[Resource, ChildKind] = MappingProxyType({resource: kind for kind, resource in CHILDREN.items()})

REQUIRED_CHILDREN = (ChildKind.CONFIG_MAP, ChildKind.SERVICE, ChildKind.DISRUPTION_BUDGET)
"""Served by every cluster and allowed by every rule list; the others depend on both."""

OWN_SELECTOR = f"{MANAGED_BY_LABEL}={MANAGED_BY}"


def selector_of(resource: Resource) -> str:
    """The label selector under which we list and watch the resource. Pools and nodes are not ours and carry no such label."""
    return "" if resource == NODES or resource in POOLS.values() else OWN_SELECTOR
