"""What a rank will take of its GPU, by its own configuration, against what the GPU has: the sum that the operator planned with,
made again where checkpoint and device are known (k8s.md 4.3).

Called by rank/build.py before anything is loaded. The trap: nvidia-smi, the operator's table and CUDA name totals of one GPU that
differ by half a percent, and a pool may fill all that its plan left. So only what is more than the GPU has is refused; the share
that a plan keeps free for fragmentation takes up the rest.
"""

from prefill_plan.config import EngineConfig
from prefill_plan.errors import ConfigError
from prefill_plan.memory_sum import EngramPlace, MemoryPlan, PlanSettings, plan_memory
from prefill_plan.model_spec import ModelSpec


def check_memory(config: EngineConfig, spec: ModelSpec, *, usable_bytes: int) -> MemoryPlan:
    """The plan of one GPU, as this engine fills it: all experts of its share, none redundant, and Engram tables on the GPU. Not
    `fits`: it needs a part of what should stay free.

    Args:
        usable_bytes: memory of the GPU as its driver reports it.

    Raises:
        ConfigError: it needs more than the GPU has; the message has the sum and the limit.
        PlanError: sizes that no engine can have.
    """
    settings = PlanSettings(
        # A prompt is admitted only whole, so a pool that is smaller is the context.
        context_tokens=min(config.max_context_tokens, spec.max_position_tokens, config.kv.pool_tokens),
        chunk_tokens=config.scheduler.chunk_cap_tokens,
        redundant_experts=0,
        max_sequences=_num_sequences(config.kv.state_slots),
        pool_tokens=config.kv.pool_tokens,
        keep_tokens=config.replay.keep_tokens,
        rollback_tokens=config.replay.max_rollback_tokens,
        record_format=config.kv.record_format,
    )
    plan = plan_memory(
        spec,
        usable_bytes=usable_bytes,
        ep_size=config.parallel.ep_size,
        engram=EngramPlace.GPU,
        settings=settings,
    )
    if plan.need_bytes > usable_bytes:
        raise ConfigError(
            f"this GPU is too small for the configuration: {plan.explain()}; nothing was loaded. Lower kv.pool_tokens, "
            f"kv.state_slots, scheduler.chunk_cap_tokens or max_context_tokens, or take a larger GPU"
        )
    return plan


def _num_sequences(state_slots: int) -> int:
    """Sequences for which the sum counts at least so many slots: 2 x (1.2 x sequences + 1), as the operator renders them."""
    half = -(-state_slots // 2) - 1
    return max(1, -(-half * 10 // 12))
