"""What a decode peer gets to read of a computed attempt, as components of the hand-over (kv.md 1.5, C5)."""

from prefill_engine.kv_cache import KvCache
from prefill_engine.rank.attempt import Attempt
from prefill_engine.rank.payloads import Payloads
from prefill_engine.rank.read_server import Component
from prefill_engine.rpc import common_pb2
from prefill_plan.kv_layout import BLOCK_TOKENS, RequestRow


def build_components(attempt: Attempt, *, cache: KvCache, payloads: Payloads) -> tuple[Component, ...]:
    """Components of the attempt: whole block payloads in order (the tail block zero-filled), state by kind, the request row.

    With store_only, full blocks are left out: the store has them. Mutates the cache: the unused end of the last block is zeroed.
    State is copied, which waits for the device; blocks are read when a peer asks for them.
    """
    plan = attempt.plan
    tail_tokens = attempt.prompt_tokens % BLOCK_TOKENS
    if tail_tokens:
        cache.zero_tail(attempt.block_slots[-1], tail_tokens)
    state = cache.export_state(
        attempt.state_slot, attempt.prompt_tokens, first_valid=plan.window_floor, decoder_floor=plan.decoder_floor
    )
    row = RequestRow(
        prompt_tokens=attempt.prompt_tokens,
        decoder_floor=plan.decoder_floor,
        window_floor=plan.window_floor,
        last_tokens=_last_tokens(attempt),
        first_token=attempt.first_token,
    )
    layout = cache.state
    encoder_end, decoder_end = layout.decoder_offset, layout.draft_offset
    draft_end = layout.compress_state_offset
    compress_end = draft_end + layout.compress_state_bytes
    first_block = len(attempt.keys) if attempt.submit.store_only else 0
    return (
        Component(
            kind=common_pb2.COMPONENT_KIND_BLOCK_KV,
            pieces=payloads.parts(attempt.block_slots[first_block:]),
            offset=first_block * cache.layout.payload_bytes,
        ),
        Component(kind=common_pb2.COMPONENT_KIND_SWA_ENCODER, pieces=[state[:encoder_end]]),
        Component(kind=common_pb2.COMPONENT_KIND_SWA_DECODER, pieces=[state[encoder_end:decoder_end]]),
        Component(kind=common_pb2.COMPONENT_KIND_DRAFT_SWA, pieces=[state[decoder_end:draft_end]]),
        Component(kind=common_pb2.COMPONENT_KIND_COMPRESS_STATE, pieces=[state[draft_end:compress_end]]),
        Component(kind=common_pb2.COMPONENT_KIND_REQUEST_ROW, pieces=[row.encode()]),
    )


def _last_tokens(attempt: Attempt) -> tuple[int, int, int]:
    """The last three ids, oldest first; -1 for an image row or before the start (the Engram hash looks back)."""
    ids = [-1, -1, -1]
    for back in range(1, 4):
        index = attempt.prompt_tokens - back
        if index >= 0 and not attempt.is_image[index]:
            ids[3 - back] = int(attempt.token_ids[index])
    return ids[0], ids[1], ids[2]
