"""Spec of a VEPool: vision encoders, one GPU each, planned like PEs with EP 1.

Fields are described for users in crds/vepools.yaml.
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
    RolloutSpec,
    SchedulingSpec,
)
from prefill_operator.quantity import ByteQuantity, ResourceQuantity
from prefill_plan.config import Device


class BalancingPolicy(StrEnum):
    LEAST_PENDING = "LeastPendingPatches"
    POWER_OF_TWO = "PowerOfTwoPatches"
    ROUND_ROBIN = "RoundRobin"


class PrefillPoolRef(ApiStruct):
    name: str


class ImageSource(ApiStruct):
    reference: str


class VEModelSource(ApiStruct):
    """Exactly one is set."""

    pvc: PvcSource | None = None
    host_path: HostPathSource | None = None
    image: ImageSource | None = None


class VEModelBlock(ApiStruct):
    name: str
    revision: str
    source: VEModelSource


class VEGpuSpec(ApiStruct):
    resource_name: str = "nvidia.com/gpu"
    product: str | None = None


class BatchingSpec(ApiStruct):
    max_patches_per_batch: int = 16_384
    max_patches_per_image: int = 9_216
    """9,216 = 1,024 tokens of 9 patches."""
    max_delay_milliseconds: int = 2


class BalancingSpec(ApiStruct):
    policy: BalancingPolicy = BalancingPolicy.LEAST_PENDING
    max_pending_patches_per_ve: int | None = None
    """None = four full batches (EncoderConfig.max_queued_patches)."""


class VEQuotaSpec(ApiStruct):
    max_ves: int | None = None
    spares: int = 1


class VEAutoscaling(AutoscalingSpec):
    target_pending_patches_per_ve: int = 32_768
    scale_down_stabilization_seconds: int = 300


class VERolloutSpec(RolloutSpec):
    min_ready_seconds: int = 10
    progress_deadline_seconds: int = 900


class VELifecycleSpec(LifecycleSpec):
    load_timeout_seconds: int = 300
    drain_timeout_seconds: int = 60
    max_concurrent_loads: int = 0


class VENetworkSpec(ApiStruct):
    host_network: bool = False
    rdma_resource_name: str | None = None
    rdma_per_ve: int = 1


class EncoderSpec(ApiStruct):
    image: str
    device: Device = Device.GPU
    image_pull_policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    args: tuple[str, ...] = ()
    cpu: ResourceQuantity = 8
    memory: ByteQuantity = "32Gi"


class VEPoolSpec(ApiStruct):
    model: VEModelBlock
    encoder: EncoderSpec
    replicas: int = 1
    """N, without spares."""
    paused: bool = False
    prefill_pool_ref: PrefillPoolRef | None = None
    gpu: VEGpuSpec = VEGpuSpec()
    batching: BatchingSpec = BatchingSpec()
    balancing: BalancingSpec = BalancingSpec()
    quota: VEQuotaSpec = VEQuotaSpec()
    autoscaling: VEAutoscaling | None = None
    rollout: VERolloutSpec = VERolloutSpec()
    lifecycle: VELifecycleSpec = VELifecycleSpec()
    scheduling: SchedulingSpec = SchedulingSpec()
    network: VENetworkSpec = VENetworkSpec()
    pod_template: PodOverlay = PodOverlay()
    monitoring: MonitoringSpec = MonitoringSpec()
