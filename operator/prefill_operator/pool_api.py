"""Spec of a PrefillPool: its blocks, in the order of the CRD.

Fields are described for users in crds/prefillpools.yaml. Where a default depends on another field, the field is None here
and the comment says what None means.
"""

from enum import StrEnum

from prefill_operator.api_parts import (
    ApiStruct,
    AutoscalingSpec,
    HostPathSource,
    ImagePullPolicy,
    LifecycleSpec,
    MonitoringSpec,
    PodOverlay,
    PvcSource,
    Resources,
    RolloutSpec,
    SchedulingSpec,
)
from prefill_operator.quantity import ByteQuantity, ResourceQuantity
from prefill_plan.config import Device


class Architecture(StrEnum):
    FLASH = "deepseek-v4.1-flash"
    TEST_TINY = "test-tiny"


class EngramPlacement(StrEnum):
    AUTO = "Auto"
    GPU = "GPU"
    HOST = "Host"


class RedundancyMode(StrEnum):
    NONE = "None"
    FIXED = "Fixed"
    AVAILABILITY = "Availability"


class MetricName(StrEnum):
    BACKLOG = "BacklogMillisecondsPerPE"
    ROWS = "RowsWaitingPerGPU"
    FORECAST = "ForecastRowsPerSecondPerGPU"


class KvdStore(StrEnum):
    MEMORY = "memory"
    FILE = "file"
    USRBIO = "usrbio"


class MountMode(StrEnum):
    """Who mounts 3FS and who sees it (k8s.md 4.9)."""

    PRIVATE = "Private"
    SHARED = "Shared"
    HOST_MOUNT = "HostMount"


class WeightsMountMode(StrEnum):
    """As MountMode; the engine reads weights itself, so a private mount is no use."""

    SHARED = "Shared"
    HOST_MOUNT = "HostMount"


class KvdTransportKind(StrEnum):
    TCP = "TCP"
    NIXL = "NIXL"


class VisionSource(StrEnum):
    """Who encodes images; the API's words for prefill_plan.config.VisionMode."""

    NONE = "None"
    REMOTE = "Remote"
    IN_ENGINE = "InEngine"


class SecretKeyRef(ApiStruct):
    name: str
    key: str = "token"


class ThreeFSSource(ApiStruct):
    path: str
    mount_mode: WeightsMountMode = WeightsMountMode.HOST_MOUNT
    mount_path: str = "/3fs"
    image: str | None = None
    cluster_id: str | None = None
    mgmtd_addresses: tuple[str, ...] = ()
    token_secret_ref: SecretKeyRef | None = None
    startup_timeout_seconds: int = 120


class ModelSource(ApiStruct):
    """Exactly one is set."""

    pvc: PvcSource | None = None
    three_fs: ThreeFSSource | None = None
    host_path: HostPathSource | None = None


class ModelBlock(ApiStruct):
    name: str
    revision: str
    source: ModelSource
    architecture: Architecture = Architecture.FLASH
    manifest_sha256: str | None = None


class GpuSpec(ApiStruct):
    resource_name: str = "nvidia.com/gpu"
    product: str | None = None
    memory: ByteQuantity | None = None
    reserved: ByteQuantity = "2500M"
    per_node: int = 8
    host_memory_per_node: ByteQuantity | None = None


class OomEscalation(ApiStruct):
    enabled: bool = True
    failures: int = 2
    window_seconds: int = 3600


class ExpertParallelSpec(ApiStruct):
    size: int | str = "auto"
    """As written: auto, or 2, 4, 8 as number or text; `fixed_size` is what it means."""
    min: int = 2
    max: int = 8
    redundancy_slots: int = 32
    allow_degraded: bool = False
    oom_escalation: OomEscalation = OomEscalation()

    @property
    def fixed_size(self) -> int | None:
        """The EP the user asked for; None = the planner chooses."""
        return None if self.size == "auto" else int(self.size)


class ContextSpec(ApiStruct):
    max_tokens: int = 131_072
    chunk_tokens_per_gpu: int = 32_768
    keep_tokens: int = 140
    max_rollback_tokens: int = 6


class EngramBlock(ApiStruct):
    placement: EngramPlacement = EngramPlacement.AUTO


class KvCacheSpec(ApiStruct):
    budget_per_gpu: ByteQuantity | None = None
    tokens_per_gpu: int | None = None
    """1,048,576 when neither this nor budget_per_gpu is set (DEFAULT_TOKENS_PER_GPU)."""
    sequences_per_gpu: int = 64
    fill_spare: bool = True
    host_pool: ByteQuantity = "64Gi"
    swa_pool: ByteQuantity = "16Gi"


DEFAULT_TOKENS_PER_GPU = 1_048_576


