"""Which EP a GPU needs: tries every EP, Engram place and reduced setting, and explains the choice or the refusal (R2).

Used by `prefill-engine plan` and the operator. The trap: a reduced tier changes what an engine can do (smaller chunks,
fewer sequences, no redundant experts), so the smallest EP at full configuration is reported beside the smallest at any
tier.
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec.structs import replace

from prefill_plan.config import Struct
from prefill_plan.memory_sum import EngramPlace, MemoryPlan, PlanSettings, WeightBytes, WorkspaceBytes, plan_memory
from prefill_plan.model_spec import ModelSpec

__all__ = [
    "FULL_TIER",
    "GPU_BYTES",
    "PLANNED_EP_SIZES",
    "EngramPlace",
    "MemoryChoice",
    "MemoryOption",
    "MemoryPlan",
    "PlanSettings",
    "WeightBytes",
    "WorkspaceBytes",
    "minimum_ep",
    "plan_memory",
    "plan_tiers",
]

GPU_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "H100-80": 84_900_000_000,
        "A100-80": 85_000_000_000,
        "H20-96": 102_600_000_000,
        "RTXPRO6000-96": 102_000_000_000,
        "H200-141": 150_100_000_000,
        "H20-141": 150_100_000_000,
        "B200-180/192": 191_500_000_000,
        "MI300X-192": 206_100_000_000,
        "GB300-288": 288_400_000_000,
    }
)
"""Usable bytes by GPU, as the driver reports them (perf.md 4.1)."""

PLANNED_EP_SIZES = (2, 4, 8)
"""EP sizes of a production engine (R1), ascending."""

FULL_TIER = "full"


class MemoryOption(Struct):
    """One EP and Engram place: the full configuration, and the first tier that fits."""

    ep_size: int
    engram: EngramPlace
    full: MemoryPlan
    tier: str | None
    """Name of the first tier that fits; "full" = no reduction; None = no tier fits."""
    plan: MemoryPlan
    """The plan of that tier; of the smallest tier if none fits."""

    @property
    def name(self) -> str:
        return f"EP{self.ep_size}, Engram on {self.engram}"


class MemoryChoice(Struct):
    """Result of the search."""

    options: tuple[MemoryOption, ...]
    """In the order of preference: EP ascending, Engram on the GPU before the host (C15)."""
    full_ep: int | None
    """Smallest EP that fits at full configuration; None = no EP does."""
    any_ep: int | None
    """Smallest EP that fits in any tier."""
    chosen: MemoryOption | None
    """The first option that fits in any tier."""

    def explain(self) -> str:
        """Why this EP, or why none: one line per option, with its sum and the limit."""
        lines = []
        for option in self.options:
            if option.tier:
                lines.append(f"{option.name} fits, tier {option.tier}: {option.plan.explain()}")
                break
            lines.append(f"{option.name} does not fit in any tier; the smallest: {option.plan.explain()}")
        return "\n".join(lines)


def plan_tiers(settings: PlanSettings) -> tuple[tuple[str, PlanSettings], ...]:
    """The full configuration and its reductions, in the order in which they are tried (perf.md 4.2).

    A tier never raises a setting, and its pool always holds one prompt of the context.
    """
    chunk_16k = replace(settings, chunk_tokens=min(settings.chunk_tokens, 16_384))
    chunk_8k = replace(settings, chunk_tokens=min(settings.chunk_tokens, 8_192))
    few = replace(
        chunk_8k,
        moe_sub_tokens=min(settings.moe_sub_tokens, 4_096),
        max_sequences=min(settings.max_sequences, 16),
    )
    no_redundant = replace(few, redundant_experts=0)
    smallest = replace(
        no_redundant,
        chunk_tokens=min(settings.chunk_tokens, 4_096),
        moe_sub_tokens=min(settings.moe_sub_tokens, 2_048),
        max_sequences=min(settings.max_sequences, 8),
        pool_tokens=min(settings.pool_tokens, max(262_144, settings.context_tokens)),
    )
    return (
        (FULL_TIER, settings),
        ("C16k", chunk_16k),
        ("C8k", chunk_8k),
        ("C8k,sub4k,16seq", few),
        ("R0,C8k,sub4k,16seq", no_redundant),
        ("R0,C4k,sub2k,8seq,256k", smallest),
    )


def minimum_ep(
    spec: ModelSpec,
    *,
    usable_bytes: int,
    settings: PlanSettings,
    engram_places: tuple[EngramPlace, ...] = (EngramPlace.GPU, EngramPlace.HOST),
    ep_sizes: tuple[int, ...] = PLANNED_EP_SIZES,
) -> MemoryChoice:
    """Smallest EP that fits, at full configuration and at any tier, and the option to take.

    Args:
        usable_bytes: memory of one GPU as the driver reports it (GPU_BYTES).
        settings: the full configuration.
        engram_places: allowed places, in order of preference; both in this order is `auto`.
        ep_sizes: allowed sizes, ascending.

    Raises:
        PlanError: settings that no engine can have. A GPU that is too small is no error: chosen is then None.
        ConfigError: keep_tokens below window + rollback.
    """
    options = tuple(
        _try_tiers(spec, usable_bytes=usable_bytes, ep_size=ep_size, engram=engram, settings=settings)
        for ep_size in ep_sizes
        for engram in engram_places
    )
    return MemoryChoice(
        options=options,
        full_ep=next((option.ep_size for option in options if option.full.fits), None),
        any_ep=next((option.ep_size for option in options if option.tier), None),
        chosen=next((option for option in options if option.tier), None),
    )


def _try_tiers(
    spec: ModelSpec, *, usable_bytes: int, ep_size: int, engram: EngramPlace, settings: PlanSettings
) -> MemoryOption:
    plans = [
        (name, plan_memory(spec, usable_bytes=usable_bytes, ep_size=ep_size, engram=engram, settings=reduced))
        for name, reduced in plan_tiers(settings)
    ]
    tier, plan = next(((name, plan) for name, plan in plans if plan.fits), (None, plans[-1][1]))
    return MemoryOption(ep_size=ep_size, engram=engram, full=plans[0][1], tier=tier, plan=plan)
