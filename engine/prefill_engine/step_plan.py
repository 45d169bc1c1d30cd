"""What one step computes, as host integers only: the scheduler writes it, the batch builder and the commit read it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """Rows [start, end) of one attempt in one step (half-open token positions of its prompt).

    attempt_id: 16 bytes.
    hit_tokens: effective hit H; rows at positions < H are replayed rows and write no Block KV (R3).
    window_floor: no window key below this position is visible to an encoder row (replay start; 0 when nothing was replayed).
    decoder_floor: max(0, L - keep): decoder rows start here and their window never reaches below it (R5).
    prompt_tokens: L.
    block_slots: pool slots of the blocks 0..ceil(L/128)-1 of the sequence; at least those covering [0, end) are valid.
    state_slot: slot of the per-sequence state (window rings, compressor state).
    snapshot_positions: SWA snapshots to take after this chunk (all <= end).
    is_last: end == prompt_tokens; the step then yields the first token's logits.
    """

    attempt_id: bytes
    start: int
    end: int
    hit_tokens: int
    window_floor: int
    decoder_floor: int
    prompt_tokens: int
    block_slots: tuple[int, ...]
    state_slot: int
    snapshot_positions: tuple[int, ...]
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One synchronized pass of all ranks. No chunks = placeholder step: same collectives, writes nowhere."""

    step_id: int
    chunks: tuple[ChunkPlan, ...]
