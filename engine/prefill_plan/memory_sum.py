"""The memory sum of one GPU of a prefill engine: what is needed under given settings, against what the GPU has (perf.md
4.1).

Integer bytes throughout. memory.py searches over this sum; the operator and `prefill-engine plan` print it. The trap:
the activation terms are those of the GPU kernels (fp8 activations, bf16 outputs), whatever the checkpoint's weights are
stored in.
"""

from enum import StrEnum

from msgspec.structs import replace

from prefill_plan.config import RecordFormat, Struct
from prefill_plan.errors import PlanError
from prefill_plan.kv_layout import BLOCK_TOKENS, block_layout, main_record_bytes, state_layout
from prefill_plan.model_bytes import ModelBytes, count_model_bytes
from prefill_plan.model_spec import ModelSpec
from prefill_plan.positions import validate_keep

# CUDA context, collective heaps, cubins, allocator slack (perf.md 4.1: CTX).
_CONTEXT_BYTES = 2_500_000_000
# Lost to fragmentation (perf.md 4.1).
_FRAGMENTATION_PERMILLE = 30
# GPUs of an engine, DP = EP (R1); 1 only serves models that fit one GPU.
EP_SIZES = (1, 2, 4, 8)
# Most expert rows of one rank, relative to an even split (perf.md 4.1, DeepInfer's profile run).
_IMBALANCE_TENTHS = 18
# Index logits are made for at most this many rows and bytes at a time (perf.md 4.1).
_INDEX_TILE_ROWS = 8_192
_INDEX_TILE_BYTES = 1 << 30
_BF16 = 2


class EngramPlace(StrEnum):
    """Where Engram tables live: sharded over the GPUs, or one copy in host memory per node."""

    GPU = "gpu"
    HOST = "host"


class PlanSettings(Struct):
    """What a plan is made for. The defaults are the full configuration of perf.md 4.2."""

    context_tokens: int = 131_072
    """Longest prompt."""
    chunk_tokens: int = 32_768
    """Rows per step (R10)."""
    moe_sub_tokens: int = 8_192
    """The MoE phase runs over sub-chunks of this many rows."""
    redundant_experts: int = 32
    """Extra expert slots for load balancing (R15); (experts + redundant) must divide by EP."""
    max_sequences: int = 64
    """Sequences holding state at once per GPU."""
    pool_tokens: int = 1_048_576
    """Tokens of the Block KV pool per GPU."""
    gather_sequences: int = 4
    """Sequences whose KV is dequantised for attention at once (C15: n_seq)."""
    keep_tokens: int = 140
    rollback_tokens: int = 6
    record_format: RecordFormat = RecordFormat.FP4
    holds_draft: bool = False
    """Draft layers with all their experts are loaded."""
    holds_vision: bool = False
    """The vision tower is loaded (no separate vision encoder)."""
    expands_dense: bool = False
    """Dense fp8 weights are kept as bf16 (sm_90 exact path)."""
    reserved_bytes: int = _CONTEXT_BYTES
    """CUDA context, collective heaps, cubins, allocator slack."""


class WeightBytes(Struct):
    experts: int
    dense: int
    engram: int
    """0 when the tables are in host memory."""
    draft: int
    vision: int
    expansion: int

    @property
    def total(self) -> int:
        return self.experts + self.dense + self.engram + self.draft + self.vision + self.expansion


class WorkspaceBytes(Struct):
    residual: int
    """Two copies of the residual streams."""
    phase: int
    """The larger of attention and MoE."""
    index_logits: int
    kv_gather: int
    engram_staging: int
    all_to_all: int

    @property
    def total(self) -> int:
        return self.residual + self.phase + self.index_logits + self.kv_gather + self.engram_staging + self.all_to_all


