"""Every metric family of a prefill engine, declared once (serving.md 7.1). Seconds and bytes; bounded labels, no ids, no tenants.

Exported by the front, outside the rank processes, so figures survive a wedged rank. `pe_engine_info{device="cpu"}` marks an
engine whose times are no GPU's (decision 25).
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary

# 1-2-5 from 1 ms to 120 s.
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 120)
_ROWS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
PREFIX = "pe_"


class Metrics:
    """The families, as attributes without the `pe_` prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(PREFIX + name, text, labels, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        def seconds(name: str, text: str, labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(PREFIX + name, text, labels, buckets=_SECONDS, registry=registry)

        self.engine_info = gauge(
            "engine_info", "Always 1; which engine and device this is.", ("device", "model", "build")
        )
        self.epoch = gauge("epoch", "Incarnation of this engine: milliseconds since 1970 at its start.")
        self.state = gauge("state", "1 for the state the engine is in.", ("state",))
        self.requests = counter("requests_total", "Ended attempts.", ("outcome", "reason"))
        self.attempts_waiting = gauge("attempts_waiting", "Attempts that have not started computing.", ("rank",))
        self.attempts_running = gauge("attempts_running", "Attempts with rows in steps.", ("rank",))
        self.rows_waiting = gauge("rows_waiting", "Uncomputed rows of all attempts.", ("rank", "class"))
        self.predicted_wait_seconds = gauge(
            "predicted_wait_seconds", "Predicted wait of a new request, best rank; 0 idle."
        )
        self.kv_usage_ratio = gauge("kv_usage_ratio", "Share of Block KV that is not free.", ("rank",))
        self.kv_ticket_ratio = gauge("kv_ticket_ratio", "Share of Block KV held by open tickets.", ("rank",))
        self.state_slots_free = gauge("state_slots_free", "Free per-sequence state slots.", ("rank",))
        self.cache_info = gauge(
            "cache_info", "Always 1; geometry of the KV pool.", ("block_size", "num_blocks", "layout")
        )
        self.step_seconds = seconds("step_seconds", "Time of one step.", ("kind",))
        self.step_rows = Histogram(
            PREFIX + "step_rows", "Rows of one step.", ("kind",), buckets=_ROWS, registry=registry
        )
        self.step_model_ms = gauge("step_model_ms", "Fitted step cost model (serving.md 2.2).", ("term",))
        self.last_step_age_seconds = gauge("last_step_age_seconds", "Time since the last sign of a step.")
        self.steps = counter("steps_total", "Finished steps, placeholder steps included.", ("rank",))
        self.lockstep_efficiency_ratio = gauge(
            "lockstep_efficiency_ratio", "Rows of a step / (ranks x rows of the fullest rank); 1 with one rank."
        )
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens by disjoint source.", ("source",))
        self.replayed_rows = counter("replayed_rows_total", "Rows replayed to rebuild window state; never billed.")
        self.image_tokens = counter("image_tokens_total", "Prompt tokens that are image rows.")
        self.wasted_rows = counter("wasted_rows_total", "Computed rows of attempts that failed.", ("reason",))
        self.stage_seconds = seconds("stage_seconds", "Time an attempt spent in a stage.", ("stage",))
        self.ttft_seconds = seconds("ttft_seconds", "Arrival to first token.", ("class",))
        self.swa_source = counter("swa_source_total", "Where window state came from.", ("from",))
        self._add_kv(registry)
        self.kv_transfer_seconds = seconds("kv_transfer_seconds", "Claim to end of a hand-off.", ("direction",))
        self.kv_transfer_bytes = counter("kv_transfer_bytes_total", "Bytes handed over.", ("direction", "component"))
        self.kv_transfer_failures = counter(
            "kv_transfer_failures_total", "Hand-offs not delivered.", ("direction", "reason")
        )
        self.tickets_open = gauge("tickets_open", "Tickets that are offered, claimed or moving.")
        self.ticket_expired = counter("ticket_expired_total", "Tickets whose lease ran out.")
        self.store_lag_blocks = gauge("store_lag_blocks", "Blocks waiting to be written to the store.", ("rank",))
        self.store_commit_seconds = seconds("store_commit_seconds", "First write to last commit of an attempt.")
        self.rank_events = gauge(
            "rank_events", "Monotonic counts of pools, snapshots and store, by name.", ("rank", "name")
        )
        self.startup_seconds = gauge("startup_seconds", "Time of a start-up stage.", ("stage", "rank"))
        self.weight_load_bytes = gauge("weight_load_bytes", "Weight bytes loaded.", ("stage", "rank"))

    def _add_vision(self, registry: CollectorRegistry) -> None:
        """Of images that vision encoders make rows of; those export their own families, ve_*."""
        self.images = Counter(
            PREFIX + "images_total", "Images fetched from encoders, by outcome.", ("outcome",), registry=registry
        )
        self.image_seconds = Histogram(
            PREFIX + "image_seconds",
            "From wanting an image to its rows being here.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.encoders_usable = Gauge(
            PREFIX + "encoders_usable", "Vision encoders that take images now.", registry=registry
        )
        self.image_rows_bytes = Gauge(
            PREFIX + "image_rows_bytes", "Shared memory with rows on their way to the model.", registry=registry
        )

    def _add_handoff(self, registry: CollectorRegistry) -> None:
        """Of hand-offs and pushes."""
        self.handoff_seconds = Histogram(
            "kv_handoff_seconds",
            "Claim (push: ticket) to acceptance of a hand-off.",
            ("mode", "transport"),
            buckets=_SECONDS,
            registry=registry,
        )
        self.handoff_transport_info = Gauge(
            "kv_handoff_transport_info",
            "What the ranks' data ports move bytes by; value 1.",
            ("rank", "kind", "rdma"),
            registry=registry,
        )
        self.grants_open = Gauge(
            PREFIX + "grants_open",
            "Grants of decode peers that are filled, offered or not yet let go of.",
            registry=registry,
        )

    def _add_kv(self, registry: CollectorRegistry) -> None:
        """Families of kv.md 7.7 that a rank counts; kvd exports its own under the same prefix, from a port of its own."""

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._add_handoff(registry)
        self._add_vision(registry)
        self.hit_shrunk = counter(
            PREFIX + "hit_shrunk_total",
            "Hits that were cut: below the offer (resolved), for want of room in kvd (pressure), on their way (swap_in).",
            ("reason",),
        )
        self.kv_open = counter("pe_kv_open_total", "Look-ups at kvd: exact, pulling, replay or miss.", ("mode",))
        self.kv_open_late = counter("pe_kv_open_late_total", "Look-ups not answered in time; they are misses, too.")
        self.kv_hit_tokens = counter("pe_kv_hit_tokens_total", "Tokens of blocks that look-ups found.")
        self.kv_requested_tokens = counter("pe_kv_requested_tokens_total", "Tokens of blocks that look-ups asked for.")
        self.kv_loads = counter("kv_swapin_total", "Swap-ins: whole, short, late, gone, lost or given_up.", ("ending",))
        self.kv_loaded_bytes = counter("kv_swapin_copied_bytes_total", "Bytes copied from kvd's pool to the KV cache.")
        self.kv_swapin_stall = counter(
            "kv_swapin_stall_seconds_total", "Time that steps stood still at the gate of a layer group.", ("group",)
        )
        self.kv_group_ready = Summary(
            "pe_kv_group_ready_seconds",
            "From the start of a swap-in until a layer group of the whole hit was in the KV cache.",
            ("group",),
            registry=registry,
        )
        self.kv_gate_poisoned = counter("kv_gate_poisoned_total", "Attempts whose rows were discarded at a gate.")
        self.kv_snapshots = counter("kv_snapshot_total", "Snapshots of look-ups: taken, or lost on the way.", ("end",))
        self.kv_replay = counter(
            "kv_replay_total",
            "Prompts with a replayed window: no snapshot (none), pull failed or late (pull), held one lost (lost).",
            ("reason",),
        )
