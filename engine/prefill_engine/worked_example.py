"""The arithmetic of mission.md's worked example at L = 100,000, in both variants, for the released model. Pure text.

Printed by `prefill-engine demo`: what the demo shows on a small model, in the sizes of the real one. No time is measured or
predicted here.
"""

from collections.abc import Iterator

from prefill_plan.config import RecordFormat, ReplayConfig, SchedulerConfig
from prefill_plan.kv_layout import BLOCK_TOKENS, block_layout, state_layout
from prefill_plan.memory import GPU_BYTES, PlanSettings, minimum_ep
from prefill_plan.model_spec import ModelSpec, released_model_spec
from prefill_plan.positions import PrefillPositions, cut_chunks, effective_hit, plan_positions

PROMPT_TOKENS = 100_000
HIT_TOKENS = 96_896
_COLUMN = 36


def worked_example_lines() -> Iterator[str]:
    """The table, one line each, without indentation."""
    spec = released_model_spec()
    held, lost = plan_variant(spec, snapshot_held=True), plan_variant(spec, snapshot_held=False)
    yield f"{'':<{_COLUMN}}{'snapshot held':<26}snapshot lost"
    for name, left, right in (*_position_rows(held, lost), *_byte_rows(spec, held, lost)):
        yield f"{name:<{_COLUMN}}{left:<26}{right}".rstrip()
    smallest = {name: _smallest_ep(spec, usable) for name, usable in GPU_BYTES.items()}
    for ep_size in sorted(set(smallest.values())):
        names = ", ".join(name for name, size in smallest.items() if size == ep_size)
        yield f"{f'smallest EP that fits is {ep_size} on':<{_COLUMN}}{names}"


def plan_variant(spec: ModelSpec, *, snapshot_held: bool) -> PrefillPositions:
    """Positions of the example with the snapshot at the hit held, or lost."""
    return plan_positions(
        PROMPT_TOKENS,
        offered_hit=HIT_TOKENS,
        keep_tokens=ReplayConfig().keep_tokens,
        window_tokens=spec.window_tokens,
        snapshot_held=frozenset({HIT_TOKENS} if snapshot_held else ()).__contains__,
    )


def _position_rows(held: PrefillPositions, lost: PrefillPositions) -> Iterator[tuple[str, str, str]]:
    keep_tokens = ReplayConfig().keep_tokens
    scheduler = SchedulerConfig()
    variants = (held, lost)

    def row(name: str, texts: list[str]) -> tuple[str, str, str]:
        return name, texts[0], texts[1]

    yield row("prefix hit (Block KV)", [f"{p.hit_tokens:,} = {p.hit_tokens // BLOCK_TOKENS} blocks" for p in variants])
    yield row("computation starts at", [f"{p.compute_start:,}" for p in variants])
    yield row("encoder rows", [_encoder_rows(p) for p in variants])
    yield row("rows that write Block KV", [f"{p.new_tokens:,}" for p in variants])
    yield row("decoder rows (KEEP_TOKENS)", [f"{p.prompt_tokens - p.decoder_floor:,}" for p in variants])
    chunks = [
        cut_chunks(p, cap_tokens=scheduler.chunk_cap_tokens, min_tokens=scheduler.min_chunk_tokens) for p in variants
    ]
    yield row(f"chunks of at most {scheduler.chunk_cap_tokens:,}", [str(len(c)) for c in chunks])
    yield row("new blocks to the store", [_new_blocks(p) for p in variants])
    yield row("window snapshots at", [" and ".join(f"{s:,}" for s in p.snapshots) for p in variants])
    again = effective_hit(PROMPT_TOKENS, PROMPT_TOKENS, keep_tokens=keep_tokens)
    yield row("hit if the same prompt comes again", [f"{again:,}" for _ in variants])


def _byte_rows(spec: ModelSpec, held: PrefillPositions, lost: PrefillPositions) -> Iterator[tuple[str, str, str]]:
    replay = ReplayConfig()
    blocks = block_layout(spec, RecordFormat.FP4)
    state = state_layout(spec, keep_tokens=replay.keep_tokens, rollback_tokens=replay.max_rollback_tokens)
    payload = blocks.payload_bytes
    swap_in = [f"{p.hit_tokens // BLOCK_TOKENS * payload:,} B" for p in (held, lost)]
    yield "swap-in of the hit", swap_in[0], swap_in[1]
    written = [f"{(p.end_new_block - p.first_new_block) * payload:,} B" for p in (held, lost)]
    yield "written to the store", written[0], written[1]
    yield "window snapshot read", f"{state.snapshot_bytes:,} B", "none, rebuilt by replay"
    handed_blocks = -(-PROMPT_TOKENS // BLOCK_TOKENS)
    handed = f"{handed_blocks * payload + state.handover_bytes:,} B"
    yield f"hand-over: {handed_blocks} blocks + state", handed, handed


def _encoder_rows(positions: PrefillPositions) -> str:
    total = positions.replay_tokens + positions.new_tokens
    if not positions.replay_tokens:
        return f"{total:,}"
    return f"{total:,} = {positions.replay_tokens} replayed + {positions.new_tokens:,}"


def _new_blocks(positions: PrefillPositions) -> str:
    first, end = positions.first_new_block, positions.end_new_block
    return f"{end - first}, {first + 1} to {end}"


def _smallest_ep(spec: ModelSpec, usable_bytes: int) -> str:
    choice = minimum_ep(spec, usable_bytes=usable_bytes, settings=PlanSettings())
    return "none" if choice.any_ep is None else str(choice.any_ep)
