"""Metrics of pools (k8s.md 4.14): what their status says, and what their passes did. A pool's series go with the pool.

Labels never name pods. Counters begin at zero with the process. Loads and ends of engines are counted as this process sees them
happen: what a pod shows already in the first pass over its pool has been counted by another process, or by none.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from prefill_operator.api import Pool
from prefill_operator.api_parts import Actuator
from prefill_operator.api_status import ConditionStatus, PoolStatus, VEPoolStatus
from prefill_operator.failures import PodState
from prefill_operator.ledger import load_of, longest_load
from prefill_operator.model import Action, DeletePod, ObservedPod, SetPoolAnnotation, StartDrain, seconds_since
from prefill_operator.names import EP_FLOOR_ANNOTATION, ConditionType
from prefill_operator.resources import PoolKey

_POOL = ("kind", "namespace", "pool")
_LOAD_SECONDS = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0)
_DRAIN_SECONDS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_FAILED_STATES = frozenset(
    {PodState.FAILED, PodState.LOST, PodState.CRASH_LOOP, PodState.GPU_FAULT, PodState.OUT_OF_MEMORY}
)
"""A pod that goes for one of these has failed; one on a cordoned node has not."""
_SAME_FAILURE_SECONDS = 1800.0
"""A pod that goes so soon after its engine ended goes because of that end, which is counted."""


@dataclass(slots=True)
class _PodCount:
    """What has been counted of a pod."""

    ends: int = 0
    """Of its engine."""
    was_ready: bool = False
    is_failed: bool = False


class PoolMetrics:
    """All series have the labels kind, namespace and pool."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"prefill_pool_{name}", text, [*_POOL, *labels], registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, _POOL, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"prefill_pool_{name}", text, _POOL, registry=registry, buckets=buckets)

        self._pods = gauge("pes", "Pods by state", "state")
        self._desired = gauge("desired", "Pods wanted", "part")
        self._ep = gauge("ep", "Expert-parallel size of new pods")
        self._gpus = gauge("gpus", "GPUs that the pool's pods hold")
        self._conditions = gauge("condition", "1; one series per type, with the status that holds", "type", "status")
        self._autoscaling = gauge("autoscaling", "1 while an HPA or ScaledObject shall set the replicas")
        self._availability = gauge("expected_availability", "Share of time with all replicas ready")
        self._loads = histogram("load_seconds", "From scheduled to first Ready", _LOAD_SECONDS)
        self._drains = histogram("drain_seconds", "From the start of a drain to the deletion", _DRAIN_SECONDS)
        self._late = counter("prefill_drain_deadline_exceeded", "Drains that their deadline cut short")
        self._escalations = counter("prefill_pool_ep_escalations", "Times that the EP was raised")
        self._failures = counter(
            "prefill_pool_pe_failures", "Ends of engines that no drain wanted, and PEs lost otherwise"
        )
        self._shown: dict[PoolKey, tuple[int, PoolStatus | VEPoolStatus]] = {}
        """What the series of a pool say now: replicas and status."""
        self._counts: dict[PoolKey, dict[str, _PodCount]] = {}
        """By UID, of the pods that exist."""

    def set_status(self, key: PoolKey, pool: Pool, status: PoolStatus | VEPoolStatus) -> None:
        """What the pool is now."""
        shown = self._shown.get(key)
        if shown == (pool.spec.replicas, status):
            return
        self._shown[key] = (pool.spec.replicas, status)
        labels = _labels(key)
        if isinstance(status, PoolStatus):
            live, ready, loading, draining = status.total_pes, status.ready_pes, status.loading_pes, status.draining_pes
            self._ep.labels(*labels).set(status.plan.ep if status.plan else 0)
        else:
            live, ready, loading, draining = status.total_ves, status.ready_ves, status.loading_ves, status.draining_ves
        broken = max(0, live - ready - loading)
        for state, count in (("ready", ready), ("loading", loading), ("draining", draining), ("broken", broken)):
            self._pods.labels(*labels, state).set(count)
        self._desired.labels(*labels, "capacity").set(pool.spec.replicas)
        self._desired.labels(*labels, "spares").set(status.redundancy.desired)
        self._gpus.labels(*labels).set(status.gpus)
        autoscaling = pool.spec.autoscaling
        self._autoscaling.labels(*labels).set(autoscaling is not None and autoscaling.actuator is not Actuator.EXTERNAL)
        if status.redundancy.expected_availability is None:
            self._availability.remove(*labels)
        else:
            self._availability.labels(*labels).set(float(status.redundancy.expected_availability))
        for condition in shown[1].conditions if shown else ():
            self._conditions.remove(*labels, condition.type, condition.status)
        for condition in status.conditions:
            self._conditions.labels(*labels, condition.type, condition.status).set(1)

    def note_pods(self, key: PoolKey, pool: Pool, pods: Iterable[ObservedPod]) -> None:
        """Counts what the pods show since the last call: loads, and ends of engines."""
        labels = _labels(key)
        before = self._counts.get(key)
        known = before or {}
        counts = {pod.uid: known.get(pod.uid) or _PodCount() for pod in pods if not pod.foreign}
        self._counts[key] = counts
        max_load = longest_load(pool.spec.lifecycle.load_timeout_seconds)
        num_ends = 0
        for pod in pods:
            if (count := counts.get(pod.uid)) is None:
                continue
            load = None if count.was_ready else load_of(pod, max_load)
            if load is not None and before is not None:
                self._loads.labels(*labels).observe(load.seconds)
            count.was_ready |= pod.ready
            ends = max(count.ends, _num_ends(pod))
            num_ends += ends - count.ends
            count.ends = ends
        # By zero as well, so that the first failure is an increase.
        self._failures.labels(*labels).inc(num_ends if before is not None else 0)

    def count_actions(
        self, key: PoolKey, actions: Iterable[Action], *, pods: Iterable[ObservedPod], now: float
    ) -> None:
        """What a pass did: those of its actions that are done. After note_pods."""
        known = {pod.uid: pod for pod in pods}
        for action in actions:
            match action:
                case DeletePod() | StartDrain() if (pod := known.get(action.uid)) is not None:
                    if isinstance(action, DeletePod) and pod.draining_since is not None:
                        self._drains.labels(*_labels(key)).observe(seconds_since(pod.draining_since, now))
                        self._late.labels(*_labels(key)).inc(action.reason == "DrainTimeout")
                    self._count_failure(key, pod, action.reason, now)
                case SetPoolAnnotation(key=name) if name == EP_FLOOR_ANNOTATION:
                    self._escalations.labels(*_labels(key)).inc()

    def forget(self, key: PoolKey) -> None:
        """The pool is gone."""
        labels = _labels(key)
        for state in ("ready", "loading", "draining", "broken"):
            self._pods.remove(*labels, state)
        for part in ("capacity", "spares"):
            self._desired.remove(*labels, part)
        for kind in ConditionType:
            for word in ConditionStatus:
                self._conditions.remove(*labels, kind, word)
        self._shown.pop(key, None)
        self._counts.pop(key, None)
        for metric in (self._ep, self._gpus, self._autoscaling, self._availability, self._loads, self._drains):
            metric.remove(*labels)
        for counter in (self._late, self._escalations, self._failures):
            counter.remove(*labels)

    def _count_failure(self, key: PoolKey, pod: ObservedPod, reason: str, now: float) -> None:
        """Once per pod that goes because it failed, unless its engine's end has been counted."""
        count = self._counts.get(key, {}).get(pod.uid)
        if count is None or count.is_failed or reason not in _FAILED_STATES:
            return
        end = pod.termination
        is_counted = end is not None and seconds_since(end.at, now) < _SAME_FAILURE_SECONDS
        # A pod that the kubelet refused never was a PE.
        is_refused = reason == PodState.FAILED and not count.was_ready
        count.is_failed = True
        if not is_counted and not is_refused:
            self._failures.labels(*_labels(key)).inc()


def _num_ends(pod: ObservedPod) -> int:
    """How often its engine has ended by itself; what ends while the pod goes, ends because of us."""
    if pod.termination is None or pod.terminating_since is not None or pod.draining_since is not None:
        return 0
    return pod.termination.restart_count + 1


def _labels(key: PoolKey) -> tuple[str, str, str]:
    return str(key.kind), key.namespace, key.name
