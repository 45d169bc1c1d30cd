"""An API server in memory, good enough to run the operator end to end: versions, conflicts, preconditions, patches, apply,
garbage collection, what watches tell, and faults on demand.

`FakeApi` answers requests as (status, body); fake_cluster.py makes a Cluster of it, fake_api_http.py serves it. What it does not
have: schemas, defaults, CEL, admission, a scheduler. The real control plane in tests/cluster has them.
"""

import asyncio
import copy
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from prefill_operator.resources import CHILDREN, EVENTS, LEASES, NODES, PODS, POOLS, Json, Resource

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"

RESOURCES: tuple[Resource, ...] = (PODS, NODES, EVENTS, LEASES, *POOLS.values(), *CHILDREN.values())

KOPF_RESOURCES = (
    Resource(group="", version="v1", plural="namespaces", kind="Namespace", namespaced=False),
    Resource(
        group="apiextensions.k8s.io",
        version="v1",
        plural="customresourcedefinitions",
        kind="CustomResourceDefinition",
        namespaced=False,
    ),
)
"""Kopf waits until they are discovered, and asks nothing of them."""

Answer = tuple[int, Json]
ObjectKey = tuple[Resource, str, str]


@dataclass(slots=True, kw_only=True)
class Fault:
    """What befalls matching requests, `times` times. Empty patterns match all."""

    verb: str = ""
    resource: str = ""
    status: int = 0
    """0: no answer at all; 200: nothing fails, the answer is only late."""
    reason: str = ""
    message: str = "injected"
    times: int = 1
    after: bool = False
    """The request is carried out, but its answer is lost."""
    retry_after: float = 0.0
    hang_seconds: float = 0.0
    """Over HTTP: the answer comes this much later."""

    def takes(self, verb: str, resource: Resource) -> bool:
        fits = self.verb in ("", verb) and self.resource in ("", resource.plural)
        self.times -= fits
        return fits and self.times >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    verb: str
    resource: str
    name: str
    subresource: str


@dataclass(slots=True, kw_only=True)
class _Stored:
    body: Json
    applied: dict[str, Json] = field(default_factory=dict)
    """By subresource: what our manager applied last."""


