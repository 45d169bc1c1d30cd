"""Layer 2 of k8s.md 7.1: random histories of one pool in a model cluster, and what must hold in all of them."""

from dataclasses import replace

import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefill_operator.api_parts import LifecycleSpec, RolloutSpec
from prefill_operator.model import CreatePod, DeletePod, Observed, PodPhase, StartDrain
from prefill_operator.names import ConditionType
from prefill_operator.plan import parse_floor
from prefill_operator.pool_api import ExpertParallelSpec, PrefillPoolSpec, QuotaSpec, RedundancySpec
from prefill_testing.cluster_model import Applied, ClusterModel, NodeModel
from prefill_testing.planner_pools import ENGINE_A, ENGINE_B, ENGINE_C, make_pool, make_spec

NUM_NODES = 8
LOAD_CAP = 3
MAX_PES = 6
ENGINES = (ENGINE_A, ENGINE_B, ENGINE_C)


BAD_REASONS: dict[str, set[str]] = {
    "Ready": {"RolloutInProgress", "NotEnoughReady", "PlanInfeasible"},
    "Available": {"BelowMinimum"},
    "Redundant": {"SparesLoading", "SparesUnschedulable", "CappedByQuota", "CappedByMaxSpares"},
    "Progressing": {"DeadlineExceeded", "NoRoom", "NoRoomForLargerEP", "QuotaExceeded", "PlanInfeasible", "Stalled"},
    "PlanFeasible": {"NoEPFits"},
    "AutoscalingActive": {"Disabled"},
    "Stalled": {"NotStalled"},
    "Paused": {"NotPaused"},
}
"""Reasons that go with False; every other reason goes with True (k8s.md 2.7: "Available=False: all replicas are ready")."""