class AvailabilitySpec(ApiStruct):
    pe_mtbf_seconds: int
    target: str = "0.999"
    restart_seconds: int | None = None
    """None = the measured p90 load time."""
    node_mtbf_seconds: int | None = None
    node_recovery_seconds: int | None = None
    max_spares: int = 16


class RedundancySpec(ApiStruct):
    mode: RedundancyMode = RedundancyMode.FIXED
    spares: int = 1
    availability: AvailabilitySpec | None = None
    """In mode Fixed it only informs: status shows the availability to expect (C36)."""


class QuotaSpec(ApiStruct):
    max_pes: int | None = None
    max_gpus: int | None = None
    redundancy: RedundancySpec = RedundancySpec()


class PoolMetric(ApiStruct):
    name: MetricName
    target: int


class PoolAutoscaling(AutoscalingSpec):
    metrics: tuple[PoolMetric, ...] = ()


class EmptyDirVolume(ApiStruct):
    size_limit: ByteQuantity | None = None


class KvdVolume(ApiStruct):
    """Exactly one is set."""

    pvc: PvcSource | None = None
    host_path: HostPathSource | None = None
    empty_dir: EmptyDirVolume | None = None


class TlsSecretRef(ApiStruct):
    """A Secret of type kubernetes.io/tls with ca.crt beside tls.crt and tls.key."""

    name: str


class KvdTransport(ApiStruct):
    kind: KvdTransportKind = KvdTransportKind.TCP
    require_rdma: bool = False
    tls_secret_ref: TlsSecretRef | None = None
    """None = plain TCP between kvds and to the directory."""


class KvdSpec(ApiStruct):
    enabled: bool = False
    required: bool = False
    image: str | None = None
    image_pull_policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    store: KvdStore = KvdStore.MEMORY
    path: str | None = None
    volume: KvdVolume | None = None
    pool_size: ByteQuantity | None = None
    """None = kvCache.hostPool + kvCache.swaPool."""
    cluster_id: str | None = None
    mgmtd_addresses: tuple[str, ...] = ()
    token_secret_ref: SecretKeyRef | None = None
    mount_mode: MountMode = MountMode.PRIVATE
    mount_path: str = "/3fs"
    fuse_device_resource: str | None = None
    directory_address: str | None = None
    """None = no directory service: each kvd knows its own snapshots and store only."""
    transport: KvdTransport = KvdTransport()
    startup_timeout_seconds: int = 120
    cpu: ResourceQuantity = 8
    memory: ByteQuantity = "16Gi"


class VEPoolRef(ApiStruct):
    name: str


class PoolVisionSpec(ApiStruct):
    mode: VisionSource = VisionSource.NONE
    ve_pool_ref: VEPoolRef | None = None
    endpoints: tuple[str, ...] = ()
    """host:port. Exactly one of the two is set with Remote, none otherwise."""
    numerics_class: str | None = None
    """None = that of the PE's own device."""
    rows_pool: ByteQuantity = "512Mi"
    image_seconds: int = 10


class NetworkSpec(ApiStruct):
    host_network: bool = False
    rdma_resource_name: str | None = None
    rdma_per_pe: int = 1


class EngineSpec(ApiStruct):
    image: str
    device: Device = Device.GPU
    image_pull_policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    args: tuple[str, ...] = ()
    cpu_per_gpu: int = 12
    memory_per_gpu: ByteQuantity = "32Gi"
    extra_shm: ByteQuantity = "4Gi"
    resources: Resources | None = None
    """Set exactly with device cpu, where it replaces the requests derived from the plan (C27)."""


class CpuProfile(ApiStruct):
    pretend_gpus: bool = False


class PrefillPoolSpec(ApiStruct):
    model: ModelBlock
    engine: EngineSpec
    replicas: int = 1
    """N, without spares."""
    paused: bool = False
    gpu: GpuSpec = GpuSpec()
    cpu: CpuProfile = CpuProfile()
    expert_parallel: ExpertParallelSpec = ExpertParallelSpec()
    context: ContextSpec = ContextSpec()
    engram: EngramBlock = EngramBlock()
    kv_cache: KvCacheSpec = KvCacheSpec()
    quota: QuotaSpec = QuotaSpec()
    autoscaling: PoolAutoscaling | None = None
    kvd: KvdSpec = KvdSpec()
    vision: PoolVisionSpec = PoolVisionSpec()
    rollout: RolloutSpec = RolloutSpec()
    lifecycle: LifecycleSpec = LifecycleSpec()
    scheduling: SchedulingSpec = SchedulingSpec()
    network: NetworkSpec = NetworkSpec()
    pod_template: PodOverlay = PodOverlay()
    monitoring: MonitoringSpec = MonitoringSpec()
