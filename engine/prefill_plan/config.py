"""EngineConfig: the one struct that the operator renders into a config map and the engine reads.

Parsed once by prefill_engine.settings; each object gets its own part, never the whole tree. Field docs give unit, range and the
reason of the default. No default stands anywhere else.
"""

from enum import StrEnum
from typing import dataclass_transform

import msgspec


# Type checkers do not inherit the class keywords of msgspec, so frozen and kw_only are said again for them.
@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that crosses a file or a process border: unknown keys are refused."""


class Device(StrEnum):
    GPU = "gpu"
    CPU = "cpu"


class RecordFormat(StrEnum):
    """Main-KV record: e2m1 with e4m3 scales of 16 (default), or e4m3 with ue8m0 scales of 32 (decision 9)."""

    FP4 = "fp4"
    FP8 = "fp8"


class Truncation(StrEnum):
    """How decoder rows are left out (R7): compact computes kept rows only, mask computes all and hides; equal on kept rows."""

    COMPACT = "compact"
    MASK = "mask"


class StoreKind(StrEnum):
    MEMORY = "memory"
    FILE = "file"


class VisionMode(StrEnum):
    """Who encodes images: nobody (they are refused), vision encoders elsewhere, or one that this engine starts beside its
    ranks."""

    NONE = "none"
    REMOTE = "remote"
    IN_ENGINE = "in-engine"


class ModelConfig(Struct):
    path: str
    """Directory with config.json, tokenizer.json, model.safetensors.index.json and shards."""
    name: str = "deepseek-v4.1-flash"
    """Name reported to clients (ModelBinding.model_id)."""


class ParallelConfig(Struct):
    dp_size: int = 1
    """Attention (data-parallel) ranks of this engine, one process each. Equal to ep_size (R1)."""
    ep_size: int = 1
    """Expert-parallel ranks: 1 (CPU, tests), 2, 4 or 8."""


class ServerConfig(Struct):
    host: str = "127.0.0.1"
    port: int = 50051
    """gRPC; 0 = any free port, printed at start."""
    probe_port: int = 0
    """Plaintext health port for the kubelet (C44); 0 = any free port, -1 = none."""
    metrics_port: int = 0
    """Prometheus; 0 = any free port, -1 = none."""
    max_message_bytes: int = 16 * 1024 * 1024
    """A 1,048,576-token prompt is 3.3 MB on the wire (serving.md 1.1)."""
    drain_seconds: float = 120.0
    """How long SIGTERM waits for running work and open tickets (decision 6)."""
    max_waiting_requests: int = 1024
    """Attempts a rank may hold that have not started computing; more answer QUEUE_FULL."""
    max_waiting_rows: int = 2_000_000
    """Uncomputed rows ahead of a new request per rank; more answer QUEUE_FULL (C47)."""
    max_tenant_rows: int = 1_000_000
    """Uncomputed rows one fairness key may have waiting per rank; more answer TENANT_QUOTA."""
    load_timeout_seconds: float = 1800.0
    """From process start to ready; exit 1 when passed and progress stood still for 60 s (C44)."""


class TlsConfig(Struct):
    """PEM files of a mutual TLS; all empty = plain TCP inside the pod network."""

    certificate: str = ""
    key: str = ""
    authority: str = ""


class TransportKind(StrEnum):
    TCP = "tcp"
    NIXL = "nixl"
    """One-sided reads and writes through UCX, for RDMA; optional (docs/kv_network.md)."""


class HandoffConfig(Struct):
    ticket_seconds: float = 30.0
    """Lease of a ticket; renewable (decision 16)."""
    ticket_max_seconds: float = 600.0
    """Total life of a ticket, renewals included."""
    result_seconds: float = 600.0
    """How long a finished attempt's outcome is kept for joiners."""
    data_port: int = 0
    """First listener of the ranks' data transport for decode peers (rank n: data_port + n); 0 = any free port, -1 = none: then
    KV is handed over through gRPC only and nothing can be pushed."""
    transport: TransportKind = TransportKind.TCP
    """What it speaks; decode peers that don't pull through gRPC. nixl that is not installed is an error at start."""
    require_rdma: bool = False
    """True, with nixl: no RDMA device is an error at start, and UCX is left RDMA alone; never a silent fall-back to TCP."""
    staging_bytes: int = 1 << 26
    """With nixl: host memory per rank that pieces of hand-overs (1 MiB) are copied to for peers to read, and the same again for
    pushes. Where all of it is in use, peers read through gRPC, and a push registers its own copy. At least 1 MiB."""
    tls: TlsConfig = TlsConfig()
    """Of that data transport, both ways: decode peers then need a certificate of the same authority. gRPC ports stay plain."""
    piece_seconds: float = 5.0
    """Longest wait for one piece of a push (about 1 MiB); then the peer counts as lost and its connection is closed."""


