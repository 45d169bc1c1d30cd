"""From the spec of a pool to what each of its pods is: EP, Engram place, bytes, revision; or the refusal with its sums.

Pure and without a cluster; reconcile, `prefill-operator plan` and rendering start here. The byte model is that of
prefill_plan.memory; a rank on a GPU sums again at start, for what it really holds there (prefill_engine.memory_check), and the
engine logs the hash it was given (k8s.md 4.3). The trap: an escalated EP floor is sticky, but only while the inputs of the plan
are those it was found with (k8s.md 4.4).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from prefill_operator.api import Pool
from prefill_operator.api_status import PlannedEngram, PlanSource
from prefill_operator.gpu_products import gpu_bytes
from prefill_operator.host_memory import engine_memory_bytes, kvd_memory_bytes
from prefill_operator.model import ObservedNode
from prefill_operator.names import Reason
from prefill_operator.pool_api import (
    DEFAULT_TOKENS_PER_GPU,
    Architecture,
    EngramPlacement,
    PrefillPoolSpec,
    VisionSource,
)
from prefill_operator.pool_vision import vision_gpu_bytes, vision_shm_bytes
from prefill_operator.quantity import quantity_bytes
from prefill_operator.revision import digest_json, revision_hash
from prefill_operator.ve_api import VEPoolSpec
from prefill_plan.config import Device, RecordFormat
from prefill_plan.errors import PrefillError
from prefill_plan.kv_layout import BLOCK_TOKENS, block_layout
from prefill_plan.memory import GPU_BYTES, EngramPlace, MemoryOption, MemoryPlan, PlanSettings, minimum_ep
from prefill_plan.model_spec import ModelSpec

EP_STEPS = (2, 4, 8)
"""EP sizes of a PE, ascending (R1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EPFloor:
    """An escalated EP: `4@1f2e3d4c` in the annotation prefill.dev/ep-floor. `inputs` is PoolPlan.inputs_hash."""

    ep: int
    inputs: str

    def text(self) -> str:
        return f"{self.ep}@{self.inputs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """What each new pod of the pool is. Infeasible: ep is 0, revision and hash are empty, and message holds the sums."""

    feasible: bool
    reason: Reason
    """Of the condition PlanFeasible."""
    message: str
    inputs_hash: str
    """Of everything the plan depends on; an EP floor is bound to it."""
    ep: int = 0
    gpus: int = 0
    """GPUs a pod requests: the EP, or 0 in the CPU profile without pretended GPUs."""
    source: PlanSource = PlanSource.PLANNER
    device: Device = Device.GPU
    engram: PlannedEngram | None = None
    degraded: str = ""
    """The reduced tier in use; "" = full configuration."""
    memory: MemoryPlan | None = None
    """None where no memory is planned: CPU profile, test-tiny, VEPool."""
    kv_tokens_per_gpu: int | None = None
    host_bytes_per_pod: int = 0
    """Host memory a PE needs, as its containers request it: Engram copy, pools, shared memory, engine processes, kvd."""
    hash: str = ""
    """Given to the engine as PLAN_HASH; comes back in its termination message."""
    revision: str = ""
    notes: tuple[str, ...] = ()
    """What the cluster does not have, e.g. no node with this product; informs only."""

    @property
    def engram_host_bytes(self) -> int:
        """The PE's copy of the Engram tables in host memory; 0 when they are on GPUs or no memory is planned."""
        return self.memory.host_bytes if self.memory is not None else 0


def parse_floor(text: str | None) -> EPFloor | None:
    """From the annotation; None when absent or not of our making (then it is void)."""
    ep, separator, inputs = (text or "").partition("@")
    if not separator or ep not in {str(step) for step in EP_STEPS} or not inputs:
        return None
    return EPFloor(ep=int(ep), inputs=inputs)


def next_ep(spec: PrefillPoolSpec, ep: int) -> int | None:
    """The EP above this one that the spec allows; None at the top, and when the user fixed the size."""
    if spec.expert_parallel.fixed_size is not None:
        return None
    return next((step for step in allowed_steps(spec) if step > ep), None)


def plan_pool(
    pool: Pool, *, floor: EPFloor | None, nodes: tuple[ObservedNode, ...] | None, model: ModelSpec
) -> PoolPlan:
    """The plan of a pool.

    Args:
        floor: from the pool's annotation; void unless its inputs are those of the spec.
        nodes: only to remark on what the cluster does not have; None when they may not be read.
        model: the released model; other architectures bring no memory plan.
    """
    if isinstance(pool.spec, VEPoolSpec):
        return _plan_encoder(pool.spec)
    spec = pool.spec
    inputs = planner_inputs_hash(spec)
    lowest = floor.ep if floor and floor.inputs == inputs and spec.expert_parallel.fixed_size is None else 0
    steps = tuple(step for step in allowed_steps(spec) if step >= lowest)
    has_sum = plans_memory(spec)
    plan = _plan_with_memory(spec, steps, inputs, model) if has_sum else _plan_without_memory(spec, steps, inputs)
    if not plan.feasible:
        return plan
    escalated = any(step < lowest for step in allowed_steps(spec))
    if escalated:
        message = f"EP {plan.ep}, raised after out-of-memory ends (floor {lowest}): {plan.message}"
        plan = replace(plan, source=PlanSource.ESCALATED, reason=Reason.ESCALATED, message=message)
    return _sealed(spec, replace(plan, notes=_node_notes(spec, plan.gpus, nodes)))


def planner_inputs_hash(spec: PrefillPoolSpec) -> str:
    """Eight hex digits over everything that the plan depends on (k8s.md 4.4: revision, GPU, context, chunk, slots, KV)."""
    ep = spec.expert_parallel
    pools = (spec.kv_cache.host_pool, spec.kv_cache.swa_pool)
    sizes = (spec.gpu.reserved, *pools, spec.engine.memory_per_gpu, spec.engine.extra_shm)
    optional = (spec.gpu.memory, spec.gpu.host_memory_per_node, spec.kv_cache.budget_per_gpu)
    # Absent where nobody encodes images or no kvd runs, so that pools from before these keep their EP floor.
    vision = {} if spec.vision.mode is VisionSource.NONE else {"vision": [spec.vision.mode, vision_shm_bytes(spec)]}
    kvd = {"kvdBytes": kvd_memory_bytes(spec)} if spec.kvd.enabled else {}
    return digest_json(
        {
            **vision,
            **kvd,
            "model": [spec.model.architecture, spec.model.name, spec.model.revision, spec.model.manifest_sha256],
            "device": [spec.engine.device, spec.cpu.pretend_gpus],
            "gpu": [spec.gpu.product, spec.gpu.per_node],
            "ep": [str(ep.size), ep.min, ep.max, ep.redundancy_slots, ep.allow_degraded],
            "engram": spec.engram.placement,
            "context": msgspec.structs.astuple(spec.context),
            "kv": [spec.kv_cache.tokens_per_gpu, spec.kv_cache.sequences_per_gpu, spec.kv_cache.fill_spare],
            "bytes": [quantity_bytes(size) for size in sizes],
            "optionalBytes": [None if size is None else quantity_bytes(size) for size in optional],
        },
        digits=8,
    )


def allowed_steps(spec: PrefillPoolSpec) -> tuple[int, ...]:
    """EP sizes that the spec allows, ascending."""
    ep = spec.expert_parallel
    if ep.fixed_size is not None:
        return (ep.fixed_size,)
    return tuple(step for step in EP_STEPS if ep.min <= step <= ep.max)


def _sealed(spec: PrefillPoolSpec, plan: PoolPlan) -> PoolPlan:
    """With the hashes that name the plan."""
    engram = str(plan.engram or "")
    identity = [plan.inputs_hash, plan.ep, engram, plan.degraded, plan.kv_tokens_per_gpu]
    return replace(
        plan,
        hash=digest_json(identity, digits=12),
        revision=revision_hash(spec, ep=plan.ep, engram=engram, degraded=plan.degraded),
    )


def _plan_encoder(spec: VEPoolSpec) -> PoolPlan:
    """A VE is one GPU, or none with device cpu; there is nothing to choose (C39)."""
    on_cpu = spec.encoder.device is Device.CPU
    revision = revision_hash(spec, ep=1, engram="", degraded="")
    return PoolPlan(
        feasible=True,
        reason=Reason.FIXED,
        message="CPU profile: no GPU, figures are not a GPU's" if on_cpu else "one GPU per VE",
        inputs_hash=revision,
        ep=1,
        gpus=0 if on_cpu else 1,
        device=spec.encoder.device,
        source=PlanSource.FIXED,
        hash=digest_json([revision, 1], digits=12),
        revision=revision,
    )


def _plan_without_memory(spec: PrefillPoolSpec, steps: tuple[int, ...], inputs: str) -> PoolPlan:
    """CPU profile and test-tiny: the smallest allowed EP, no sum (C27)."""
    if not steps:
        return _refused(spec, inputs, Reason.NO_EP_FITS, "no EP in expertParallel.min..max is allowed")
    on_cpu = spec.engine.device is Device.CPU
    fixed = spec.expert_parallel.fixed_size is not None
    what = "CPU profile: no GPU memory is planned, figures are not a GPU's" if on_cpu else "test-tiny: not planned"
    return PoolPlan(
        feasible=True,
        reason=Reason.FIXED if fixed else Reason.MINIMUM_EP,
        message=f"EP {steps[0]}; {what}",
        inputs_hash=inputs,
        ep=steps[0],
        gpus=steps[0] if not on_cpu or spec.cpu.pretend_gpus else 0,
        source=PlanSource.FIXED if fixed else PlanSource.PLANNER,
        device=spec.engine.device,
    )


def _plan_with_memory(spec: PrefillPoolSpec, steps: tuple[int, ...], inputs: str, model: ModelSpec) -> PoolPlan:
    if usable_bytes(spec) is None:
        named = f'gpu.product "{spec.gpu.product}" is not in the table' if spec.gpu.product else "no gpu.product given"
        text = (
            f"{named}; set gpu.memory to what nvidia-smi reports as total, or use a known one: {', '.join(GPU_BYTES)}"
        )
        return _refused(spec, inputs, Reason.UNKNOWN_GPU, text)
    try:
        options = memory_options(spec, steps, model=model)
    except PrefillError as error:
        return _refused(spec, inputs, Reason.SPEC_INVALID, error.message)
    short_of_host = ""
    for option in options:
        memory = _chosen_plan(option, allow_degraded=spec.expert_parallel.allow_degraded)
        if memory is None:
            continue
        host_text, host_fits = _check_host(spec, memory)
        if host_fits:
            tier = "" if memory is option.full else option.tier or ""
            return _accepted(spec, inputs, memory, tier=tier, text=f"{option.name}: {memory.explain()}; {host_text}")
        short_of_host = short_of_host or f"{option.name} fits the GPU ({memory.explain()}), but {host_text}"
    if short_of_host:
        return _refused(spec, inputs, Reason.HOST_MEMORY_SHORT, short_of_host)
    return _refused(spec, inputs, Reason.NO_EP_FITS, _explain_refusal(spec, options))


def _chosen_plan(option: MemoryOption, *, allow_degraded: bool) -> MemoryPlan | None:
    if option.full.fits:
        return option.full
    return option.plan if allow_degraded and option.tier else None


def _explain_refusal(spec: PrefillPoolSpec, options: Iterable[MemoryOption]) -> str:
    lines = [f"{option.name}: {option.full.explain()}" for option in options]
    reduced = [option for option in options if option.tier and not option.full.fits]
    if reduced and not spec.expert_parallel.allow_degraded:
        lines.append(f"{reduced[0].name} fits in tier {reduced[0].tier} with expertParallel.allowDegraded")
    return "no EP fits. " + ". ".join(lines)


def _accepted(spec: PrefillPoolSpec, inputs: str, memory: MemoryPlan, *, tier: str, text: str) -> PoolPlan:
    fixed = spec.expert_parallel.fixed_size is not None
    reason = Reason.DEGRADED if tier else Reason.FIXED if fixed else Reason.MINIMUM_EP
    return PoolPlan(
        feasible=True,
        reason=reason,
        message=f"{text}; tier {tier}" if tier else text,
        inputs_hash=inputs,
        ep=memory.ep_size,
        gpus=memory.ep_size,
        source=PlanSource.FIXED if fixed else PlanSource.PLANNER,
        engram=PlannedEngram.GPU if memory.engram is EngramPlace.GPU else PlannedEngram.HOST,
        degraded=tier,
        memory=memory,
        kv_tokens_per_gpu=memory.max_pool_tokens if spec.kv_cache.fill_spare else memory.settings.pool_tokens,
        host_bytes_per_pod=_engine_bytes(spec, memory) + kvd_memory_bytes(spec),
    )


def _refused(spec: PrefillPoolSpec, inputs: str, reason: Reason, message: str) -> PoolPlan:
    return PoolPlan(feasible=False, reason=reason, message=message, inputs_hash=inputs, device=spec.engine.device)


def plan_settings(spec: PrefillPoolSpec, model: ModelSpec) -> PlanSettings:
    """The full configuration that the user asks for. The pool always holds one whole prompt, whatever is written."""
    tokens = spec.kv_cache.tokens_per_gpu or DEFAULT_TOKENS_PER_GPU
    if spec.kv_cache.budget_per_gpu is not None:
        stride = block_layout(model, RecordFormat.FP4).stride_bytes
        tokens = quantity_bytes(spec.kv_cache.budget_per_gpu) // stride * BLOCK_TOKENS
    return PlanSettings(
        context_tokens=spec.context.max_tokens,
        chunk_tokens=spec.context.chunk_tokens_per_gpu,
        redundant_experts=spec.expert_parallel.redundancy_slots,
        max_sequences=spec.kv_cache.sequences_per_gpu,
        pool_tokens=max(tokens, spec.context.max_tokens),
        keep_tokens=spec.context.keep_tokens,
        rollback_tokens=spec.context.max_rollback_tokens,
        reserved_bytes=quantity_bytes(spec.gpu.reserved) + vision_gpu_bytes(spec),
    )


def plans_memory(spec: PrefillPoolSpec) -> bool:
    """False in the CPU profile and for the tiny test model: the sums are those of the released model on GPUs (C27)."""
    return spec.engine.device is not Device.CPU and spec.model.architecture is not Architecture.TEST_TINY


def usable_bytes(spec: PrefillPoolSpec) -> int | None:
    """Of one GPU, as its driver reports them; None for a product that is not in the table."""
    return quantity_bytes(spec.gpu.memory) if spec.gpu.memory is not None else gpu_bytes(spec.gpu.product or "")


def memory_options(spec: PrefillPoolSpec, steps: tuple[int, ...], *, model: ModelSpec) -> tuple[MemoryOption, ...]:
    """The sum of every EP and Engram place that the spec allows, in the order of preference; none for an unknown GPU.

    Raises:
        PlanError, ConfigError: settings that no engine can have.
    """
    usable = usable_bytes(spec)
    if usable is None:
        return ()
    places = _engram_places(spec.engram.placement)
    settings = plan_settings(spec, model)
    return minimum_ep(model, usable_bytes=usable, settings=settings, engram_places=places, ep_sizes=steps).options


def _engram_places(placement: EngramPlacement) -> tuple[EngramPlace, ...]:
    match placement:
        case EngramPlacement.GPU:
            return (EngramPlace.GPU,)
        case EngramPlacement.HOST:
            return (EngramPlace.HOST,)
        case EngramPlacement.AUTO:
            return (EngramPlace.GPU, EngramPlace.HOST)


def _engine_bytes(spec: PrefillPoolSpec, memory: MemoryPlan) -> int:
    return engine_memory_bytes(spec, ep=memory.ep_size, engram_bytes=memory.host_bytes)


def _check_host(spec: PrefillPoolSpec, memory: MemoryPlan) -> tuple[str, bool]:
    """The sum of host memory on a full node, and whether it fits what the user says a node has."""
    engines = max(1, spec.gpu.per_node // memory.ep_size)
    engine, sidecar = _engine_bytes(spec, memory), kvd_memory_bytes(spec)
    need = engines * (engine + sidecar)
    each = f"({engine / 1e9:.1f} engine + {sidecar / 1e9:.1f} kvd)" if sidecar else f"{engine / 1e9:.1f}"
    text = f"host memory {engines} PEs x {each} = {need / 1e9:.1f} GB per node"
    if spec.gpu.host_memory_per_node is None:
        return text, True
    limit = quantity_bytes(spec.gpu.host_memory_per_node)
    return f"{text}, limit {limit / 1e9:.1f} GB", need <= limit


def _node_notes(spec: PrefillPoolSpec, gpus: int, nodes: tuple[ObservedNode, ...] | None) -> tuple[str, ...]:
    """What the plan asks for and no node has now; it may come with the next node, so nothing is refused."""
    if not nodes or not gpus:
        return ()
    fitting = [node for node in nodes if spec.gpu.product in (None, "", node.gpu_product)]
    if not fitting:
        found = ", ".join(sorted({node.gpu_product for node in nodes if node.gpu_product})) or "none"
        return (f"no node has gpu.product {spec.gpu.product} (found: {found})",)
    largest = max(node.gpu_capacity for node in fitting)
    return (f"a PE needs {gpus} GPUs on one node, the largest node has {largest}",) if largest < gpus else ()
