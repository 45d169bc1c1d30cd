"""What the operator knows of the cluster: small records of pools, pods, nodes and children, filled by events and by our own
writes.

One Cache per process, changed only in the event loop and never across an await. `put` and `remove` answer which pools have to
be looked at again, and answer nothing when the object says nothing new, so that heartbeats cost no pass. The trap: an event
that was on its way while we wrote is older than what we hold; a lower resourceVersion never replaces a higher one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec

from prefill_operator.api import Pool, parse_pool
from prefill_operator.errors import PoolInvalid
from prefill_operator.model import ChildKind, ObservedNode
from prefill_operator.names import KIND_LABEL, MANAGED_BY, MANAGED_BY_LABEL, POOL_LABEL, Kind
from prefill_operator.node_reading import NodeRecord, read_node
from prefill_operator.pod_reading import PodRecord, controller_uid, read_pod
from prefill_operator.references import referred_pool
from prefill_operator.resources import CHILD_KINDS, NODES, PODS, POOLS, Json, PoolKey, Resource
from prefill_operator.settings import NodeSignals

_COUNTED = ("managedFields", "resourceVersion", "generation")
_ACTIVE_CONDITIONS: Mapping[ChildKind, Mapping[str, str]] = MappingProxyType(
    {
        ChildKind.HPA: {"ScalingActive": "True"},
        # With a fallback KEDA stays Ready while its metrics are lost; the other two say it.
        ChildKind.SCALED_OBJECT: {"Ready": "True", "HPAActive": "True", "Fallback": "False"},
    }
)
"""What an autoscaler that acts reports, the condition that every version reports first."""

ObjectId = tuple[str, str]
"""Namespace ("" for nodes) and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecord:
    """A pool; `pool` is None if its spec cannot be used, then `fault` says why."""

    key: PoolKey
    uid: str
    pool: Pool | None
    fault: PoolInvalid | None
    body: bytes
    """The object as JSON, kept only beside a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRecord:
    """An object beside pods that carries our labels."""

    pool: PoolKey
    kind: ChildKind
    name: str
    uid: str
    controller_uid: str
    body: bytes
    """The object as JSON, without its status and what the API server counts in its metadata."""
    active: bool | None
    """Whether an HPA or ScaledObject has metrics to act on; None = not reported, or another kind."""
    message: str
    """Of the condition that says why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    uid: str
    resource_version: str


_R = TypeVar("_R")
_Outer = TypeVar("_Outer")
_Inner = TypeVar("_Inner")
_Value = TypeVar("_Value")


class _Store(Generic[_R]):
    """Records of one resource with their versions."""

    def __init__(self, read: Callable[[Json], _R | None]) -> None:
        self._read = read
        self.records: dict[ObjectId, _R] = {}
        self.versions: dict[ObjectId, Version] = {}

    def put(self, body: Json) -> tuple[_R | None, _R | None]:
        """(before, after); equal if the object says nothing new."""
        name = object_id(body)
        held, before = self.versions.get(name), self.records.get(name)
        new = Version(uid=body["metadata"].get("uid", ""), resource_version=body["metadata"].get("resourceVersion", ""))
        if held is not None and not _is_newer(new.resource_version, held.resource_version):
            return before, before
        after = self._read(body)
        self.versions[name] = new
        if after is None:
            self.records.pop(name, None)
        else:
            self.records[name] = after
        return before, after

    def remove(self, name: ObjectId, uid: str) -> _R | None:
        """Forgets the object, unless another one has its name by now."""
        held = self.versions.get(name)
        if held is None or (uid and held.uid != uid):
            return None
        del self.versions[name]
        return self.records.pop(name, None)