class ReplayConfig(Struct):
    keep_tokens: int = 140
    """KEEP_TOKENS: last prompt tokens that run the decoder layers (R5). At least window + max_rollback_tokens (R6)."""
    max_rollback_tokens: int = 6
    """Largest speculative rollback of the decode side."""
    truncation: Truncation = Truncation.COMPACT


class KvConfig(Struct):
    record_format: RecordFormat = RecordFormat.FP4
    pool_tokens: int = 1_048_576
    """Tokens of the Block KV pool per rank; rounded down to blocks of 128."""
    state_slots: int = 64
    """Attempts that can hold state (window rings, compressor state) at once per rank."""
    snapshot_bytes: int = 1 << 30
    """Host memory for SWA snapshots per rank; 0 = none are kept, every hit replays (R4)."""
    max_ticket_fraction: float = 0.5
    """Share of the pool that open tickets may hold before admission stops (serving.md 2.6)."""


class StoreConfig(Struct):
    kind: StoreKind = StoreKind.MEMORY
    path: str = ""
    """Directory of a file store (any POSIX mount, 3FS FUSE included)."""
    max_bytes: int = 1 << 30
    """Capacity of a memory store; the file store is not limited here."""
    required: bool = False
    """True: a store lost at run time ends the engine (exit 17) instead of degrading it."""


class KvdLink(Struct):
    socket: str = ""
    """Unix socket of the pod's KV sidecar; "" = none: the rank has its own store and snapshots (store, kv.snapshot_bytes)."""
    connect_seconds: float = 60.0
    """How long the rank waits for kvd at start; later it runs on without, every hit a miss, and comes back by itself."""
    open_seconds: float = 0.25
    """Longest wait for one look-up; later means no hit."""
    swap_in_seconds: float = 2.0
    """Longest wait for a whole hit; then it is cut to what is there (serving.md 1.1)."""
    swap_in_min_seconds: float | None = None
    """A hit is cut earlier once this and 4 times what its bytes took lately are over, both together (docs/kv_sidecar.md). None:
    0.05 on a GPU; on a CPU swap_in_seconds, since computing the blocks takes longer than waiting there, and a thread may not run
    for 100 ms."""
    snapshot_seconds: float = 0.025
    """Longest wait of a hit for a window snapshot that a peer sends; then its window is replayed. kvd gives its pull 20 ms
    (pull_deadline_seconds), and its word of the end takes a moment."""
    gate_seconds: float = 0.020
    """Longest stand-still of a layer gate inside a step; then the attempt's rows are discarded and it runs again (C18)."""


class SchedulerConfig(Struct):
    chunk_cap_tokens: int = 32_768
    """Rows per rank and step, replayed rows included (R10)."""
    min_chunk_tokens: int = 512
    """A shorter tail is merged, or taken from the chunk before it (C47)."""
    contended_chunk_tokens: int = 16_384
    """Step size while short work waits (serving.md 2.2)."""
    floor_chunk_tokens: int = 4_096
    """Step budgets never shrink a step below this while others wait, except by a request's step_cap (C47)."""
    age_seconds: float = 10.0
    """Ageing constant of cost / (1 + age / age_seconds)."""
    canary_seconds: float = 10.0
    """An idle engine runs a placeholder step this often, so that health is proved, not assumed."""


class VisionConfig(Struct):
    mode: VisionMode = VisionMode.NONE
    """With remote and in-engine the model's path holds the vision tower as well: its digest names the encoders that will do."""
    endpoints: tuple[str, ...] = ()
    """Of vision encoders, host:port, for remote; every address of a name is one encoder, so a headless Service names a
    VEPool."""
    numerics_class: str = ""
    """Of the encoders, as `ve info` tells it ("gpu-triton-sm_90-bf16"); their rows differ in bits by chip and kernel set, so
    encoders of another class get no image, and the class is part of the images' keys. "" = this engine's own device and ops."""
    rows_bytes: int = 512 * 1024 * 1024
    """Rows on their way to the model, in /dev/shm; an image of the release takes at most 10 MiB (serving.md 4.5)."""
    image_seconds: float = 10.0
    """Longest wait for an answer about one image; then another encoder is asked, once (serving.md 4.6)."""


class EngineConfig(Struct):
    """Everything `prefill-engine serve` needs.

    Example: {"model": {"path": "/models/v41"}, "store": {"kind": "file", "path": "/3fs/kv"}}.
    """

    model: ModelConfig
    device: Device = Device.GPU
    ops: str = "triton"
    """Kernel set: "triton", or "ref" (plain torch, the CPU backend)."""
    parallel: ParallelConfig = ParallelConfig()
    server: ServerConfig = ServerConfig()
    handoff: HandoffConfig = HandoffConfig()
    replay: ReplayConfig = ReplayConfig()
    kv: KvConfig = KvConfig()
    store: StoreConfig = StoreConfig()
    kvd: KvdLink = KvdLink()
    scheduler: SchedulerConfig = SchedulerConfig()
    vision: VisionConfig = VisionConfig()
    max_context_tokens: int = 131_072
    """Longest prompt accepted."""
