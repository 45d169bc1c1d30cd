"""Shows the state of pool, sessions, store and transport as metrics; called by the Keeper's housekeeping."""

from collections import Counter

from prefill_engine.kv.transport.contract import Transport
from prefill_engine.kvd.kvd_metrics import KvdMetrics
from prefill_engine.kvd.pool_state import PoolState
from prefill_engine.kvd.sessions import Sessions
from prefill_engine.kvd.slot_pool import SlotState
from prefill_engine.kvd.store_link import StoreLink


class Gauges:
    """Owner of nothing but the values."""

    def __init__(self, metrics: KvdMetrics, transport: Transport) -> None:
        self._metrics = metrics
        kind = transport.kind
        metrics.transport_info.labels(kind, str("rdma" in kind).lower()).set(1)

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
        for name, count in store.counters().items():
            self._metrics.store_events.labels(name).set(count)
