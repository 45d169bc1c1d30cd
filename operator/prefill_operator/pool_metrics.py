"""Metrics of pools (k8s.md 4.14): what their status says, and what their passes did. A pool's series go with the pool.

Labels never name pods. Counters begin at zero with the process; what only the ledger remembers is counted once, when the
ledger first holds it.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from prefill_operator.api import Pool
from prefill_operator.api_parts import Actuator
from prefill_operator.api_status import ConditionStatus, PoolStatus, VEPoolStatus
from prefill_operator.ledger import Ledger, parse_ledger
from prefill_operator.model import Action, DeletePod, ObservedPod, SetPoolAnnotation, seconds_since
from prefill_operator.names import EP_FLOOR_ANNOTATION, LEDGER_ANNOTATION, ConditionType
from prefill_operator.resources import PoolKey

_POOL = ("kind", "namespace", "pool")
_LOAD_SECONDS = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0)
_DRAIN_SECONDS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


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
        self._failures = counter("prefill_pool_pe_failures", "Pods replaced because of a failure")
        self._shown: dict[PoolKey, tuple[int, PoolStatus | VEPoolStatus]] = {}
        """What the series of a pool say now: replicas and status."""

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
        if status.redundancy.expected_availability is not None:
            self._availability.labels(*labels).set(float(status.redundancy.expected_availability))
        for condition in shown[1].conditions if shown else ():
            self._conditions.remove(*labels, condition.type, condition.status)
        for condition in status.conditions:
            self._conditions.labels(*labels, condition.type, condition.status).set(1)

    def count_actions(
        self, key: PoolKey, pool: Pool, actions: Iterable[Action], *, pods: Iterable[ObservedPod], now: float
    ) -> None:
        """What a pass that went well did."""
        draining = {pod.uid: pod.draining_since for pod in pods if pod.draining_since is not None}
        for action in actions:
            match action:
                case DeletePod() if action.uid in draining:
                    self._drains.labels(*_labels(key)).observe(seconds_since(draining[action.uid], now))
                    self._late.labels(*_labels(key)).inc(action.reason == "DrainTimeout")
                case SetPoolAnnotation(key=name) if name == EP_FLOOR_ANNOTATION:
                    self._escalations.labels(*_labels(key)).inc()
                case SetPoolAnnotation(key=name) if name == LEDGER_ANNOTATION:
                    before = parse_ledger(pool.annotations.get(LEDGER_ANNOTATION))
                    self._count_ledger(key, before, parse_ledger(action.value))

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
        for metric in (self._ep, self._gpus, self._autoscaling, self._availability, self._loads, self._drains):
            metric.remove(*labels)
        for counter in (self._late, self._escalations, self._failures):
            counter.remove(*labels)

    def _count_ledger(self, key: PoolKey, before: Ledger, after: Ledger) -> None:
        for load in set(after.loads) - set(before.loads):
            self._loads.labels(*_labels(key)).observe(load.seconds)
        replaced = {row.pod for row in after.replaced} - {row.pod for row in before.replaced}
        self._failures.labels(*_labels(key)).inc(len(replaced))


def _labels(key: PoolKey) -> tuple[str, str, str]:
    return str(key.kind), key.namespace, key.name
