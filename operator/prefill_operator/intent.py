"""What the planner needs of a spec, in one form for both kinds of pool (k8s.md 4.2: one planner)."""

from dataclasses import dataclass

from prefill_operator.api import Pool
from prefill_operator.api_parts import AutoscalingSpec, LifecycleSpec, RolloutSpec, SchedulingSpec
from prefill_operator.names import Kind
from prefill_operator.pool_api import RedundancySpec
from prefill_operator.ve_api import VEPoolSpec

# A VEPool does not say how many GPUs a node has; only the failure domain of its spares depends on it.
_VE_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    kind: Kind
    name: str
    replicas: int
    """N, without spares."""
    paused: bool
    redundancy: RedundancySpec
    max_pods: int | None
    max_gpus: int | None
    rollout: RolloutSpec
    lifecycle: LifecycleSpec
    scheduling: SchedulingSpec
    autoscaling: AutoscalingSpec | None
    gpus_per_node: int
    gpu_product: str
    """"" = any."""
    watches_metrics: bool
    """A PodMonitor is wanted."""

    @property
    def noun(self) -> str:
        """What users call a pod of this pool."""
        return "PE" if self.kind is Kind.PREFILL_POOL else "VE"


def read_intent(pool: Pool) -> Intent:
    spec = pool.spec
    if isinstance(spec, VEPoolSpec):
        redundancy, max_pods, max_gpus = RedundancySpec(spares=spec.quota.spares), spec.quota.max_ves, None
        gpus_per_node = _VE_GPUS_PER_NODE
    else:
        redundancy, max_pods, max_gpus = spec.quota.redundancy, spec.quota.max_pes, spec.quota.max_gpus
        gpus_per_node = spec.gpu.per_node
    return Intent(
        kind=pool.kind,
        name=pool.name,
        replicas=spec.replicas,
        paused=spec.paused,
        redundancy=redundancy,
        max_pods=max_pods,
        max_gpus=max_gpus,
        rollout=spec.rollout,
        lifecycle=spec.lifecycle,
        scheduling=spec.scheduling,
        autoscaling=spec.autoscaling,
        gpus_per_node=gpus_per_node,
        gpu_product=spec.gpu.product or "",
        watches_metrics=spec.monitoring.pod_monitor,
    )
