"""Carries out a Decision: the only module that changes anything in the cluster on behalf of a pool.

Actions are done in their order, and what comes after one that failed is not done (model.Decision.actions). Pods are created by
POST only, since server-side apply answers 200 for a pod that exists already and hides the conflict (C28). The trap: objects of
ours are known by a label watch, so that somebody else's object with a name of ours is not in the cache; before anything is
applied for the first time, the name is looked up.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import assert_never

from prefill_operator.api import Pool
from prefill_operator.api_status import PoolStatus, VEPoolStatus, status_body
from prefill_operator.cache import Cache, ChildRecord, read_child
from prefill_operator.cluster import Cluster
from prefill_operator.drain import Drains
from prefill_operator.errors import (
    ClusterError,
    ForeignObject,
    ObjectExists,
    ObjectMissing,
    PoolInvalid,
    QuotaDenied,
    RequestRejected,
    WriteConflict,
)
from prefill_operator.event_limiter import EventLimiter
from prefill_operator.lease import LeaderLease
from prefill_operator.manifest import Manifest, owner_reference
from prefill_operator.model import (
    Action,
    ChildKind,
    CreatePod,
    CreateRefusal,
    DeleteObject,
    DeletePod,
    EmitEvent,
    EnsureObject,
    SetPoolAnnotation,
    StartDrain,
    WriteRefusal,
)
from prefill_operator.names import (
    ACCEPTING_GATE,
    API_VERSION,
    DRAINING_SINCE_ANNOTATION,
    KV_STORE_ANNOTATION,
    KV_STORE_DEGRADED,
)
from prefill_operator.plan import PoolPlan
from prefill_operator.pod_reading import PodRecord, controller_uid, read_pod, read_pod_of
from prefill_operator.pool_memory import ChildObstacle, PodObstacle, PoolMemory, Subject
from prefill_operator.refusals import describe_refusal, judge_refusal
from prefill_operator.render_pod import render_pod
from prefill_operator.render_policy import RenderPolicy
from prefill_operator.resources import CHILDREN, EVENTS, PODS, POOLS, PoolKey
from prefill_operator.writes import FencedWrites
from prefill_plan.errors import PrefillError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The pool that a pass is about."""

    key: PoolKey
    pool: Pool
    plan: PoolPlan
    memory: PoolMemory
    children: Mapping[tuple[ChildKind, str], Manifest]
    """What its objects beside pods shall be now, rendered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What became of a Decision."""

    num_writes: int
    """Changes made, events not counted."""
    num_done: int
    """The first so many actions are done."""
    error: PrefillError | None = None
    """Why the rest of the actions was not done."""
    is_learned: bool = False
    """The failure is remembered and changes what the next pass sees, so that it may come at once."""


