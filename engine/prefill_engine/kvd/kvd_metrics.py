"""Every metric family of kvd, declared once (kv.md 7.7). Seconds and bytes; bounded labels, no ids, no tenants."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class KvdMetrics:
    """The families, as attributes without the `kv_` prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"kv_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"kv_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"kv_{name}", text, labels, buckets=_SECONDS, registry=registry)

        self.open = counter("open_total", "Look-ups by outcome: exact, pulling (a snapshot), replay, miss.", ("mode",))
        self.open_seconds = seconds("open_seconds", "Time of a look-up inside kvd.")
        self.open_shrunk_blocks = counter("open_shrunk_blocks_total", "Blocks that exist but found no room.")
        self.hit_tokens = counter("hit_tokens_total", "Tokens of blocks that look-ups found.")
        self.requested_tokens = counter("requested_tokens_total", "Tokens of blocks that look-ups asked for.")
        self.swapin_bytes = counter("swapin_bytes_total", "Bytes made ready for ranks: shm, fs or peer.", ("src",))
        self.group_ready_seconds = seconds(
            "group_ready_seconds", "From look-up until all blocks of a hit have a layer group.", ("group",)
        )
        self.swa_pull_seconds = seconds("swa_pull_seconds", "Pulls of snapshots that arrived.")
        self.swa_pull_fail = counter("swa_pull_fail_total", "Pulls of snapshots that did not.", ("reason",))
        self.verify_fail = counter("verify_fail_total", "Records that failed verification.", ("reason",))
        self.quarantined_slots = gauge("quarantined_slots", "Slots that something may still write into.")
        self.leases = gauge("leases", "Leases and reservations of connected ranks, and of broken sessions.", ("state",))
        self.slots = gauge("slots", "Slots by kind and state.", ("kind", "state"))
        self.writeback_queue_bytes = gauge("writeback_queue_bytes", "Committed blocks that wait for the store.")
        self.writeback_dropped = counter("writeback_dropped_total", "Committed blocks that did not reach the store.")
        self.publish_seconds = seconds("publish_seconds", "Time to write and publish a segment.")
        self.evicted_bytes = counter("evicted_bytes_total", "Bytes forgotten to make room.", ("tier",))
        self.store_up = gauge("store_up", "1 = the store answers, 0 = it is away, every look-up there is a miss.")
        self.store_events = counter("store_events_total", "What happened at the store, by name.", ("name",))
        self.transport_events = counter(
            "transport_events_total",
            "What happened between this kvd and its peers: pulls, served, reconnects.",
            ("name",),
        )
        self.directory_events = counter(
            "directory_client_events_total",
            "Calls to the directory: failed, skipped while it is away, joins.",
            ("name",),
        )
        self.transport_info = gauge("transport_info", "Always 1; what is really in use.", ("kind", "rdma"))
        self.sessions = gauge("sessions", "Ranks that are connected.")
        for group in range(4):
            self.group_ready_seconds.labels(str(group))
