"""KvdConfig: what `prefill-engine kv serve` runs with, rendered by the operator into kvd.json and read by kvd alone.

Same rules as EngineConfig: field docs give unit, range and the reason of the default; no default stands anywhere else.
"""

from enum import StrEnum

from prefill_plan.config import Struct, TlsConfig

JOURNAL_ROOM_BYTES = 2 << 20
"""Beside the pool, in the same file system: kvd's lease journal before it is written anew (1 MiB), and the new one."""


class KvdStoreKind(StrEnum):
    MEMORY = "memory"
    """No medium behind the pool: blocks live as long as kvd's slots do."""
    FILE = "file"
    """Segments on any POSIX mount."""
    USRBIO = "usrbio"
    """Segments on 3FS, data through its USRBIO rings."""


class TransportKind(StrEnum):
    TCP = "tcp"
    NIXL = "nixl"


class KvdStoreConfig(Struct):
    kind: KvdStoreKind = KvdStoreKind.MEMORY
    path: str = ""
    """Directory of the segments; for usrbio inside the 3FS mount."""
    direct_io: bool = False
    """O_DIRECT reads of whole records; worth it where the medium is faster than the page cache is useful."""
    read_threads: int = 4
    max_bytes: int = 0
    """Capacity that watermarks refer to; 0 = the medium's own free space decides."""
    high_watermark: float = 0.90
    """Share of max_bytes at which the oldest generations are collected, down to low_watermark (kv.md 7.6)."""
    low_watermark: float = 0.80
    grace_seconds: float = 60.0
    """Between withdrawing a segment and deleting it: longer than any read may take (3FS does not keep deleted files open)."""
    generation_seconds: float = 3600.0
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
    """True: no RDMA device is an error at start, never a silent fall-back to TCP."""
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
    """Share of the pool for SWA snapshots."""
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
    """More timed-out destinations than this: the transport's connections are closed, which ends their late writes."""
    read_budget_bytes: int = 1 << 30
    """Bytes of store reads in flight per session; beyond it hits are shortened (kv.md 7.4)."""
    write_queue_bytes: int = 1 << 28
    """Committed blocks that wait for the store; beyond it the newest are dropped and counted."""
    tenant_share: float = 0.5
    """Share of the block slots that one tenant may hold when others want room."""