class PoolHistory(RuleBasedStateMachine):
    """Operators, users and the world take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.is_created = False

    @initialize(
        replicas=st.integers(0, 5),
        spares=st.integers(0, 2),
        surge=st.integers(0, 3),
        unavailable=st.integers(0, 3),
        load_cap=st.sampled_from([0, LOAD_CAP]),
    )
    def create_pool(self, replicas: int, spares: int, surge: int, unavailable: int, load_cap: int) -> None:
        spec = make_spec(
            replicas=replicas,
            ep=ExpertParallelSpec(min=2, max=8),
            rollout=RolloutSpec(
                max_surge=max(surge, int(unavailable == 0)), max_unavailable=unavailable, min_ready_seconds=10
            ),
            quota=QuotaSpec(max_pes=MAX_PES, redundancy=RedundancySpec(spares=spares)),
            lifecycle=LifecycleSpec(max_concurrent_loads=load_cap, max_concurrent_drains=2),
        )
        self.cluster = ClusterModel(
            pool=make_pool(spec), nodes={f"gpu-{index}": NodeModel() for index in range(NUM_NODES)}
        )
        self.views: list[Observed] = []
        self.is_created = True

    @property
    def spec(self) -> PrefillPoolSpec:
        spec = self.cluster.pool.spec
        assert isinstance(spec, PrefillPoolSpec)
        return spec

    # Operators.

    @rule()
    def reconcile(self) -> None:
        self._reconcile(self.cluster.observe())

    @rule(passes=st.integers(2, 6), seconds=st.floats(1, 150))
    def reconcile_for_a_while(self, passes: int, seconds: float) -> None:
        for _ in range(passes):
            self._reconcile(self.cluster.observe())
            self.cluster.advance(seconds)

    @precondition(lambda self: self.views)
    @rule(lag=st.integers(1, 3))
    def second_operator_with_old_view(self, lag: int) -> None:
        """A stopped leader goes on, with what it saw some passes ago and the clock of today.

        One case cannot collide and is left to the Lease: a name that was taken and is free again since that view.
        """
        view = replace(self.views[-min(lag, len(self.views))], now=self.cluster.now)
        known = {pod.name for pod in view.pods}
        taken = {a.action.name for a in self.cluster.log if isinstance(a.action, CreatePod)}
        if taken - known - set(self.cluster.pods):
            return
        self._reconcile(view, is_stale=True)

    @rule()
    def two_operators_with_one_view(self) -> None:
        """Whatever is decided twice collides."""
        view = self.cluster.observe()
        self._reconcile(view)
        before = len(self.cluster.log)
        self.cluster.run_pass(view)
        doubled = [
            a.action for a in self.cluster.log[before:] if isinstance(a.action, CreatePod | StartDrain | DeletePod)
        ]
        # A drain or delete of the same pod again changes nothing.
        assert not any(isinstance(action, CreatePod) for action in doubled)
        first = {a.action.uid for a in self.cluster.log[:before] if isinstance(a.action, StartDrain | DeletePod)}
        assert {action.uid for action in doubled if isinstance(action, StartDrain | DeletePod)} <= first

    def _reconcile(self, view: Observed, *, is_stale: bool = False) -> None:
        before = len(self.cluster.log)
        revision = self.cluster.plan(view).revision
        if not is_stale:
            self.views = [*self.views[-3:], view]
        decision = self.cluster.run_pass(view)
        assert decision.status.replicas <= view.pool.spec.replicas
        done = self.cluster.log[before:]
        created = [applied.action for applied in done if isinstance(applied.action, CreatePod)]
        assert all(action.revision == revision for action in created)
        if not is_stale:
            self._check_drains(view, done)
            self._check_deletes(view, done)
            self._check_load_cap(created)
            if created:
                self._check_surge(view)

    def _check_drains(self, view: Observed, done: list[Applied]) -> None:
        """Our own drains never take the pool below W - maxUnavailable; a node about to go is not our doing."""
        floor = self._total(view) - self.spec.rollout.max_unavailable
        for applied in done:
            if isinstance(applied.action, StartDrain) and applied.action.reason not in ("NodeMaintenance", "LargerEP"):
                assert applied.serving >= floor, (applied, floor)

    def _check_deletes(self, view: Observed, done: list[Applied]) -> None:
        """A PE that serves is drained, never just deleted."""
        serving = {p.name for p in view.pods if p.ready and p.draining_since is None and p.terminating_since is None}
        lost = {pod.name for pod in view.pods if pod.node and not self.cluster.nodes[pod.node].alive}
        deleted = {applied.action.name for applied in done if isinstance(applied.action, DeletePod)}
        assert deleted & serving <= lost

    def _check_surge(self, view: Observed) -> None:
        """Without anything that forces pods out, no more than W + maxSurge live beside those that leave anyway."""
        nodes = self.cluster.nodes.values()
        is_forced = any(node.cordoned or node.maintenance or node.fault or not node.alive for node in nodes)
        ends = {pod.termination.exit_code for pod in view.pods if pod.termination}
        if is_forced or ends & {12, 13, 14}:
            return
        revision = self.cluster.plan(view).revision
        live = [pod for pod in self.cluster.pods.values() if not pod.terminating_since and pod.phase != PodPhase.FAILED]
        leaving = [pod for pod in live if pod.draining_since is not None and pod.revision == revision]
        assert len(live) - len(leaving) <= self._total(view) + self.spec.rollout.max_surge

    def _check_load_cap(self, created: list[CreatePod]) -> None:
        cap = self.spec.lifecycle.max_concurrent_loads
        if created and cap:
            loading = [
                pod
                for pod in self.cluster.pods.values()
                if not pod.ready
                and not pod.terminating_since
                and not pod.draining_since
                and pod.phase is not PodPhase.FAILED
                and pod.termination is None
                and pod.ready_changed_at is None
                and not (pod.node and not self.cluster.nodes[pod.node].alive)
            ]
            assert len(loading) <= cap

    def _total(self, view: Observed) -> int:
        spec = view.pool.spec
        assert isinstance(spec, PrefillPoolSpec)
        spares = spec.quota.redundancy.spares if spec.replicas else 0
        return min(spec.replicas + spares, spec.quota.max_pes or MAX_PES)

    # The world.

    @rule(seconds=st.floats(0.5, 900))
    def time_passes(self, seconds: float) -> None:
        self.cluster.advance(seconds)

    @rule(index=st.integers(0, 20), exit_code=st.sampled_from([1, 10, 13, 14, 16, 137]))
    def engine_ends(self, index: int, exit_code: int) -> None:
        running = [pod for pod in self.cluster.serving if pod.node and self.cluster.nodes[pod.node].alive]
        if running:
            self.cluster.crash(running[index % len(running)].name, exit_code)

    @rule(index=st.integers(0, NUM_NODES - 1))
    def node_dies_or_returns(self, index: int) -> None:
        name = f"gpu-{index}"
        if self.cluster.nodes[name].alive:
            self.cluster.kill_node(name)
        else:
            self.cluster.revive_node(name)

    @rule(index=st.integers(0, NUM_NODES - 1), what=st.sampled_from(["cordon", "maintenance", "fault", "refuses"]))
    def node_changes(self, index: int, what: str) -> None:
        node = self.cluster.nodes[f"gpu-{index}"]
        match what:
            case "cordon":
                node.cordoned = not node.cordoned
            case "maintenance":
                node.maintenance = "" if node.maintenance else "maintenance"
            case "fault":
                node.fault = "" if node.fault else "Xid 79"
            case _:
                node.refuses = not node.refuses

    @rule(exit_code=st.sampled_from([None, None, 1, 10, 14]), below_ep=st.sampled_from([0, 0, 4]))
    def engines_turn_bad(self, exit_code: int | None, below_ep: int) -> None:
        self.cluster.failing_exit = exit_code
        self.cluster.failing_revisions = frozenset({self.cluster.plan().revision}) if exit_code else frozenset()
        self.cluster.oom_below_ep = below_ep

    # Users.

    @rule(engine=st.sampled_from(ENGINES))
    def user_changes_image(self, engine: object) -> None:
        self.cluster.edit(engine=engine)

    @rule(replicas=st.integers(0, 6))
    def user_scales(self, replicas: int) -> None:
        revision = self.cluster.plan().revision
        self.cluster.edit(replicas=replicas)
        assert self.cluster.plan().revision == revision

    @rule(surge=st.integers(0, 3), unavailable=st.integers(0, 3))
    def user_changes_rollout(self, surge: int, unavailable: int) -> None:
        rollout = RolloutSpec(max_surge=max(surge, int(unavailable == 0)), max_unavailable=unavailable)
        self.cluster.edit(rollout=rollout)

    @rule(paused=st.booleans())
    def user_pauses(self, paused: bool) -> None:
        self.cluster.edit(paused=paused)

    @rule(index=st.integers(0, 20))
    def user_deletes_pod(self, index: int) -> None:
        names = sorted(self.cluster.pods)
        if names:
            self.cluster.delete_pod(names[index % len(names)])

    # What holds at all times.

    @invariant()
    def quota_holds(self) -> None:
        assert len(self.cluster.holders) <= MAX_PES

    @invariant()
    def status_is_whole(self) -> None:
        if self.cluster.last:
            types = [condition.type for condition in self.cluster.last.status.conditions]
            assert types == list(ConditionType)

    @invariant()
    def reasons_say_what_their_conditions_say(self) -> None:
        for condition in self.cluster.last.status.conditions if self.cluster.last else ():
            assert (condition.status == "False") == (condition.reason in BAD_REASONS[condition.type]), condition

    def teardown(self) -> None:
        """Without new faults every history converges, and a second pass finds nothing to do."""
        if not self.is_created:
            return
        for name, node in self.cluster.nodes.items():
            if not node.alive:
                self.cluster.revive_node(name)
            node.cordoned, node.maintenance, node.fault, node.refuses = False, "", "", False
        self.cluster.failing_exit, self.cluster.oom_below_ep = None, 0
        # With quota equal to W a rollout by surge could not go on, which is the user's choice.
        quota = msgspec.structs.replace(self.spec.quota, max_pes=3 * MAX_PES)
        self.cluster.edit(paused=False, quota=quota)
        self.cluster.settle()
        total = self._total(self.cluster.observe())
        plan = self.cluster.plan()
        assert len(self.cluster.pods) == total, (self.cluster.pods.keys(), self.cluster.last)
        assert {pod.revision for pod in self.cluster.pods.values()} <= {plan.revision}
        assert self.cluster.num_serving == total
        assert self.cluster.run_pass().actions == ()
        states = {condition.type: condition.status for condition in self.cluster.pool.status.conditions}
        assert states["Ready"] == states["Available"] == states["Progressing"] == "True"
        floor = parse_floor(self.cluster.pool.annotations.get("prefill.dev/ep-floor"))
        assert floor is None or plan.ep >= min(floor.ep, 8)


PoolHistory.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
TestPoolHistory = PoolHistory.TestCase