class FakeApi:
    """clock: seconds since the epoch, for timestamps. Kinds in `unserved` answer 404, as without their CRD."""

    def __init__(self, *, clock: Callable[[], float], unserved: frozenset[Resource] = frozenset()) -> None:
        self._clock = clock
        self._objects: dict[ObjectKey, _Stored] = {}
        self._versions = itertools.count(100)
        self._uids = itertools.count(1)
        self.unserved = unserved
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.history: list[tuple[int, Resource, str, Json]] = []
        """(version, resource, event type, object): what watches tell."""
        self.oldest_version = 0
        """Watches from before this one are answered 410."""
        self.changed = asyncio.Event()
        """Set at each change; a watch clears it."""
        self.forbidden: set[str] = set()
        """Plural names that may not be read."""

    def get(self, resource: Resource, name: str, namespace: str = "") -> Json:
        """The object itself, for a test to look at. KeyError if there is none."""
        return copy.deepcopy(self._objects[resource, namespace, name].body)

    def all(self, resource: Resource) -> list[Json]:
        return [
            copy.deepcopy(stored.body) for key, stored in sorted(self._objects.items(), key=str) if key[0] == resource
        ]

    def put(self, resource: Resource, body: Json) -> Json:
        """Creates or replaces as somebody else than the operator would; status included, nothing is counted."""
        namespace, name = body["metadata"].get("namespace", ""), body["metadata"]["name"]
        held = self._objects.get((resource, namespace, name))
        kind = "MODIFIED" if held else "ADDED"
        body = copy.deepcopy(body)
        if held:
            body["metadata"]["uid"] = held.body["metadata"]["uid"]
            if body.get("spec") != held.body.get("spec"):
                body["metadata"]["generation"] = held.body["metadata"].get("generation", 1) + 1
        stored = held or _Stored(body={})
        stored.body = self._complete(resource, body)
        self._objects[resource, namespace, name] = stored
        return self._announce(resource, kind, stored.body)

    def remove(self, resource: Resource, name: str, namespace: str = "") -> None:
        """Gone at once, with everything it owns."""
        stored = self._objects.pop((resource, namespace, name))
        self._announce(resource, "DELETED", stored.body)
        uid = stored.body["metadata"]["uid"]
        for key, other in list(self._objects.items()):
            owners = other.body["metadata"].get("ownerReferences", [])
            if any(owner["uid"] == uid for owner in owners) and key in self._objects:
                self.remove(key[0], key[2], key[1])

    def writes(self) -> list[Request]:
        """Requests so far that change something, those of the Lease apart."""
        reading = ("get", "list", "watch", "discover")
        return [r for r in self.requests if r.verb not in reading and r.resource != LEASES.plural]

    def handle(self, method: str, path: str, query: Mapping[str, str], body: Any, content_type: str) -> Answer:
        """One request. Raises ConnectionError for a fault without answer."""
        place = parse_path(path)
        if place is None:
            return self._discover(path)
        resource, namespace, name, subresource = place
        verb = _verb(method, name, content_type)
        self.requests.append(Request(verb=verb, resource=resource.plural, name=name, subresource=subresource))
        fault = next((item for item in self.faults if item.takes(verb, resource)), None)
        fault = None if fault is not None and fault.status == 200 else fault
        if fault is not None and not fault.after:
            return _fail(fault)
        if resource in self.unserved:
            return status_answer(404, "NotFound", f"the server could not find the requested resource {path}")
        if resource.plural in self.forbidden:
            return status_answer(403, "Forbidden", f"{resource.plural} is forbidden")
        answer = self._serve(verb, (resource, namespace, name), subresource, query, body)
        return _fail(fault) if fault is not None else answer

    def _serve(self, verb: str, key: ObjectKey, subresource: str, query: Mapping[str, str], body: Any) -> Answer:
        resource, _, name = key
        if verb == "list":
            return self._list(resource, key[1], query)
        if verb == "create":
            return self._create((resource, key[1], body["metadata"]["name"]), body)
        stored = self._objects.get(key)
        if stored is None and verb == "apply" and not subresource:
            answer = self._create(key, {k: v for k, v in body.items() if k != "status"})
            self._objects[key].applied[""] = copy.deepcopy(body)
            return answer
        if stored is None:
            return status_answer(404, "NotFound", f'{resource.plural} "{name}" not found')
        if verb == "get":
            return 200, copy.deepcopy(stored.body)
        if verb == "delete":
            return self._delete(key, stored, body or {})
        return self._change(verb, resource, stored, subresource, body)

    def _create(self, key: ObjectKey, body: Json) -> Answer:
        if key in self._objects:
            return status_answer(409, "AlreadyExists", f'{key[0].plural} "{key[2]}" already exists')
        body = copy.deepcopy(body)
        body.pop("status", None)
        if key[0] == PODS:
            body["status"] = {"phase": "Pending"}
        self._objects[key] = _Stored(body=self._complete(key[0], body))
        return 201, self._announce(key[0], "ADDED", self._objects[key].body)

    def _complete(self, resource: Resource, body: Json) -> Json:
        metadata = body["metadata"]
        metadata.setdefault("uid", f"uid-{next(self._uids)}")
        metadata.setdefault("creationTimestamp", self.stamp())
        metadata.setdefault("generation", 1)
        return {"apiVersion": resource.api_version, "kind": resource.kind, **body}

    def _change(self, verb: str, resource: Resource, stored: _Stored, subresource: str, body: Json) -> Answer:
        metadata, sent = stored.body["metadata"], body.get("metadata", {})
        if sent.get("uid", metadata["uid"]) != metadata["uid"]:
            return status_answer(409, "Conflict", "Precondition failed: UID in precondition")
        if sent.get("resourceVersion", metadata["resourceVersion"]) != metadata["resourceVersion"]:
            return status_answer(409, "Conflict", "the object has been modified")
        new = copy.deepcopy(stored.body)
        if verb == "update":
            new = self._complete(resource, {**copy.deepcopy(body), "metadata": {**metadata, **sent}})
        elif verb == "apply":
            _drop_unapplied(new, stored.applied.get(subresource, {}), body)
            _merge(new, body, by_key=True)
            stored.applied[subresource] = copy.deepcopy(body)
        else:
            _merge(new, body, by_key=verb == "strategic")
        if subresource == "status":
            new = {**copy.deepcopy(stored.body), "status": new.get("status", {})}
        elif resource in POOLS.values() and "status" in stored.body:
            new["status"] = stored.body["status"]
        if new == stored.body:
            return 200, copy.deepcopy(stored.body)
        if new.get("spec") != stored.body.get("spec"):
            new["metadata"]["generation"] = metadata.get("generation", 1) + 1
        stored.body = new
        return 200, self._announce(resource, "MODIFIED", new)

    def _delete(self, key: ObjectKey, stored: _Stored, options: Json) -> Answer:
        resource, namespace, name = key
        metadata = stored.body["metadata"]
        uid = options.get("preconditions", {}).get("uid", metadata["uid"])
        if uid != metadata["uid"]:
            return status_answer(409, "Conflict", "Precondition failed: UID in precondition")
        is_bound = resource == PODS and stored.body.get("spec", {}).get("nodeName")
        if not is_bound:
            self.remove(resource, name, namespace)
            return 200, {**copy.deepcopy(stored.body), "metadata": {**metadata, "deletionTimestamp": self.stamp()}}
        grace = options.get("gracePeriodSeconds")
        if grace is None:
            grace = stored.body["spec"].get("terminationGracePeriodSeconds", 30)
        if "deletionTimestamp" not in metadata:
            metadata["deletionTimestamp"] = self.stamp(grace)
            metadata["deletionGracePeriodSeconds"] = grace
            self._announce(resource, "MODIFIED", stored.body)
        return 200, copy.deepcopy(stored.body)

    def _list(self, resource: Resource, namespace: str, query: Mapping[str, str]) -> Answer:
        wanted = dict(part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part)
        items = [
            copy.deepcopy(stored.body)
            for key, stored in sorted(self._objects.items(), key=lambda entry: entry[0][1:])
            if key[0] == resource and namespace in ("", key[1]) and has_labels(stored.body, wanted)
        ]
        start, limit = int(query.get("continue") or 0), int(query.get("limit") or 0)
        page = items[start : start + limit] if limit else items
        more = str(start + limit) if limit and start + limit < len(items) else ""
        version = str(self.history[-1][0] if self.history else 1)
        return 200, {
            "apiVersion": resource.api_version,
            "kind": f"{resource.kind}List",
            "metadata": {"resourceVersion": version, "continue": more},
            "items": page,
        }

    def _discover(self, path: str) -> Answer:
        """/api, /apis and the lists below them."""
        served = [resource for resource in (*RESOURCES, *KOPF_RESOURCES) if resource not in self.unserved]
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            versions = sorted({(resource.group, resource.version) for resource in served if resource.group})
            groups = [
                {"name": group, "versions": [{"version": version}], "preferredVersion": {"version": version}}
                for group, version in versions
            ]
            return 200, {"kind": "APIGroupList", "groups": groups}
        found = [resource for resource in served if resource.group_path == path]
        if not found:
            return status_answer(404, "NotFound", f"the server could not find {path}")
        resources = [
            {
                "name": resource.plural,
                "singularName": resource.kind.lower(),
                "kind": resource.kind,
                "namespaced": resource.namespaced,
                "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
            }
            for resource in found
        ]
        return 200, {"kind": "APIResourceList", "groupVersion": found[0].api_version, "resources": resources}

    def _announce(self, resource: Resource, kind: str, body: Json) -> Json:
        version = next(self._versions)
        body["metadata"]["resourceVersion"] = str(version)
        self.history.append((version, resource, kind, copy.deepcopy(body)))
        self.changed.set()
        return copy.deepcopy(body)

    def stamp(self, ahead: float = 0.0) -> str:
        return datetime.fromtimestamp(self._clock() + ahead, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_path(path: str) -> tuple[Resource, str, str, str] | None:
    """Resource, namespace, name, subresource; None for discovery."""
    for resource in RESOURCES:
        pattern = (
            re.escape(resource.group_path)
            + r"(?:/namespaces/([^/]+))?/"
            + resource.plural
            + r"(?:/([^/]+))?(?:/([^/]+))?"
        )
        if match := re.fullmatch(pattern, path):
            return resource, match[1] or "", match[2] or "", match[3] or ""
    return None


def _verb(method: str, name: str, content_type: str) -> str:
    if method == "PATCH":
        return {APPLY: "apply", STRATEGIC: "strategic"}.get(content_type, "patch")
    if method == "GET":
        return "get" if name else "list"
    return {"POST": "create", "PUT": "update", "DELETE": "delete"}[method]


def status_answer(code: int, reason: str, message: str, *, retry_after: float = 0.0) -> Answer:
    details = {"retryAfterSeconds": retry_after} if retry_after else {}
    return code, {"kind": "Status", "reason": reason, "message": message, "code": code, "details": details}


def _fail(fault: Fault) -> Answer:
    if fault.status == 0:
        raise ConnectionError(fault.message)
    return status_answer(fault.status, fault.reason, fault.message, retry_after=fault.retry_after)


def has_labels(body: Json, wanted: Mapping[str, str]) -> bool:
    labels = body["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in wanted.items())


def _merge(target: Json, patch: Json, *, by_key: bool) -> None:
    """JSON merge patch; with by_key, lists of conditions and owners are merged by their key."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value, by_key=by_key)
        elif by_key and key in ("conditions", "ownerReferences") and target.get(key):
            name = "type" if key == "conditions" else "uid"
            merged = {item[name]: item for item in target[key]} | {item[name]: item for item in value}
            target[key] = list(merged.values())
        else:
            target[key] = copy.deepcopy(value)


def _drop_unapplied(target: Json, before: Json, after: Json) -> None:
    """Server-side apply: fields that we applied before and no longer apply go."""
    for key, value in before.items():
        if key not in after:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(after[key], dict) and isinstance(target.get(key), dict):
            _drop_unapplied(target[key], value, after[key])