class MemoryPlan(Struct):
    """The sum for one GPU, and the limit."""

    ep_size: int
    engram: EngramPlace
    settings: PlanSettings
    weights: WeightBytes
    kv_bytes: int
    state_bytes: int
    workspace: WorkspaceBytes
    context_bytes: int
    """CUDA context and other fixed costs."""
    usable_bytes: int
    """What the driver reports as total, not the label (perf.md 4.1)."""
    budget_bytes: int
    """usable_bytes less fragmentation."""
    host_bytes: int
    """Host memory per node for Engram tables, one copy for all ranks; 0 when on the GPU."""
    max_pool_tokens: int
    """Pool size if all spare memory went to it; 0 when the plan does not fit."""

    @property
    def need_bytes(self) -> int:
        return self.weights.total + self.kv_bytes + self.state_bytes + self.workspace.total + self.context_bytes

    @property
    def spare_bytes(self) -> int:
        """Negative: what is missing."""
        return self.budget_bytes - self.need_bytes

    @property
    def fits(self) -> bool:
        return self.spare_bytes >= 0

    def explain(self) -> str:
        """The sum, the limit and the verdict, in one line."""
        weights = self.weights
        parts = {
            "experts": weights.experts,
            "dense": weights.dense,
            "Engram": weights.engram,
            "draft": weights.draft,
            "vision": weights.vision,
            "bf16 expansion": weights.expansion,
            "KV pool": self.kv_bytes,
            "state": self.state_bytes,
            "workspace": self.workspace.total,
            "CUDA context": self.context_bytes,
        }
        terms = " + ".join(f"{name} {_gigabytes(value)}" for name, value in parts.items() if value)
        verdict = "to spare" if self.fits else "short"
        return (
            f"{terms} = {_gigabytes(self.need_bytes)} GB per GPU, limit "
            f"{_gigabytes(self.budget_bytes)} GB ({_gigabytes(self.usable_bytes)} usable less "
            f"{_FRAGMENTATION_PERMILLE / 10:g} %): {_gigabytes(abs(self.spare_bytes))} GB {verdict}"
        )


