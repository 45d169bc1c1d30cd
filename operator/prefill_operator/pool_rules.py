"""The cross-field rules of a PrefillPool (see api_rules)."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from prefill_operator.api_parts import Actuator, HostPathSource, PvcSource
from prefill_operator.api_rules import Rule, can_roll, count_set, has_time, is_capped, is_ordered
from prefill_operator.pool_api import (
    Architecture,
    AvailabilitySpec,
    ExpertParallelSpec,
    KvdSpec,
    KvdStore,
    KvdTransportKind,
    ModelSource,
    PoolVisionSpec,
    PrefillPoolSpec,
    RedundancyMode,
    ThreeFSSource,
    VisionSource,
    WeightsMountMode,
)
from prefill_operator.quantity import quantity_bytes
from prefill_plan.config import Device

_MIN_GPU_BYTES = 8 << 30
_EP_SIZES = (2, 4, 8)
# config.json: sliding_window of the released model and of the tiny test checkpoint.
_WINDOW_TOKENS: Mapping[Architecture, int] = MappingProxyType({Architecture.FLASH: 128, Architecture.TEST_TINY: 16})

PREFILL_RULES: tuple[Rule[PrefillPoolSpec], ...] = (
    Rule(
        path="spec.replicas",
        message="replicas must not exceed quota.maxPEs",
        holds=lambda spec: spec.quota.max_pes is None or spec.replicas <= spec.quota.max_pes,
    ),
    Rule(
        path="spec.autoscaling.maxReplicas",
        message="autoscaling.maxReplicas must not exceed quota.maxPEs",
        holds=lambda spec: is_capped(spec.autoscaling, spec.quota.max_pes),
    ),
    Rule(
        path="spec.model.source",
        message="exactly one of pvc, threeFS, hostPath",
        holds=lambda spec: count_set(*_model_sources(spec.model.source)) == 1,
    ),
    Rule(
        path="spec.model.source",
        message="path must not contain ..",
        holds=lambda spec: not any(source and ".." in source.path for source in _model_sources(spec.model.source)),
    ),
    Rule(
        path="spec.model.source.threeFS",
        message="mountMode Shared needs image, clusterID, mgmtdAddresses and tokenSecretRef",
        holds=lambda spec: (
            not _is_mounted_by_us(spec.model.source.three_fs) or all(_connection(spec.model.source.three_fs))
        ),
    ),
    Rule(
        path="spec.model.source.threeFS",
        message="image, clusterID, mgmtdAddresses and tokenSecretRef are only allowed with mountMode Shared",
        holds=lambda spec: (
            _is_mounted_by_us(spec.model.source.three_fs) or not any(_connection(spec.model.source.three_fs))
        ),
    ),
    Rule(
        path="spec.gpu",
        message="gpu.product or gpu.memory is required to plan the EP size, except with engine.device cpu",
        holds=lambda spec: _is_cpu(spec) or count_set(spec.gpu.product, spec.gpu.memory) > 0,
    ),
    Rule(
        path="spec.gpu.memory",
        message="gpu.memory must be above 8Gi",
        holds=lambda spec: spec.gpu.memory is None or quantity_bytes(spec.gpu.memory) > _MIN_GPU_BYTES,
    ),
    Rule(
        path="spec.engine.device",
        message="engine.device cpu needs model.architecture test-tiny: it is for laptops and tests",
        holds=lambda spec: not _is_cpu(spec) or spec.model.architecture is Architecture.TEST_TINY,
    ),
    Rule(
        path="spec.engine.resources",
        message="resources is required with device cpu",
        holds=lambda spec: not _is_cpu(spec) or spec.engine.resources is not None,
    ),
    Rule(
        path="spec.engine.resources",
        message="resources is only allowed with device cpu; with gpu the requests follow from the plan",
        holds=lambda spec: _is_cpu(spec) or spec.engine.resources is None,
    ),
    Rule(
        path="spec.cpu.pretendGPUs",
        message="cpu.pretendGPUs needs engine.device cpu",
        holds=lambda spec: _is_cpu(spec) or not spec.cpu.pretend_gpus,
    ),
    Rule(
        path="spec.expertParallel",
        message="expertParallel.min and max must be 2, 4 or 8",
        holds=lambda spec: spec.expert_parallel.min in _EP_SIZES and spec.expert_parallel.max in _EP_SIZES,
    ),
    Rule(
        path="spec.expertParallel.min",
        message="expertParallel.min must not exceed max",
        holds=lambda spec: spec.expert_parallel.min <= spec.expert_parallel.max,
    ),
    Rule(
        path="spec.expertParallel.size",
        message="size must be auto, 2, 4 or 8",
        holds=lambda spec: spec.expert_parallel.size in (*_EP_SIZES, "auto", "2", "4", "8"),
    ),
    Rule(
        path="spec.expertParallel.size",
        message="size must not be below min or above max",
        holds=lambda spec: _is_in_range(spec.expert_parallel),
    ),
    Rule(
        path="spec.expertParallel.redundancySlots",
        message="redundancySlots must be divisible by expertParallel.max",
        holds=lambda spec: spec.expert_parallel.redundancy_slots % spec.expert_parallel.max == 0,
    ),
    Rule(
        path="spec.expertParallel.max",
        message="expertParallel.max must not exceed gpu.perNode: one PE never spans nodes",
        holds=lambda spec: spec.expert_parallel.max <= spec.gpu.per_node,
    ),
    Rule(
        path="spec.context.chunkTokensPerGPU",
        message="context.chunkTokensPerGPU must not exceed context.maxTokens",
        holds=lambda spec: spec.context.chunk_tokens_per_gpu <= spec.context.max_tokens,
    ),
    Rule(
        path="spec.context.keepTokens",
        message="context.keepTokens must be smaller than context.chunkTokensPerGPU",
        holds=lambda spec: spec.context.keep_tokens < spec.context.chunk_tokens_per_gpu,
    ),
    Rule(
        path="spec.context.keepTokens",
        message="context.keepTokens must be at least the window (128; test-tiny: 16) + context.maxRollbackTokens",
        holds=lambda spec: (
            spec.context.keep_tokens >= _WINDOW_TOKENS[spec.model.architecture] + spec.context.max_rollback_tokens
        ),
    ),
    Rule(
        path="spec.kvCache",
        message="set only one of kvCache.budgetPerGPU and kvCache.tokensPerGPU",
        holds=lambda spec: count_set(spec.kv_cache.budget_per_gpu, spec.kv_cache.tokens_per_gpu) < 2,
    ),
    Rule(
        path="spec.quota.redundancy.availability",
        message="redundancy.availability is required when mode is Availability",
        holds=lambda spec: (
            spec.quota.redundancy.mode is not RedundancyMode.AVAILABILITY
            or spec.quota.redundancy.availability is not None
        ),
    ),
    Rule(
        path="spec.quota.redundancy.availability",
        message="redundancy.availability is not allowed when mode is None",
        holds=lambda spec: (
            spec.quota.redundancy.mode is not RedundancyMode.NONE or spec.quota.redundancy.availability is None
        ),
    ),
    Rule(
        path="spec.quota.redundancy.availability.target",
        message="target must be in [0.5, 1)",
        holds=lambda spec: _is_share(spec.quota.redundancy.availability),
    ),
    Rule(
        path="spec.quota.redundancy.availability",
        message="nodeMTBFSeconds and nodeRecoverySeconds need each other",
        holds=lambda spec: _has_both_node_times(spec.quota.redundancy.availability),
    ),
    Rule(
        path="spec.autoscaling.minReplicas",
        message="minReplicas must not exceed maxReplicas",
        holds=lambda spec: is_ordered(spec.autoscaling),
    ),
    Rule(
        path="spec.autoscaling.metrics",
        message="at least one metric is required for HPA or KEDA",
        holds=lambda spec: (
            spec.autoscaling is None or spec.autoscaling.actuator is Actuator.EXTERNAL or bool(spec.autoscaling.metrics)
        ),
    ),
    Rule(
        path="spec.kvd.image",
        message="image is required when kvd is enabled",
        holds=lambda spec: not spec.kvd.enabled or spec.kvd.image is not None,
    ),
    Rule(
        path="spec.kvd.required",
        message="kvd.required needs kvd.enabled",
        holds=lambda spec: not spec.kvd.required or spec.kvd.enabled,
    ),
    Rule(
        path="spec.kvd.path",
        message="path is required when store is file or usrbio",
        holds=lambda spec: not spec.kvd.enabled or spec.kvd.store is KvdStore.MEMORY or spec.kvd.path is not None,
    ),
    Rule(
        path="spec.kvd.path",
        message="path must not contain ..",
        holds=lambda spec: ".." not in (spec.kvd.path or "") and not _leaves_volume(spec.kvd),
    ),
    Rule(
        path="spec.kvd.volume",
        message="volume is required when store is file",
        holds=lambda spec: not spec.kvd.enabled or spec.kvd.store is not KvdStore.FILE or spec.kvd.volume is not None,
    ),
    Rule(
        path="spec.kvd.volume",
        message="volume is only allowed when store is file",
        holds=lambda spec: spec.kvd.store is KvdStore.FILE or spec.kvd.volume is None,
    ),
    Rule(
        path="spec.kvd.volume",
        message="exactly one of pvc, hostPath, emptyDir",
        holds=lambda spec: (
            spec.kvd.volume is None
            or count_set(spec.kvd.volume.pvc, spec.kvd.volume.host_path, spec.kvd.volume.empty_dir) == 1
        ),
    ),
    Rule(
        path="spec.kvd",
        message="clusterID, mgmtdAddresses and tokenSecretRef are required when store is usrbio",
        holds=lambda spec: (
            not spec.kvd.enabled
            or spec.kvd.store is not KvdStore.USRBIO
            or all((spec.kvd.cluster_id, spec.kvd.mgmtd_addresses, spec.kvd.token_secret_ref))
        ),
    ),
    Rule(
        path="spec.kvd",
        message="clusterID, mgmtdAddresses, tokenSecretRef and fuseDeviceResource are only allowed when store is usrbio",
        holds=lambda spec: spec.kvd.store is KvdStore.USRBIO or not any(_usrbio_only(spec.kvd)),
    ),
    Rule(
        path="spec.kvd.path",
        message="path must be below mountPath when store is usrbio",
        holds=lambda spec: (
            spec.kvd.store is not KvdStore.USRBIO
            or (spec.kvd.path or f"{spec.kvd.mount_path}/").startswith(f"{spec.kvd.mount_path}/")
        ),
    ),
    Rule(
        path="spec.kvd.transport",
        message="transport.requireRDMA needs transport.kind NIXL: TCP never uses RDMA",
        holds=lambda spec: not spec.kvd.transport.require_rdma or spec.kvd.transport.kind is KvdTransportKind.NIXL,
    ),
    Rule(
        path="spec.vision",
        message="exactly one of vePoolRef and endpoints with mode Remote",
        holds=lambda spec: spec.vision.mode is not VisionSource.REMOTE or _num_encoder_sources(spec.vision) == 1,
    ),
    Rule(
        path="spec.vision",
        message="vePoolRef, endpoints and numericsClass are only allowed with mode Remote",
        holds=lambda spec: (
            spec.vision.mode is VisionSource.REMOTE
            or (_num_encoder_sources(spec.vision) == 0 and spec.vision.numerics_class is None)
        ),
    ),
    Rule(
        path="spec.rollout",
        message="maxSurge and maxUnavailable must not both be 0",
        holds=lambda spec: can_roll(spec.rollout),
    ),
    Rule(
        path="spec.rollout.progressDeadlineSeconds",
        message="progressDeadlineSeconds must be greater than minReadySeconds",
        holds=lambda spec: has_time(spec.rollout),
    ),
)


def _is_cpu(spec: PrefillPoolSpec) -> bool:
    return spec.engine.device is Device.CPU


def _model_sources(source: ModelSource) -> tuple[PvcSource | ThreeFSSource | HostPathSource | None, ...]:
    return source.pvc, source.three_fs, source.host_path


def _is_mounted_by_us(source: ThreeFSSource | None) -> bool:
    return source is not None and source.mount_mode is WeightsMountMode.SHARED


def _connection(source: ThreeFSSource | None) -> tuple[object, ...]:
    return () if source is None else (source.image, source.cluster_id, source.mgmtd_addresses, source.token_secret_ref)


def _num_encoder_sources(vision: PoolVisionSpec) -> int:
    return (vision.ve_pool_ref is not None) + bool(vision.endpoints)


def _usrbio_only(kvd: KvdSpec) -> tuple[object, ...]:
    return kvd.cluster_id, kvd.mgmtd_addresses, kvd.token_secret_ref, kvd.fuse_device_resource


def _leaves_volume(kvd: KvdSpec) -> bool:
    sources = (kvd.volume.pvc, kvd.volume.host_path) if kvd.volume else ()
    return any(source is not None and ".." in source.path for source in sources)


def _is_in_range(parallel: ExpertParallelSpec) -> bool:
    return parallel.fixed_size is None or parallel.min <= parallel.fixed_size <= parallel.max


def _is_share(availability: AvailabilitySpec | None) -> bool:
    if availability is None:
        return True
    return re.fullmatch(r"0\.[0-9]{1,12}", availability.target) is not None and float(availability.target) >= 0.5


def _has_both_node_times(availability: AvailabilitySpec | None) -> bool:
    if availability is None:
        return True
    return count_set(availability.node_mtbf_seconds, availability.node_recovery_seconds) != 1
