"""Pools for tests of the planner: specs in which only the numbers of pods matter, everything else at its default."""

from prefill_operator.api import Pool
from prefill_operator.api_parts import LifecycleSpec, PvcSource, RolloutSpec
from prefill_operator.api_status import PoolStatus, VEPoolStatus
from prefill_operator.names import Kind
from prefill_operator.pool_api import (
    Architecture,
    EngineSpec,
    ExpertParallelSpec,
    GpuSpec,
    ModelBlock,
    ModelSource,
    PrefillPoolSpec,
    QuotaSpec,
    RedundancySpec,
)
from prefill_operator.ve_api import EncoderSpec, VEModelBlock, VEModelSource, VEPoolSpec

ENGINE_A = EngineSpec(image="registry.example/engine:a")
ENGINE_B = EngineSpec(image="registry.example/engine:b")
ENGINE_C = EngineSpec(image="registry.example/engine:c")


def make_spec(
    *,
    replicas: int = 4,
    spares: int = 0,
    surge: int = 1,
    unavailable: int = 0,
    rollout: RolloutSpec | None = None,
    lifecycle: LifecycleSpec | None = None,
    quota: QuotaSpec | None = None,
    ep: ExpertParallelSpec | None = None,
    gpu: GpuSpec | None = None,
    architecture: Architecture = Architecture.TEST_TINY,
    engine: EngineSpec = ENGINE_A,
) -> PrefillPoolSpec:
    """A test-tiny pool on GPUs: EP 2 without a memory plan; no minReadySeconds, no caps."""
    return PrefillPoolSpec(
        model=ModelBlock(
            name="flash",
            revision="1",
            source=ModelSource(pvc=PvcSource(claim_name="weights")),
            architecture=architecture,
        ),
        engine=engine,
        gpu=gpu or GpuSpec(),
        replicas=replicas,
        expert_parallel=ep or ExpertParallelSpec(),
        quota=quota or QuotaSpec(redundancy=RedundancySpec(spares=spares)),
        rollout=rollout or RolloutSpec(max_surge=surge, max_unavailable=unavailable, min_ready_seconds=0),
        lifecycle=lifecycle or LifecycleSpec(max_concurrent_loads=0, max_concurrent_drains=0),
    )


def make_pool(spec: PrefillPoolSpec | VEPoolSpec, *, name: str = "flash") -> Pool:
    is_prefill = isinstance(spec, PrefillPoolSpec)
    return Pool(
        kind=Kind.PREFILL_POOL if is_prefill else Kind.VE_POOL,
        name=name,
        namespace="default",
        uid="pool-uid",
        generation=1,
        resource_version="1",
        annotations={},
        is_deleting=False,
        spec=spec,
        status=PoolStatus() if is_prefill else VEPoolStatus(),
    )


def make_ve_spec(*, replicas: int = 2, image: str = "registry.example/encoder:a") -> VEPoolSpec:
    source = VEModelSource(pvc=PvcSource(claim_name="encoder"))
    return VEPoolSpec(
        model=VEModelBlock(name="vit", revision="1", source=source), encoder=EncoderSpec(image=image), replicas=replicas
    )
