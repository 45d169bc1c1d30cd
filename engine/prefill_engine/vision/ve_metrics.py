"""Every metric family of a vision encoder, declared once (serving.md 7.1). Seconds, bytes, patches; bounded labels, no ids.

Exported by the RPC process, so figures survive a wedged encoder. `ve_info{device="cpu"}` marks one whose times are no GPU's.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
_DELAYS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_PATCHES = (500, 1000, 2000, 4000, 6000, 8000, 10_000, 12_000, 14_000, 16_384)
PREFIX = "ve_"


class VeMetrics:
    """The families, as attributes without the `ve_` prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(PREFIX + name, text, labels, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=registry)

        self.info = gauge("info", "Always 1; which tower and device this is.", ("device", "model", "build"))
        self.epoch = gauge("epoch", "Incarnation of this encoder: milliseconds since 1970 at its start.")
        self.state = gauge("state", "1 for the state the encoder is in.", ("state",))
        self.patches_queued = gauge(
            "patches_queued", "Patches that were accepted and are not encoded; the scaling signal."
        )
        self.patches_limit = gauge("patches_limit", "Patches that may be queued; more answer PATCH_QUEUE_FULL.")
        self.images_queued = gauge("images_queued", "Images that were accepted and are not encoded.")
        self.images_in_cpu = gauge("images_in_cpu", "Images of these that are decoded or wait for it.")
        self.patches = counter("patches_total", "Patches encoded.")
        self.images = counter("images_total", "Ended calls for an image.", ("outcome", "reason"))
        self.image_seconds = histogram("image_seconds", "Arrival of a call to its answer.", _SECONDS)
        self.stage_seconds = histogram(
            "stage_seconds", "Time in a stage; from h2d on of a batch.", _SECONDS, ("stage",)
        )
        self.batch_patches = histogram("batch_patches", "Patches of a batch.", _PATCHES)
        self.batches = counter("batches_total", "Batches encoded.")
        self.batch_model_ms = gauge("batch_model_ms", "Fitted time of a batch: a, and b per patch.", ("term",))
        self.cache = counter(
            "cache_total", "Look-ups: hit, miss, joined (same image under way), rejected.", ("result",)
        )
        self.cache_bytes = gauge("cache_bytes", "Rows that nobody holds.")
        self.rows_bytes = gauge("rows_bytes", "Shared memory taken by rows, cached ones included.")
        self.rows_limit_bytes = gauge("rows_limit_bytes", "Shared memory for rows.")
        self.cache_evicted = counter("cache_evicted_total", "Cached rows that made room.")
        self.tickets_open = gauge("tickets_open", "Rows that wait for their callers.")
        self.ticket_expired = counter("ticket_expired_total", "Holds that ended without an Ack.")
        self.sent_bytes = counter(
            "sent_bytes_total", "Rows sent through gRPC; those read from shared memory are not seen."
        )
        self.workers = gauge("workers_ready", "Decode workers that are ready.")
        self.worker_restarts = counter("worker_restarts_total", "Decode workers that ended with an image or idle.")
        self.worker_events = gauge("worker_events", "Monotonic counts of the decode pool, by name.", ("name",))
        self.worker_rss_bytes = gauge("worker_rss_bytes", "Memory of a decode worker, as it last said.")
        self.loop_delay_seconds = histogram("loop_delay_seconds", "How late timers of the RPC process were.", _DELAYS)
        self.startup_seconds = gauge("startup_seconds", "Time of a start-up stage.", ("stage",))
        self.weight_load_bytes = gauge("weight_load_bytes", "Weight bytes loaded.")
