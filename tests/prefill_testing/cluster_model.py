"""A model of API server, scheduler and kubelets for one pool, driven by hand: what decide() meets, without a cluster.

Faithful where the planner's safety depends on it: names are unique, deletes and drains carry UIDs, Failed and unscheduled pods
vanish at once when deleted, others stay Terminating until their kubelet lets go, pods of a dead node stay for ever. Views are
snapshots, so a test can hand an old one to a second operator.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec

from prefill_operator.api import Pool
from prefill_operator.api_status import Condition
from prefill_operator.decide import decide
from prefill_operator.model import (
    Action,
    ChildKind,
    CreatePod,
    Decision,
    DeleteObject,
    DeletePod,
    EmitEvent,
    EnsureObject,
    Observed,
    ObservedChild,
    ObservedNode,
    ObservedPod,
    OperatorTimes,
    PodPhase,
    SetPoolAnnotation,
    StartDrain,
    Termination,
)
from prefill_operator.names import EP_FLOOR_ANNOTATION
from prefill_operator.plan import PoolPlan, parse_floor, plan_pool
from prefill_plan.model_spec import ModelSpec, released_model_spec

TIMES = OperatorTimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """One write that took effect."""

    at: float
    action: Action
    serving: int
    """Pods Ready and not draining, after it."""


@dataclass(slots=True, kw_only=True)
class NodeModel:
    gpus: int = 8
    alive: bool = True
    down_since: float = 0.0
    ready_changed_at: float = 0.0
    cordoned: bool = False
    maintenance: str = ""
    fault: str = ""
    refuses: bool = False
    """The kubelet refuses pods: UnexpectedAdmissionError."""


@dataclass(slots=True, kw_only=True)
class ClusterModel:
    """One pool and its nodes. `load_seconds` is schedule to Ready; drains and deletions take `drain_seconds` each."""

    pool: Pool
    nodes: dict[str, NodeModel]
    now: float = 1_000_000.0
    load_seconds: float = 100.0
    drain_seconds: float = 5.0
    detect_seconds: float = 5.0
    """From a node's death to Ready = Unknown."""
    oom_below_ep: int = 0
    """Engines with a smaller EP end with exit 12 instead of becoming Ready."""
    failing_exit: int | None = None
    """Every engine ends with this code instead of becoming Ready."""
    failing_revisions: frozenset[str] = frozenset()
    """If not empty, only engines of these revisions fail."""
    watches_nodes: bool = True
    pods: dict[str, ObservedPod] = field(default_factory=dict)
    children: dict[tuple[ChildKind, str], ObservedChild] = field(default_factory=dict)
    log: list[Applied] = field(default_factory=list)
    events: list[EmitEvent] = field(default_factory=list)
    conflicts: int = 0
    model: ModelSpec = field(default_factory=released_model_spec)
    last: Decision | None = None
    _next_uid: int = 0

    # What the operator sees and does.

    def plan(self, view: Observed | None = None) -> PoolPlan:
        pool = view.pool if view else self.pool
        floor = parse_floor(pool.annotations.get(EP_FLOOR_ANNOTATION))
        return plan_pool(pool, floor=floor, nodes=None, model=self.model)

    def observe(self) -> Observed:
        return Observed(
            pool=self.pool,
            now=self.now,
            pods=tuple(self.pods.values()),
            nodes=tuple(self._observe_nodes()) if self.watches_nodes else None,
            children=tuple(self.children.values()),
        )

    def run_pass(self, view: Observed | None = None, *, times: OperatorTimes = TIMES) -> Decision:
        """One reconcile pass on a view, the present one if none is given."""
        seen = view or self.observe()
        plan = self.plan(seen)
        decision = decide(seen, plan, times)
        for action in decision.actions:
            self.apply(action, plan)
        self.pool = replace(self.pool, status=decision.status)
        self.last = decision
        return decision

    def apply(self, action: Action, plan: PoolPlan) -> None:
        before = self.conflicts
        match action:
            case CreatePod():
                self._create(action, plan)
            case StartDrain(name=name, uid=uid):
                if self._holds(name, uid) and self.pods[name].draining_since is None:
                    self.change(name, draining_since=self.now)
            case DeletePod(name=name, uid=uid):
                if self._holds(name, uid):
                    self.delete_pod(name)
            case SetPoolAnnotation(key=key, value=value):
                self.pool = replace(self.pool, annotations={**self.pool.annotations, key: value})
            case EnsureObject(kind=kind, name=name):
                self.children[kind, name] = ObservedChild(kind=kind, name=name)
            case DeleteObject(kind=kind, name=name):
                self.children.pop((kind, name), None)
            case EmitEvent():
                self.events.append(action)
        if self.conflicts == before:
            self.log.append(Applied(at=self.now, action=action, serving=self.num_serving))

    def settle(self, *, limit: int = 400, times: OperatorTimes = TIMES) -> int:
        """Passes and time until nothing is left to do and nothing moves; the number of passes.

        Raises:
            AssertionError: still acting after `limit` passes.
        """
        self.advance(0.0)
        for count in range(limit):
            decision = self.run_pass(times=times)
            if decision.actions:
                # Writes come back as events at once.
                self.advance(0.0)
                continue
            due = self.next_change()
            wakeup = decision.next_wakeup
            if due is None and (wakeup is None or wakeup > self.now + 7200):
                return count
            self.advance(max(0.5, min(t for t in (due, wakeup) if t is not None) - self.now))
        raise AssertionError(f"not settled after {limit} passes: {self.last and self.last.reasons}")

    def story(self, *, since: int = 0) -> list[str]:
        """What was done to pods, by incarnation: "create 5", "drain 1 OldRevision", "delete 1 Drained"."""
        lines = []
        for applied in self.log[since:]:
            match applied.action:
                case CreatePod(incarnation=number):
                    lines.append(f"create {number}")
                case StartDrain(name=name, reason=reason):
                    lines.append(f"drain {name.rpartition('-')[2]} {reason}")
                case DeletePod(name=name, reason=reason):
                    lines.append(f"delete {name.rpartition('-')[2]} {reason}")
        return lines

    # What users and the world do.

    def edit(self, **changes: object) -> None:
        """Replaces top-level fields of the spec; a new generation."""
        spec = msgspec.structs.replace(self.pool.spec, **changes)
        self.pool = replace(self.pool, spec=spec, generation=self.pool.generation + 1)

    def delete_pod(self, name: str) -> None:
        pod = self.pods[name]
        if not pod.node or pod.phase is PodPhase.FAILED:
            del self.pods[name]
        elif pod.terminating_since is None:
            self.change(name, terminating_since=self.now)

    def crash(self, name: str, exit_code: int, *, reason: str = "Error") -> None:
        """The engine ends; it starts again and loads."""
        pod = self.pods[name]
        end = Termination(
            at=self.now,
            exit_code=exit_code,
            restart_count=pod.restart_count,
            reason=reason,
            code="CudaOom" if exit_code in (12, 13) else "",
            plan_hash=pod.plan_hash,
        )
        self.change(name, ready=False, ready_changed_at=self.now, termination=end, restart_count=pod.restart_count + 1)

    def kill_node(self, name: str) -> None:
        self.nodes[name].alive = False
        self.nodes[name].down_since = self.now

    def revive_node(self, name: str) -> None:
        node = self.nodes[name]
        node.alive, node.ready_changed_at = True, self.now

    def advance(self, seconds: float) -> None:
        """Lets time pass in steps no longer than what anything takes."""
        end = self.now + seconds
        self._tick()
        while self.now < end:
            due = self.next_change()
            self.now = min(end, due) if due is not None and due > self.now else end
            self._tick()

    def condition(self, kind: str) -> Condition:
        """Of the last status."""
        return next(item for item in self.pool.status.conditions if item.type == kind)

    def name_of(self, incarnation: int) -> str:
        return next(pod.name for pod in self.pods.values() if pod.incarnation == incarnation)

    @property
    def serving(self) -> list[ObservedPod]:
        return [pod for pod in self.pods.values() if self._serves(pod)]

    @property
    def num_serving(self) -> int:
        return len(self.serving)

    @property
    def holders(self) -> list[ObservedPod]:
        """Pods that hold GPUs or will: not Failed, not on a dead node nor left over from when it was."""
        return [
            pod
            for pod in self.pods.values()
            if pod.phase is not PodPhase.FAILED and not pod.foreign and not self._is_left_over(pod)
        ]

    # The machinery.

    def _is_left_over(self, pod: ObservedPod) -> bool:
        if not pod.node or self._is_down(pod.node):
            return bool(pod.node)
        return pod.terminating_since is not None and self.nodes[pod.node].ready_changed_at >= pod.terminating_since

    def _serves(self, pod: ObservedPod) -> bool:
        return pod.ready and pod.terminating_since is None and pod.draining_since is None

    def _holds(self, name: str, uid: str) -> bool:
        found = name in self.pods and self.pods[name].uid == uid
        self.conflicts += not found
        return found

    def change(self, name: str, **changes: object) -> None:
        """Sets fields of a pod as its kubelet would report them."""
        self.pods[name] = replace(self.pods[name], **changes)

    def _create(self, action: CreatePod, plan: PoolPlan) -> None:
        if action.name in self.pods:
            self.conflicts += 1
            return
        self._next_uid += 1
        self.pods[action.name] = ObservedPod(
            name=action.name,
            uid=f"uid-{self._next_uid}",
            revision=action.revision,
            incarnation=action.incarnation,
            ep=plan.ep,
            gpus=plan.gpus,
            created_at=self.now,
            plan_hash=plan.hash,
            avoid_nodes=action.avoid_nodes,
        )

    def _observe_nodes(self) -> Iterator[ObservedNode]:
        for name, node in self.nodes.items():
            down = self._is_down(name)
            yield ObservedNode(
                name=name,
                ready=not down,
                ready_changed_at=node.down_since + self.detect_seconds if down else node.ready_changed_at,
                cordoned=node.cordoned,
                maintenance_taint=node.maintenance,
                gpu_fault=node.fault,
                gpu_capacity=node.gpus,
                gpu_allocatable=node.gpus,
                gpu_free=self._free(name),
            )

    def _is_down(self, name: str) -> bool:
        node = self.nodes.get(name)
        return node is None or (not node.alive and self.now >= node.down_since + self.detect_seconds)

    def _free(self, name: str) -> int:
        used = sum(p.gpus for p in self.pods.values() if p.node == name and p.phase is not PodPhase.FAILED)
        return self.nodes[name].gpus - used

    def _tick(self) -> None:
        """Everything that is due now."""
        for name in list(self.pods):
            pod = self.pods[name]
            if pod.node and pod.node not in self.nodes:
                del self.pods[name]
            elif pod.node and self._is_down(pod.node):
                if pod.ready:
                    self.change(name, ready=False, ready_changed_at=self.now)
            elif pod.terminating_since is not None:
                if self.now >= pod.terminating_since + self.drain_seconds and self.nodes[pod.node].alive:
                    del self.pods[name]
            elif pod.draining_since is not None:
                if self.now >= pod.draining_since + self.drain_seconds:
                    self.change(name, drain_done=True)
            elif self._is_starting(pod) and self.now >= self._ready_at(pod):
                self._start(pod)
        for name in [name for name, pod in self.pods.items() if not pod.node]:
            self._schedule(name)

    def _start(self, pod: ObservedPod) -> None:
        if not self.nodes[pod.node].alive:
            return
        fails = not self.failing_revisions or pod.revision in self.failing_revisions
        if pod.ep < self.oom_below_ep:
            self.crash(pod.name, 12)
        elif self.failing_exit is not None and fails:
            self.crash(pod.name, self.failing_exit)
        else:
            self.change(pod.name, ready=True, ready_changed_at=self.now, phase=PodPhase.RUNNING)

    def _is_starting(self, pod: ObservedPod) -> bool:
        is_running = pod.node and pod.phase is not PodPhase.FAILED and not pod.waiting_reason
        return bool(is_running) and not pod.ready and pod.draining_since is None

    def _ready_at(self, pod: ObservedPod) -> float:
        last_end = pod.termination.at if pod.termination else 0.0
        since = max(pod.scheduled_at or self.now, last_end)
        # A node that came back shows Ready again a moment later.
        return since + self.load_seconds if not pod.ready_changed_at or pod.termination else since

    def _schedule(self, name: str) -> None:
        pod = self.pods[name]
        fitting = [
            node
            for node, state in self.nodes.items()
            if not state.cordoned
            and not state.maintenance
            and not self._is_down(node)
            and node not in pod.avoid_nodes
            and self._free(node) >= pod.gpus
        ]
        if not fitting:
            if pod.unschedulable_since is None:
                self.change(name, unschedulable_since=self.now, unschedulable_message="no node fits")
            return
        node = min(fitting, key=lambda node: (self._free(node), node))
        if self.nodes[node].refuses:
            self.change(
                name,
                node=node,
                phase=PodPhase.FAILED,
                failed_reason="UnexpectedAdmissionError",
                failed_at=self.now,
                scheduled_at=self.now,
            )
            return
        self.change(name, node=node, scheduled_at=self.now, unschedulable_since=None, unschedulable_message="")

    def next_change(self) -> float | None:
        """When something will happen by itself, later than now."""
        due = []
        for pod in self.pods.values():
            if not pod.node or pod.phase is PodPhase.FAILED or not self.nodes[pod.node].alive:
                continue
            if pod.terminating_since is not None:
                due.append(pod.terminating_since + self.drain_seconds)
            elif pod.draining_since is not None and not pod.drain_done:
                due.append(pod.draining_since + self.drain_seconds)
            elif self._is_starting(pod):
                due.append(self._ready_at(pod))
        due += [
            node.down_since + self.detect_seconds
            for node in self.nodes.values()
            if not node.alive and self.now < node.down_since + self.detect_seconds
        ]
        later = [time for time in due if time > self.now]
        return min(later, default=None)


def settled_cluster(pool: Pool, *, num_nodes: int = 4, watches_nodes: bool = True) -> ClusterModel:
    """A cluster in which the pool has come up; nodes gpu-0 and up of 8 GPUs, filled one after the other."""
    nodes = {f"gpu-{index}": NodeModel() for index in range(num_nodes)}
    cluster = ClusterModel(pool=pool, nodes=nodes, watches_nodes=watches_nodes)
    cluster.settle()
    return cluster
