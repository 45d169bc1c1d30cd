"""Metrics of the operator itself (k8s.md 4.14); those of its pools are in pool_metrics.py. Both share one registry."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.process_collector import ProcessCollector

from prefill_operator.names import Kind

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class OperatorMetrics:
    """One registry per process, so that tests have one each."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        reg = self.registry
        ProcessCollector(registry=reg)
        self._reconcile = Histogram(
            "prefill_operator_reconcile_seconds", "One pass over one pool", ["kind"], registry=reg, buckets=_SECONDS
        )
        self._errors = Counter(
            "prefill_operator_reconcile_errors", "Passes that failed", ["kind", "reason"], registry=reg
        )
        self._requests = Counter(
            "prefill_operator_api_requests", "Requests; code 0 = no answer", ["verb", "resource", "code"], registry=reg
        )
        self._relists = Counter(
            "prefill_operator_watch_restarts", "Watches that began again with a LIST", ["resource"], registry=reg
        )
        self._rounds = Counter(
            "prefill_operator_resync_rounds", "Comparisons of the cache with the API server", registry=reg
        )
        self._mismatches = Counter(
            "prefill_operator_resync_mismatch", "Objects that a watch had missed", ["resource"], registry=reg
        )
        self._leader = Gauge("prefill_operator_leader", "1 while this process holds the Lease", registry=reg)
        self._depth = Gauge("prefill_operator_queue_depth", "Pools that wait for a worker", registry=reg)
        self._oldest = Gauge("prefill_operator_oldest_key_seconds", "Longest wait of such a pool", registry=reg)
        self._lag = Gauge("prefill_operator_event_loop_lag_seconds", "Latest lag of the event loop", registry=reg)

    def watch_queue(self, *, depth: Callable[[], float], oldest_seconds: Callable[[], float]) -> None:
        """Where to read the queue's state when asked."""
        self._depth.set_function(depth)
        self._oldest.set_function(oldest_seconds)

    def set_leader(self, leading: bool) -> None:
        self._leader.set(float(leading))

    def set_loop_lag(self, seconds: float) -> None:
        self._lag.set(seconds)

    def count_request(self, verb: str, resource: str, code: int) -> None:
        self._requests.labels(verb=verb, resource=resource, code=str(code)).inc()

    def observe_reconcile(self, kind: Kind, seconds: float) -> None:
        self._reconcile.labels(kind=str(kind)).observe(seconds)

    def count_error(self, kind: Kind, reason: str) -> None:
        self._errors.labels(kind=str(kind), reason=reason).inc()

    def count_relist(self, resource: str) -> None:
        self._relists.labels(resource=resource).inc()

    def count_resync_round(self) -> None:
        self._rounds.inc()

    def count_mismatches(self, resource: str, number: int) -> None:
        self._mismatches.labels(resource=resource).inc(number)