class Cache:
    """See the module's docstring."""

    def __init__(self, signals: NodeSignals, *, has_nodes: bool) -> None:
        self.has_nodes = has_nodes
        """False: this installation may not read nodes (C35)."""
        self._pools = {kind: _Store(_read_pool) for kind in Kind}
        self._pods = _Store(read_pod)
        self._nodes: _Store[NodeRecord] = _Store(lambda body: read_node(body, signals))
        self._children = {kind: _Store(_child_reader(kind)) for kind in ChildKind}
        self._pods_of: dict[PoolKey, dict[str, PodRecord]] = {}
        self._children_of: dict[PoolKey, dict[tuple[ChildKind, str], ChildRecord]] = {}
        self._referrers: dict[PoolKey, dict[PoolKey, PoolKey]] = {}
        """By pool, there or not: the pools that name it."""
        self._pools_on: dict[str, dict[ObjectId, PoolKey]] = {}
        """By node ("" = none yet): the pods there and their pools."""
        self._taken: dict[tuple[str, str], int] = {}
        """By node and resource name: devices that pods there request."""
        self._node_views: dict[str, tuple[ObservedNode, ...]] = {}

    def put(self, resource: Resource, body: Json) -> set[PoolKey]:
        """Takes the object in; returns the pools that it changes something for."""
        store = self._store(resource)
        before, after = store.put(body)
        if before == after:
            return set()
        return self._index(object_id(body), before, after)

    def remove(self, resource: Resource, name: ObjectId, *, uid: str) -> set[PoolKey]:
        """Forgets the object, if it is still the one with this uid ("" = any)."""
        before = self._store(resource).remove(name, uid)
        return set() if before is None else self._index(name, before, None)

    def versions(self, resource: Resource) -> Mapping[ObjectId, Version]:
        """What is held of the resource, to compare with a LIST. Do not change it."""
        return self._store(resource).versions

    def pool_keys(self) -> list[PoolKey]:
        """All pools."""
        return [record.key for store in self._pools.values() for record in store.records.values()]

    def pool(self, key: PoolKey) -> PoolRecord | None:
        return self._pools[key.kind].records.get((key.namespace, key.name))

    def referrers(self, key: PoolKey) -> list[PoolKey]:
        """Pools that name this one, which need not exist."""
        return list(self._referrers.get(key, {}))

    def pods(self, key: PoolKey) -> list[PodRecord]:
        """Pods with the pool's labels, by name."""
        pods = self._pods_of.get(key, {})
        return [pods[name] for name in sorted(pods)]

    def children(self, key: PoolKey) -> list[ChildRecord]:
        """Objects with the pool's labels or in the way of its own, by kind and name."""
        children = self._children_of.get(key, {})
        return [children[name] for name in sorted(children)]

    def nodes(self, gpu_resource: str) -> tuple[ObservedNode, ...] | None:
        """All nodes, with counts of this GPU resource; None if nodes are not watched."""
        if not self.has_nodes:
            return None
        views = self._node_views.get(gpu_resource)
        if views is None:
            views = tuple(
                node.view(gpu_resource, taken=self._taken.get((name, gpu_resource), 0))
                for (_, name), node in sorted(self._nodes.records.items())
            )
            self._node_views[gpu_resource] = views
        return views

    def _store(
        self, resource: Resource
    ) -> _Store[PoolRecord] | _Store[PodRecord] | _Store[NodeRecord] | _Store[ChildRecord]:
        if resource == PODS:
            return self._pods
        if resource == NODES:
            return self._nodes
        if resource in CHILD_KINDS:
            return self._children[CHILD_KINDS[resource]]
        return next(self._pools[kind] for kind, pools in POOLS.items() if pools == resource)

    def _index(
        self, name: ObjectId, *records: PoolRecord | PodRecord | NodeRecord | ChildRecord | None
    ) -> set[PoolKey]:
        """Brings the indexes from records[0] to records[1]."""
        before, after = records
        affected: set[PoolKey] = set()
        for record, present in ((before, False), (after, True)):
            match record:
                case PoolRecord():
                    affected |= {record.key, *self.referrers(record.key)}
                    named = referred_pool(record.pool) if record.pool is not None else None
                    if named is not None:
                        _set_in(self._referrers, named, record.key, record.key if present else None)
                case PodRecord():
                    affected.add(record.pool)
                    self._index_pod(name, record, present=present)
                case ChildRecord():
                    affected.add(record.pool)
                    _set_in(self._children_of, record.pool, (record.kind, record.name), record if present else None)
                case NodeRecord():
                    self._node_views.clear()
                    affected |= self._affected_by_node(name[1])
        return affected

    def _index_pod(self, name: ObjectId, record: PodRecord, *, present: bool) -> None:
        node = record.observed.node
        _set_in(self._pods_of, record.pool, name[1], record if present else None)
        _set_in(self._pools_on, node, name, record.pool if present else None)
        if node and record.extended:
            self._node_views.clear()
            for resource, amount in record.extended.items():
                taken = self._taken.get((node, resource), 0) + (amount if present else -amount)
                self._taken[node, resource] = taken

    def _affected_by_node(self, node: str) -> set[PoolKey]:
        """Pools with pods there, and those that wait for a place."""
        return {*self._pools_on.get(node, {}).values(), *self._pools_on.get("", {}).values()}


