"""KvdConfig: what `prefill-engine kv serve` runs with, rendered by the operator into kvd.json and read by kvd alone.

Same rules as EngineConfig: field docs give unit, range and the reason of the default; no default stands anywhere else.
"""

from enum import StrEnum
from math import inf

from prefill_plan.config import Struct, TlsConfig, TransportKind
from prefill_plan.errors import ConfigError
from prefill_plan.ranges import LEAST_SECONDS, MOST_SECONDS, Range, check_ranges

JOURNAL_ROOM_BYTES = 2 << 20
"""Beside the pool, in the same file system: kvd's lease journal before it is written anew (1 MiB), and the new one."""


class KvdStoreKind(StrEnum):
    MEMORY = "memory"
    """No medium behind the pool: blocks live as long as kvd's slots do."""
    FILE = "file"
    """Segments on any POSIX mount."""
    USRBIO = "usrbio"
    """Segments on 3FS, data through its USRBIO rings."""


class KvdStoreConfig(Struct):
    kind: KvdStoreKind = KvdStoreKind.MEMORY
    path: str = ""
    """Directory of the segments; for usrbio inside the 3FS mount."""
    direct_io: bool = False
    """O_DIRECT reads of whole records; worth it where the medium is faster than the page cache is useful."""
    read_threads: int = 4
    """1 to 256."""
    max_bytes: int = 0
    """Capacity that watermarks refer to; 0 = the medium's own free space decides."""
    high_watermark: float = 0.90
    """Share of max_bytes at which the oldest generations are collected, down to low_watermark (kv.md 7.6); at most 1."""
    low_watermark: float = 0.80
    """More than 0, less than high_watermark."""
    grace_seconds: float = 60.0
    """Between withdrawing a segment and deleting it: longer than any read may take (3FS does not keep deleted files open)."""
    generation_seconds: float = 3600.0
    """Time bucket of segments that are collected together; more than 0."""
    tenant_share: float = 1.0
    """Share of max_bytes (0: of the medium) that one tenant's segments may take when a collection wants room: those above it lose
    their oldest first. 1 = tenants are not told apart, whose segments then take fewer directories; more than 0. The same for all
    kvds of a store."""
    usrbio_library: str = "libhf3fs_api_shared.so"
    usrbio_mount: str = ""
    """Mount point of 3FS; "" = path's mount."""


class TransportConfig(Struct):
    kind: TransportKind = TransportKind.TCP
    host: str = "0.0.0.0"
    port: int = 0
    """Listener for peers; 0 = any free port, printed at start."""
    advertise: str = ""
    """Address that peers are told; "" = POD_IP, else the host."""
    require_rdma: bool = False
    """True: no RDMA device is an error at start, and UCX is left RDMA alone (UCX_TLS=rc,ud,dc, unless the pod sets another list
    of RDMA transports): never a silent fall-back to TCP."""
    tls: TlsConfig = TlsConfig()


class DirectoryConfig(Struct):
    address: str = ""
    """host:port of the directory service; "" = none: this kvd knows its own snapshots and store only."""
    deadline_seconds: float = 0.05
    """Longest wait for a look-up; later means a miss."""


class KvdConfig(Struct):
    """Example: {"pool_bytes": 2147483648, "store": {"kind": "file", "path": "/kv"}}."""

    socket: str = "/run/kvd/kvd.sock"
    pool_path: str = ""
    """Shared-memory file; "" = /dev/shm/kvd.<POD_NAME or pid>."""
    pool_bytes: int = 1 << 30
    """Whole pool, snapshots included; prefaulted before kvd says it is ready."""
    snapshot_bytes: int = 1 << 26
    """Part of the pool for SWA snapshots; less than pool_bytes."""
    probe_port: int = 0
    """Plaintext gRPC health: "" = alive, "kvd" = started; 0 = any free port, -1 = none."""
    metrics_port: int = 0
    """Prometheus; 0 = any free port, -1 = none."""
    engine_uid: int = -1
    """User of the ranks: socket and pool are given to it, and it alone is let in beside kvd's own user and root. Another user
    than kvd's needs a kvd that runs as root, as one that mounts 3FS does; -1 = kvd's own."""
    required: bool = False
    """True: a store that does not open at start ends kvd (exit 10); False: it serves its pool alone and tries again."""
    startup_timeout_seconds: float = 300.0
    fuse_config: str = ""
    """3FS client configuration; given, kvd starts and watches `hf3fs_fuse_main` before it opens the store."""
    store: KvdStoreConfig = KvdStoreConfig()
    transport: TransportConfig = TransportConfig()
    directory: DirectoryConfig = DirectoryConfig()
    lease_grace_seconds: float = 5.0
    """After a rank's session broke: time for its copies to end before its slots are used again (kv.md 7.5)."""
    pull_deadline_seconds: float = 0.020
    """For one snapshot from a peer; later = replay."""
    max_quarantined_slots: int = 64
    """More timed-out destinations than this, or than a quarter of the snapshot slots: the connections of their peers are closed,
    which ends their late writes. A single one that stays late for 5 s closes its peer's, too."""
    read_budget_bytes: int = 1 << 30
    """Bytes of store reads in flight per session; beyond it hits are shortened (kv.md 7.4)."""
    write_queue_bytes: int = 1 << 28
    """Committed blocks that wait for the store; beyond it the newest are dropped and counted."""
    tenant_share: float = 0.5
    """Share of the block slots, and of the snapshot slots, that one tenant may hold when others want room; more than 0, at most
    1."""

    def check(self) -> None:
        """Raises ConfigError for the first value out of its range: field, value, what was expected. Called by kvd at start."""
        check_ranges(self, _RANGES)
        self._check_order("snapshot_bytes", self.snapshot_bytes, "pool_bytes", self.pool_bytes)
        store = self.store
        self._check_order("store.low_watermark", store.low_watermark, "store.high_watermark", store.high_watermark)

    def _check_order(self, less: str, value: float, more: str, limit: float) -> None:
        if value >= limit:
            expected = f"less than {more} = {limit}"
            raise ConfigError(f"{less} = {value}, expected {expected}", key=less, expected=expected)


_LEAST_SHARE = 0.001
_RANGES: tuple[Range, ...] = (
    ("pool_bytes", 1, inf),
    ("snapshot_bytes", 1, inf),
    ("probe_port", -1, 65_535),
    ("metrics_port", -1, 65_535),
    ("engine_uid", -1, 2**32 - 2),
    ("startup_timeout_seconds", 0, MOST_SECONDS),
    ("store.read_threads", 1, 256),
    ("store.max_bytes", 0, inf),
    ("store.high_watermark", _LEAST_SHARE, 1),
    ("store.low_watermark", _LEAST_SHARE, 1),
    ("store.grace_seconds", 0, MOST_SECONDS),
    ("store.generation_seconds", LEAST_SECONDS, MOST_SECONDS),
    ("store.tenant_share", _LEAST_SHARE, 1),
    ("transport.port", 0, 65_535),
    ("directory.deadline_seconds", LEAST_SECONDS, MOST_SECONDS),
    ("lease_grace_seconds", 0, MOST_SECONDS),
    ("pull_deadline_seconds", LEAST_SECONDS, MOST_SECONDS),
    ("max_quarantined_slots", 1, inf),
    ("read_budget_bytes", 1, inf),
    ("write_queue_bytes", 1, inf),
    ("tenant_share", _LEAST_SHARE, 1),
)
"""Inclusive. What only a model's geometry can tell (room for one block and one snapshot) is checked when a rank connects."""