class Applier:
    """clock: seconds since the epoch."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        lease: LeaderLease,
        *,
        drains: Drains,
        events: EventLimiter,
        policy: RenderPolicy,
        clock: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._writes = FencedWrites(cluster, cache, lease)
        self._drains = drains
        self._events = events
        self._policy = policy
        self._clock = clock

    async def apply(self, target: Target, actions: Iterable[Action]) -> Applied:
        """Does the actions in order, up to the first that fails. Raises LeaseLost only."""
        num_writes = num_done = 0
        for action in actions:
            try:
                await self._do(target, action)
            except ClusterError as error:
                is_learned = self._learn(target, action, error)
                return Applied(num_writes=num_writes, num_done=num_done, error=error, is_learned=is_learned)
            except (ForeignObject, PoolInvalid) as error:
                is_learned = isinstance(error, ForeignObject)
                return Applied(num_writes=num_writes, num_done=num_done, error=error, is_learned=is_learned)
            target.memory.refusals.pop(_subject(target.key, action), None)
            num_writes += not isinstance(action, EmitEvent)
            num_done += 1
        return Applied(num_writes=num_writes, num_done=num_done)

    async def write_status(self, target: Target, status: PoolStatus | VEPoolStatus) -> None:
        """Raises ClusterError, LeaseLost."""
        await self._write_status(target.key, target.pool.uid, status)
        target.memory.status_written_at = self._clock()

    async def write_refusal(self, key: PoolKey, uid: str, status: PoolStatus | VEPoolStatus) -> None:
        """Status of a pool whose spec cannot be used. Raises ClusterError, LeaseLost."""
        await self._write_status(key, uid, status)

    def forget(self, key: PoolKey) -> None:
        """The pool is gone."""
        self._events.forget(key)

    async def open_gate(self, target: Target, pod: PodRecord) -> None:
        """Lets the pod become Ready. Raises ClusterError, LeaseLost; a pod that is gone is no error."""
        await self._set_gate(target.key, pod, accepting=True)

    async def adopt(self, target: Target, pod: PodRecord) -> None:
        """Makes the pool the pod's controller again (k8s.md 4.1). Raises ClusterError, LeaseLost."""
        owners = {"metadata": {"ownerReferences": [owner_reference(target.pool)]}}
        await self._merge_pod(target.key, pod.observed.name, pod.observed.uid, owners)
        logger.info("adopted a pod", extra={"pool": str(target.key), "pod": pod.observed.name})

    def note_tended(self, target: Target, pod: PodRecord, error: RequestRejected | None) -> bool:
        """Remembers whether the pod could be tended (adopt, open_gate, note_store). True if the refusal is a new one."""
        subject = ("tend", "Pod", pod.observed.name)
        if error is not None:
            return self._remember(target, subject, error, is_withheld=False)
        target.memory.refusals.pop(subject, None)
        return False

    async def note_store(self, target: Target, pod: PodRecord, *, is_degraded: bool) -> None:
        """Says on the pod whether its engine serves without its KV store (k8s.md 4.9). Raises ClusterError, LeaseLost."""
        value = KV_STORE_DEGRADED if is_degraded else None
        note = {"metadata": {"annotations": {KV_STORE_ANNOTATION: value}}}
        await self._merge_pod(target.key, pod.observed.name, pod.observed.uid, note)

    async def _do(self, target: Target, action: Action) -> None:
        match action:
            case SetPoolAnnotation():
                await self._annotate_pool(target, action)
            case EnsureObject():
                await self._ensure(target, action)
            case CreatePod():
                await self._create_pod(target, action)
            case StartDrain():
                await self._start_drain(target, action)
            case DeletePod():
                await self._delete_pod(target, action)
            case DeleteObject():
                await self._delete_object(target, action)
            case EmitEvent():
                await self._emit(target, action)
            case _:
                assert_never(action)

    async def _annotate_pool(self, target: Target, action: SetPoolAnnotation) -> None:
        patch = {"metadata": {"annotations": {action.key: action.value or None}}}
        key, uid = target.key, target.pool.uid
        await self._writes.merge(POOLS[key.kind], patch, namespace=key.namespace, name=key.name, uid=uid)

    async def _ensure(self, target: Target, action: EnsureObject) -> None:
        """Makes the object, or applies it over the one that exists, which must be the pool's."""
        body = target.children[action.kind, action.name]
        held = self._held_child(target, action.kind, action.name)
        if held is not None:
            await self._apply_over(target, action, uid=held.uid, owner=held.controller_uid)
        elif action.kind is not ChildKind.CONFIG_MAP or not await self._create_object(body):
            live = await self._cluster.find(CHILDREN[action.kind], namespace=target.key.namespace, name=action.name)
            if live is None:
                await self._writes.apply(CHILDREN[action.kind], body)
            else:
                await self._meet_object(target, action, live)
        logger.info("applied", extra={"pool": str(target.key), "kind": str(action.kind), "object": action.name})

    async def _create_object(self, body: Manifest) -> bool:
        """POST of an object that never changes, which saves the look-up. False if its name is taken."""
        try:
            await self._writes.create(CHILDREN[ChildKind(body["kind"])], body)
        except ObjectExists:
            return False
        return True

    async def _meet_object(self, target: Target, action: EnsureObject, live: Manifest) -> None:
        """The name is taken by an object without our labels, or by one that no event has told of yet."""
        uid, owner = live["metadata"].get("uid", ""), controller_uid(live["metadata"])
        if owner != target.pool.uid:
            child = read_child(action.kind, live, pool=target.key)
            target.memory.children[action.kind, action.name] = ChildObstacle(child=child, seen_at=self._clock())
        await self._apply_over(target, action, uid=uid, owner=owner)

    async def _apply_over(self, target: Target, action: EnsureObject, *, uid: str, owner: str) -> None:
        if owner != target.pool.uid:
            where = f"{action.kind} {target.key.namespace}/{action.name}"
            raise ForeignObject(f"{where} exists and is not of {target.key}; left alone")
        body = target.children[action.kind, action.name]
        await self._writes.apply(CHILDREN[action.kind], {**body, "metadata": {**body["metadata"], "uid": uid}})

    def _held_child(self, target: Target, kind: ChildKind, name: str) -> ChildRecord | None:
        children = self._cache.children(target.key)
        return next((child for child in children if (child.kind, child.name) == (kind, name)), None)

    async def _create_pod(self, target: Target, action: CreatePod) -> None:
        body = render_pod(target.pool, target.plan, action, self._policy)
        try:
            await self._writes.create(PODS, body)
        except ObjectExists:
            await self._meet_pod(target, action.name)
            return
        target.memory.create_refusal = None
        logger.info("created a pod", extra={"pool": str(target.key), "pod": action.name})

    async def _meet_pod(self, target: Target, name: str) -> None:
        """Somebody made a pod of this name: another leader before us, or a stranger."""
        live = await self._cluster.find(PODS, namespace=target.key.namespace, name=name)
        if live is None:
            return
        known = read_pod(live)
        if known is not None and known.pool == target.key:
            self._cache.put(PODS, live)
        else:
            pod = read_pod_of(target.key, live)
            target.memory.pods[name] = PodObstacle(pod=pod, seen_at=self._clock())
        logger.info("pod exists already", extra={"pool": str(target.key), "pod": name})

    def _learn(self, target: Target, action: Action, error: ClusterError) -> bool:
        """Remembers a refusal, so that the status tells it. True if the next pass sees something new by that."""
        is_refusal = isinstance(error, QuotaDenied | RequestRejected) and "being terminated" not in error.message
        is_unserved = isinstance(error, ObjectMissing) and isinstance(action, EnsureObject)
        if isinstance(action, EmitEvent) or not (is_refusal or is_unserved):
            return False
        if not isinstance(action, CreatePod):
            return self._remember(
                target, _subject(target.key, action), error, is_withheld=isinstance(action, EnsureObject)
            )
        logger.warning("pod refused", extra={"pool": str(target.key), "error": error.message})
        reason, remedy = judge_refusal(error, is_pod=True)
        message = describe_refusal(f"Pod {action.name}", error, remedy)
        target.memory.create_refusal = CreateRefusal(
            at=self._clock(), reason=reason, message=message, revision=action.revision
        )
        return True

    def _remember(self, target: Target, subject: Subject, error: ClusterError, *, is_withheld: bool) -> bool:
        logger.warning("write refused", extra={"pool": str(target.key), "error": error.message})
        reason, remedy = judge_refusal(error, is_pod=False)
        before, (_, kind, name) = target.memory.refusals.get(subject), subject
        refusal = WriteRefusal(
            at=self._clock(),
            reason=reason,
            kind=kind,
            name=name,
            message=describe_refusal(f"{kind} {name}", error, remedy),
            is_withheld=is_withheld,
            generation=target.pool.generation,
        )
        target.memory.refusals[subject] = refusal
        return is_withheld or before is None or before.message != refusal.message

    async def _start_drain(self, target: Target, action: StartDrain) -> None:
        pod = self._find_pod(target.key, action.name, action.uid)
        if pod is None:
            return
        at = datetime.fromtimestamp(self._clock(), tz=UTC).isoformat(timespec="milliseconds")
        if pod.observed.draining_since is None:
            note = {"metadata": {"annotations": {DRAINING_SINCE_ANNOTATION: at.replace("+00:00", "Z")}}}
            await self._merge_pod(target.key, action.name, action.uid, note)
        if pod.has_gate and pod.observed.gate is not False:
            await self._set_gate(target.key, pod, accepting=False)
        self._drains.begin(action.uid, pool=target.key, address=pod.address, timeout_seconds=action.timeout_seconds)
        logger.info("draining", extra={"pool": str(target.key), "pod": action.name, "reason": action.reason})

    async def _delete_pod(self, target: Target, action: DeletePod) -> None:
        where = target.key.namespace
        try:
            await self._writes.delete(
                PODS, namespace=where, name=action.name, uid=action.uid, grace_seconds=action.grace_seconds
            )
        except WriteConflict:
            await self._refresh_pod(target.key, action.name, action.uid)
            return
        logger.info("deleted a pod", extra={"pool": str(target.key), "pod": action.name, "reason": action.reason})

    async def _delete_object(self, target: Target, action: DeleteObject) -> None:
        held = self._held_child(target, action.kind, action.name)
        if held is None or held.controller_uid != target.pool.uid:
            return
        resource = CHILDREN[action.kind]
        await self._writes.delete(resource, namespace=target.key.namespace, name=action.name, uid=held.uid)
        logger.info("deleted", extra={"pool": str(target.key), "kind": str(action.kind), "object": action.name})

    async def _emit(self, target: Target, action: EmitEvent) -> None:
        for body in self._events.admit(target.key, target.pool, action, now=self._clock()):
            try:
                await self._writes.post_event(EVENTS, body)
            except ClusterError as error:
                logger.warning("event not written", extra={"pool": str(target.key), "error": error.message})

    async def _set_gate(self, key: PoolKey, pod: PodRecord, *, accepting: bool) -> None:
        condition = {
            "type": ACCEPTING_GATE,
            "status": "True" if accepting else "False",
            "lastTransitionTime": datetime.fromtimestamp(self._clock(), tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "reason": "Accepting" if accepting else "Draining",
        }
        name, uid = pod.observed.name, pod.observed.uid
        try:
            await self._writes.set_condition(PODS, condition, namespace=key.namespace, name=name, uid=uid)
        except (ObjectMissing, WriteConflict):
            await self._refresh_pod(key, name, uid)

    async def _merge_pod(self, key: PoolKey, name: str, uid: str, patch: Manifest) -> None:
        try:
            await self._writes.merge(PODS, patch, namespace=key.namespace, name=name, uid=uid)
        except (ObjectMissing, WriteConflict):
            await self._refresh_pod(key, name, uid)

    async def _refresh_pod(self, key: PoolKey, name: str, uid: str) -> None:
        """What we wanted to change is gone or has been replaced: the cache was behind."""
        live = await self._cluster.find(PODS, namespace=key.namespace, name=name)
        if live is None or live["metadata"].get("uid") != uid:
            self._cache.remove(PODS, (key.namespace, name), uid=uid)
        if live is not None:
            self._cache.put(PODS, live)

    def _find_pod(self, key: PoolKey, name: str, uid: str) -> PodRecord | None:
        return next(
            (pod for pod in self._cache.pods(key) if pod.observed.uid == uid and pod.observed.name == name), None
        )

    async def _write_status(self, key: PoolKey, uid: str, status: PoolStatus | VEPoolStatus) -> None:
        body = {
            "apiVersion": API_VERSION,
            "kind": str(key.kind),
            "metadata": {"name": key.name, "namespace": key.namespace, "uid": uid},
            "status": status_body(status),
        }
        try:
            await self._writes.apply(POOLS[key.kind], body, subresource="status")
        except (ObjectMissing, WriteConflict):
            logger.info("status not written: the pool is gone", extra={"pool": str(key)})


def _subject(key: PoolKey, action: Action) -> Subject:
    """Verb, kind and name of what an action writes; memory of a refusal goes by it."""
    match action:
        case EnsureObject(kind=kind, name=name):
            return "write", str(kind), name
        case DeleteObject(kind=kind, name=name):
            return "delete", str(kind), name
        case DeletePod(name=name):
            return "delete", "Pod", name
        case StartDrain(name=name):
            return "drain", "Pod", name
        case CreatePod(name=name):
            return "create", "Pod", name
        case SetPoolAnnotation(key=annotation):
            return f"annotate {annotation}", str(key.kind), key.name
        case EmitEvent():
            return "tell", "Event", str(action.reason)
        case _:
            assert_never(action)