def plan_memory(
    spec: ModelSpec, *, usable_bytes: int, ep_size: int, engram: EngramPlace, settings: PlanSettings
) -> MemoryPlan:
    """Sum and limit of one GPU; a plan that does not fit is returned, not raised.

    Args:
        usable_bytes: memory of one GPU as the driver reports it.
        ep_size: GPUs of the engine, DP = EP.

    Raises:
        PlanError: an EP or setting that no engine can have, whatever the memory.
        ConfigError: keep_tokens below window + rollback.
    """
    _check_settings(spec, usable_bytes=usable_bytes, ep_size=ep_size, settings=settings)
    block_bytes = block_layout(spec, settings.record_format).stride_bytes
    state = state_layout(spec, keep_tokens=settings.keep_tokens, rollback_tokens=settings.rollback_tokens)
    tensors = count_model_bytes(spec)
    kv_bytes = _ceil_div(settings.pool_tokens, BLOCK_TOKENS) * block_bytes
    plan = MemoryPlan(
        ep_size=ep_size,
        engram=engram,
        settings=settings,
        weights=_sum_weights(spec, tensors, ep_size=ep_size, engram=engram, settings=settings),
        kv_bytes=kv_bytes,
        # Slots for 1.2 x the sequences and a spare one, double for those being handed over (perf.md 4.1: STATE).
        state_bytes=2 * (settings.max_sequences * 12 // 10 + 1) * state.gpu_slot_bytes,
        workspace=_sum_workspace(spec, settings),
        context_bytes=settings.reserved_bytes,
        usable_bytes=usable_bytes,
        budget_bytes=usable_bytes * (1000 - _FRAGMENTATION_PERMILLE) // 1000,
        host_bytes=tensors.engram_rows * tensors.engram_row if engram == EngramPlace.HOST else 0,
        max_pool_tokens=0,
    )
    if not plan.fits:
        return plan
    return replace(plan, max_pool_tokens=(plan.spare_bytes + kv_bytes) // block_bytes * BLOCK_TOKENS)


def _check_settings(spec: ModelSpec, *, usable_bytes: int, ep_size: int, settings: PlanSettings) -> None:
    if ep_size not in EP_SIZES:
        raise PlanError(f"EP = {ep_size}, expected one of {', '.join(map(str, EP_SIZES))} (ranks of one 8-GPU machine)")
    slots = spec.num_experts + settings.redundant_experts
    if settings.redundant_experts < 0 or slots % ep_size:
        raise PlanError(
            f"{spec.num_experts} experts + {settings.redundant_experts} redundant = {slots} slots do not divide by "
            f"EP = {ep_size} (remainder {slots % ep_size}); expected a multiple, and redundant >= 0"
        )
    if usable_bytes < 1:
        raise PlanError(f"GPU memory = {usable_bytes} bytes, expected >= 1")
    if settings.reserved_bytes < 0:
        raise PlanError(f"reserved GPU memory = {settings.reserved_bytes} bytes, expected >= 0")
    if not 1 <= settings.context_tokens <= spec.max_position_tokens:
        raise PlanError(
            f"context = {settings.context_tokens} tokens, expected 1..{spec.max_position_tokens} "
            "(max_position_embeddings of the model)"
        )
    if settings.pool_tokens < settings.context_tokens:
        raise PlanError(
            f"KV pool of {settings.pool_tokens} tokens, expected >= {settings.context_tokens}, the context: "
            "a prompt is admitted only whole"
        )
    validate_keep(settings.keep_tokens, spec.window_tokens, settings.rollback_tokens)
    counts = {
        "chunk_tokens": settings.chunk_tokens,
        "moe_sub_tokens": settings.moe_sub_tokens,
        "max_sequences": settings.max_sequences,
        "gather_sequences": settings.gather_sequences,
    }
    for name, value in counts.items():
        if value < 1:
            raise PlanError(f"{name} = {value}, expected >= 1")


def _sum_weights(
    spec: ModelSpec, tensors: ModelBytes, *, ep_size: int, engram: EngramPlace, settings: PlanSettings
) -> WeightBytes:
    redundant = settings.redundant_experts
    draft = 0
    if settings.holds_draft and spec.draft:
        draft_slots = (spec.draft.num_experts + _ceil_div(redundant, ep_size) * ep_size) // ep_size
        draft = spec.draft.num_layers * draft_slots * tensors.expert + tensors.draft
    return WeightBytes(
        experts=spec.num_layers * ((spec.num_experts + redundant) // ep_size) * tensors.expert,
        dense=tensors.dense,
        engram=_ceil_div(tensors.engram_rows, ep_size) * tensors.engram_row if engram == EngramPlace.GPU else 0,
        draft=draft,
        vision=tensors.vision if settings.holds_vision else 0,
        expansion=tensors.dense_expansion if settings.expands_dense else 0,
    )


def _sum_workspace(spec: ModelSpec, settings: PlanSettings) -> WorkspaceBytes:
    """ACT of perf.md 4.1, with its per-row constants spelt out in the model's sizes."""
    rows = settings.chunk_tokens
    sub_rows = min(settings.moe_sub_tokens, rows)
    hidden = spec.hidden_size * _BF16
    hidden_fp8 = _fp8_row(spec.hidden_size)
    expert_rows = sub_rows * spec.experts_per_token * _IMBALANCE_TENTHS // 10
    # One compressed entry row per r = 2 pair, index logits in bf16.
    logit_row = max(1, settings.context_tokens // 2) * _BF16
    logit_rows = max(1, min(_INDEX_TILE_ROWS, rows, _INDEX_TILE_BYTES // logit_row))
    decoder_logits = min(settings.keep_tokens, rows) * settings.context_tokens * _BF16
    engram = spec.engram
    staged_row = (engram.row_width + engram.row_width // 32) * len(engram.layers) if engram else 0
    return WorkspaceBytes(
        residual=2 * spec.hc_mult * hidden * rows,
        phase=max(
            rows * _attention_row(spec),
            rows * (2 * hidden + hidden_fp8 + 8 * spec.experts_per_token) + expert_rows * _expert_row(spec),
        ),
        index_logits=max(logit_rows * logit_row, decoder_logits),
        kv_gather=settings.gather_sequences * settings.context_tokens * spec.head_dim * _BF16,
        engram_staging=2 * rows * staged_row,
        all_to_all=2 * sub_rows * (hidden_fp8 + spec.experts_per_token * hidden),
    )


def _attention_row(spec: ModelSpec) -> int:
    """Bytes of one row in the attention phase: 150,048 for the release.

    perf.md gives only that total. The parts here (input, queries, head outputs, fp8 group outputs, one main-KV record)
    are our reading; they reproduce it exactly and scale it to other models.
    """
    heads = 2 * spec.num_heads * spec.head_dim * _BF16
    group_outputs = _fp8_row(spec.o_groups * spec.o_lora_rank)
    return spec.hidden_size * _BF16 + heads + group_outputs + main_record_bytes(spec.head_dim, RecordFormat.FP4)


def _expert_row(spec: ModelSpec) -> int:
    """Bytes of one routed row in the unfused MoE: input, gate and up, activation, output; 27,112 for the release."""
    gate_up = 2 * spec.moe_inter_size * _BF16
    return _fp8_row(spec.hidden_size) + gate_up + _fp8_row(spec.moe_inter_size) + spec.hidden_size * _BF16


def _fp8_row(width: int) -> int:
    """e4m3 values and one ue8m0 scale per 32."""
    return width + width // 32


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f}"
