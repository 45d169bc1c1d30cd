"""One pool as the planner sees it, put together from the cache: pods, nodes, children, plan, and what the children shall be.

Pure but for what it reads: the cache, the drains of this process, what engines told it, and the pool's memory. Called once per
pass by reconcile.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from prefill_operator.api import Pool
from prefill_operator.cache import Cache, ChildRecord
from prefill_operator.children import desired_children
from prefill_operator.drain import Drains
from prefill_operator.engine_watch import EngineWatch
from prefill_operator.errors import PoolInvalid
from prefill_operator.intent import read_intent
from prefill_operator.manifest import Manifest, is_current
from prefill_operator.model import (
    ChildKind,
    CreatePod,
    Observed,
    ObservedChild,
    ObservedNode,
    ObservedPod,
    PodPhase,
    ReferenceNote,
)
from prefill_operator.names import EP_FLOOR_ANNOTATION, PodIdentity, pod_name
from prefill_operator.plan import PoolPlan, parse_floor, plan_pool
from prefill_operator.pod_reading import PodRecord
from prefill_operator.pool_memory import PoolMemory
from prefill_operator.references import judge_reference, referred_pool
from prefill_operator.render_objects import render_object
from prefill_operator.render_pod import render_pod
from prefill_operator.render_policy import RenderPolicy
from prefill_operator.resources import PoolKey
from prefill_plan.model_spec import ModelSpec

ChildName = tuple[ChildKind, str]

_NO_HPA = "this installation may not manage HorizontalPodAutoscalers (chart value rbac.autoscaling)"

MAX_PLANS = 128
"""Plans of different specs that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything a pass needs to decide and to act."""

    observed: Observed
    plan: PoolPlan
    children: Mapping[ChildName, Manifest]
    """What the pool's objects beside pods shall be now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """What follows from spec, floor and kinds of nodes alone. Kept per pool, since it costs more than the rest of a pass."""

    key: tuple[object, ...]
    plan: PoolPlan
    children: Mapping[ChildName, Manifest]
    faults: Mapping[ChildName, ObservedChild]
    """Children that cannot be rendered: they count as there and inactive, with the reason."""
    refusal: str
    """Why no pod can be rendered; "" if it can."""