def object_id(body: Json) -> ObjectId:
    return body["metadata"].get("namespace", ""), body["metadata"]["name"]


def _set_in(index: dict[_Outer, dict[_Inner, _Value]], outer: _Outer, inner: _Inner, value: _Value | None) -> None:
    """Sets or, with None, deletes index[outer][inner]; empty inner dicts do not stay."""
    if value is not None:
        index.setdefault(outer, {})[inner] = value
        return
    found = index.get(outer, {})
    found.pop(inner, None)
    if not found:
        index.pop(outer, None)


def _is_newer(new: str, held: str) -> bool:
    """Resource versions count up across all objects of one cluster; what is no number counts as new if it differs."""
    if new.isdecimal() and held.isdecimal():
        return int(new) > int(held)
    return new != held


def _read_pool(body: Json) -> PoolRecord:
    metadata = body["metadata"]
    key = PoolKey(kind=Kind(body["kind"]), namespace=metadata.get("namespace", ""), name=metadata["name"])
    uid = metadata.get("uid", "")
    try:
        return PoolRecord(key=key, uid=uid, pool=parse_pool(body), fault=None, body=b"")
    except PoolInvalid as fault:
        return PoolRecord(key=key, uid=uid, pool=None, fault=fault, body=msgspec.json.encode(body))


def _child_reader(kind: ChildKind) -> Callable[[Json], ChildRecord | None]:
    def read(body: Json) -> ChildRecord | None:
        pool = pool_of_labels(body)
        return None if pool is None else read_child(kind, body, pool=pool)

    return read


def read_child(kind: ChildKind, body: Json, *, pool: PoolKey) -> ChildRecord:
    """The record of an object that concerns `pool`."""
    metadata = {name: value for name, value in body["metadata"].items() if name not in _COUNTED}
    rest = {name: value for name, value in body.items() if name not in ("metadata", "status")}
    active, message = _read_activity(kind, (body.get("status") or {}).get("conditions") or ())
    return ChildRecord(
        pool=pool,
        kind=kind,
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        controller_uid=controller_uid(metadata),
        body=msgspec.json.encode({**rest, "metadata": metadata}),
        active=active,
        message=message,
    )


def _read_activity(kind: ChildKind, conditions: Iterable[Json]) -> tuple[bool | None, str]:
    """ChildRecord.active and .message of an object with these conditions."""
    wanted = _ACTIVE_CONDITIONS.get(kind, {})
    reported = {item["type"]: item for item in conditions if item.get("status") in ("True", "False")}
    for name, word in wanted.items():
        found = reported.get(name)
        if found is not None and found["status"] != word:
            return False, f"{found.get('reason', '')}: {found.get('message', '')}"
    return (True if next(iter(wanted), "") in reported else None), ""


def pool_of_labels(body: Json) -> PoolKey | None:
    """The pool that the object's labels name, if we manage it."""
    metadata = body["metadata"]
    labels: Mapping[str, str] = metadata.get("labels") or {}
    kind, pool = labels.get(KIND_LABEL), labels.get(POOL_LABEL)
    if labels.get(MANAGED_BY_LABEL) != MANAGED_BY or kind not in tuple(Kind) or not pool:
        return None
    return PoolKey(kind=Kind(kind), namespace=metadata.get("namespace", ""), name=pool)
