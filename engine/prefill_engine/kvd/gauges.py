"""Shows the state of pool, sessions, store, transport and directory as metrics; called by the Keeper's housekeeping."""

from collections import Counter
from collections.abc import Mapping

import prometheus_client

from prefill_engine.kv.directory import Directory
from prefill_engine.kv.transport.contract import Transport
from prefill_engine.kv.transport.rdma import rdma_label
from prefill_engine.kvd.kvd_metrics import KvdMetrics
from prefill_engine.kvd.pool_state import PoolState
from prefill_engine.kvd.sessions import Sessions
from prefill_engine.kvd.slot_pool import SlotState
from prefill_engine.kvd.store_link import StoreLink


class Gauges:
    """Owner of nothing but the values."""

    def __init__(self, metrics: KvdMetrics, transport: Transport, directory: Directory) -> None:
        self._metrics = metrics
        self._transport = transport
        self._directory = directory
        self._store_events = _Followed(metrics.store_events)
        self._transport_events = _Followed(metrics.transport_events)
        self._directory_events = _Followed(metrics.directory_events)
        metrics.transport_info.labels(transport.kind, rdma_label(transport.kind)).set(1)

    def show(self, state: PoolState, sessions: Sessions) -> None:
        metrics = self._metrics
        for kind, pool in (("block", state.blocks), ("snapshot", state.snapshots)):
            for slot_state, num in pool.counts().items():
                metrics.slots.labels(kind, slot_state.name.lower()).set(num)
        quarantined = [pool.counts()[SlotState.QUARANTINED] for pool in (state.blocks, state.snapshots)]
        metrics.quarantined_slots.set(sum(quarantined))
        connected = {session.owner_epoch for session in sessions.connected()}
        leases = Counter("live" if lease.owner_epoch in connected else "grace" for lease in state.leases)
        for name in ("live", "grace"):
            metrics.leases.labels(name).set(leases[name])
        metrics.sessions.set(sessions.num_ready)

    def show_store(self, store: StoreLink) -> None:
        self._metrics.store_up.set(1 if store.is_up else 0)
        self._store_events.show(store.counters())

    def show_network(self) -> None:
        self._transport_events.show(self._transport.counters)
        self._directory_events.show(self._directory.counters)


class _Followed:
    """A counter of what somebody else counts. Counts that begin anew, as those of a store that was opened again, go on here."""

    def __init__(self, counter: prometheus_client.Counter) -> None:
        self._counter = counter
        self._last: dict[str, int] = {}

    def show(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            last = self._last.get(name, 0)
            self._counter.labels(name).inc(count - last if count >= last else count)
        self._last = dict(counts)