class Observer:
    """model: the released model, as for plan_pool. clock: seconds since the epoch."""

    def __init__(
        self,
        cache: Cache,
        drains: Drains,
        engines: EngineWatch,
        *,
        policy: RenderPolicy,
        optional_kinds: frozenset[ChildKind],
        forbidden_kinds: frozenset[ChildKind],
        model: ModelSpec,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._drains = drains
        self._engines = engines
        self._policy = policy
        self._optional_kinds = optional_kinds
        self._forbidden_kinds = forbidden_kinds
        self._model = model
        self._clock = clock
        self._blueprints: dict[PoolKey, Blueprint] = {}
        self._plans: dict[tuple[object, ...], PoolPlan] = {}
        """Latest used last."""

    def observe(self, key: PoolKey, pool: Pool, memory: PoolMemory) -> View:
        resource = pool.spec.gpu.resource_name
        nodes = self._cache.nodes(resource)
        pods = [self._view_pod(pod, pool, resource) for pod in self._cache.pods(key)]
        names = {pod.name for pod in pods}
        pods += [replace(item.pod.observed, foreign=True) for name, item in memory.pods.items() if name not in names]
        blueprint = self._blueprint(key, pool, pods, nodes)
        observed = Observed(
            pool=pool,
            now=self._clock(),
            pods=tuple(pods),
            nodes=nodes,
            children=(*self._view_children(key, pool, memory, blueprint), *blueprint.faults.values()),
            optional_kinds=self._optional_kinds - {ChildKind.HPA},
            forbidden_kinds=self._forbidden_kinds,
            create_refusal=memory.create_refusal,
            write_refusals=tuple(memory.refusals.values()),
            config_refusal=blueprint.refusal,
            reference=self._judge_reference(pool),
            load=self._engines.pool_load(key),
        )
        return View(observed=observed, plan=blueprint.plan, children=blueprint.children)

    def forget(self, key: PoolKey) -> None:
        """The pool is gone."""
        self._blueprints.pop(key, None)

    def _judge_reference(self, pool: Pool) -> ReferenceNote | None:
        named = referred_pool(pool)
        record = None if named is None else self._cache.pool(named)
        if named is None or (record is not None and record.pool is None):
            return None  # a pool that is there but cannot be read says so itself
        return judge_reference(pool, named, None if record is None else record.pool)

    def _blueprint(
        self, key: PoolKey, pool: Pool, pods: list[ObservedPod], nodes: tuple[ObservedNode, ...] | None
    ) -> Blueprint:
        floor = pool.annotations.get(EP_FLOOR_ANNOTATION)
        kinds = None if nodes is None else frozenset((node.gpu_product, node.gpu_capacity) for node in nodes)
        held = self._blueprints.get(key)
        is_mixed = is_changing_size(pods, held.plan if held else None)
        name = (pool.uid, pool.generation, floor, kinds, is_mixed)
        if held is None or held.key != name:
            plan = self._plan(pool, floor, kinds, nodes)
            children, faults = self._render_children(pool, plan, freeze=is_changing_size(pods, plan))
            refusal = self._find_refusal(pool, plan)
            held = Blueprint(key=name, plan=plan, children=children, faults=faults, refusal=refusal)
            self._blueprints[key] = held
        return held

    def _plan(self, pool: Pool, floor: str | None, kinds: object, nodes: tuple[ObservedNode, ...] | None) -> PoolPlan:
        """plan_pool takes milliseconds, and pools of one cluster are often alike: equal specs are planned once."""
        spec = msgspec.structs.replace(pool.spec, replicas=0)
        name = (pool.kind, msgspec.json.encode(spec), floor, kinds)
        plan = self._plans.pop(name, None) or plan_pool(pool, floor=parse_floor(floor), nodes=nodes, model=self._model)
        self._plans[name] = plan
        if len(self._plans) > MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan

    def _view_pod(self, pod: PodRecord, pool: Pool, resource: str) -> ObservedPod:
        """With what depends on the pool and on this process."""
        drain = self._drains.state(pod.observed.uid) if pod.observed.draining_since is not None else None
        is_foreign = is_foreign_pod(pod, pool)
        gpus = pod.extended.get(resource, 0)
        backlog, load = self._engines.backlog_milliseconds(pod.observed.uid), self._engines.progress(pod.observed.uid)
        if not (drain or is_foreign or gpus or backlog is not None or load):
            return pod.observed
        return replace(
            pod.observed,
            gpus=gpus,
            foreign=is_foreign,
            load=load,
            backlog_milliseconds=backlog,
            drain_done=drain.done if drain else False,
            drain_unreachable_since=drain.unreachable_since if drain else None,
        )

    def _render_children(
        self, pool: Pool, plan: PoolPlan, *, freeze: bool
    ) -> tuple[dict[ChildName, Manifest], dict[ChildName, ObservedChild]]:
        wanted: dict[ChildName, Manifest] = {}
        faults: dict[ChildName, ObservedChild] = {}
        for kind, name in desired_children(read_intent(pool), plan, self._optional_kinds):
            if kind is ChildKind.HPA and kind not in self._optional_kinds:
                faults[kind, name] = ObservedChild(kind=kind, name=name, active=False, message=_NO_HPA)
                continue
            try:
                wanted[kind, name] = render_object(
                    kind, pool, plan, self._policy, model=self._model, freeze_scale_down=freeze
                )
            except PoolInvalid as fault:
                faults[kind, name] = ObservedChild(kind=kind, name=name, active=False, message=fault.message)
        return wanted, faults

    def _view_children(self, key: PoolKey, pool: Pool, memory: PoolMemory, blueprint: Blueprint) -> list[ObservedChild]:
        held = {(child.kind, child.name): child for child in self._cache.children(key)}
        for name, item in memory.children.items():
            held.setdefault(name, item.child)
        wanted = blueprint.children
        return [
            ObservedChild(
                kind=child.kind,
                name=child.name,
                current=name not in wanted or _is_current(wanted[name], child),
                foreign=child.controller_uid != pool.uid,
                active=child.active,
                message=child.message,
            )
            for name, child in sorted(held.items())
            if name not in blueprint.faults
        ]

    def _find_refusal(self, pool: Pool, plan: PoolPlan) -> str:
        """Why no pod of this pool can be rendered; "" if it can."""
        if not plan.feasible:
            return ""
        identity = PodIdentity(revision=plan.revision, incarnation=0)
        trial = CreatePod(name=pod_name(pool.kind, pool.name, identity), revision=plan.revision, incarnation=0)
        try:
            render_pod(pool, plan, trial, self._policy)
        except PoolInvalid as fault:
            return fault.message
        return ""


def is_foreign_pod(pod: PodRecord, pool: Pool) -> bool:
    """Ours are those that the pool controls, and those without a controller whose name and pool UID match (k8s.md 4.1)."""
    if not pod.observed.revision:
        return True
    if pod.controller_uid:
        return pod.controller_uid != pool.uid
    return pod.pool_uid != pool.uid


def is_changing_size(pods: list[ObservedPod], plan: PoolPlan | None) -> bool:
    """Pods of two sizes: capacity per pod differs, so that an autoscaler's sums mean little (k8s.md 4.5)."""
    ended = (PodPhase.FAILED, PodPhase.SUCCEEDED)
    live = [pod for pod in pods if not pod.foreign and pod.terminating_since is None and pod.phase not in ended]
    return plan is not None and plan.feasible and any(pod.ep != plan.ep for pod in live)


def _is_current(wanted: Manifest, child: ChildRecord) -> bool:
    return is_current(wanted, msgspec.json.decode(child.body))
