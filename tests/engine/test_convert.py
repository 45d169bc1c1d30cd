"""Requests are checked with values in the messages; digests see content, not encoding; events and infos take their wire form."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from prefill_engine.front.events import Accepted, Event, TicketOffer
from prefill_engine.front.served_model import EngineIdentity, ServedModel, build_served_model
from prefill_engine.messages import Region
from prefill_engine.rpc import common_pb2, prefill_pb2
from prefill_engine.rpc.convert import event_message, server_info_message
from prefill_engine.rpc.parse import parse_call
from prefill_engine.rpc.status import Failure, ServingFailure
from prefill_plan.block_keys import block_keys
from prefill_plan.errors import PeerError
from prefill_plan.kv_layout import block_layout, state_layout
from prefill_plan.model_spec import load_model_spec, released_model_spec
from prefill_testing.engine_rig import IDENTITY, TINY_MODEL, prefill_request, tiny_config
from prefill_testing.fake_rank import ready_message

Request = prefill_pb2.PrefillRequest
SPEC = load_model_spec(Path(TINY_MODEL))
CONFIG = tiny_config()
ENGINE = EngineIdentity(engine_id=IDENTITY.engine_id, epoch=5, endpoint="127.0.0.1:1", zone="z", build="b")


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return build_served_model(CONFIG, SPEC, identity=ENGINE, ranks=[ready_message(0, SPEC, CONFIG)])


def refused(request: Request, served: ServedModel) -> Failure:
    with pytest.raises(ServingFailure) as error:
        parse_call(request, served)
    return error.value.failure


def with_span(request: Request, served: ServedModel, *, start: int, length: int, key: bytes = b"k" * 32) -> Request:
    for position in range(start, min(start + length, len(request.tokens))):
        request.tokens[position] = served.image_token_id
    request.images.add(start=start, length=length, content_key=key)
    return request


def keyed_hit(request: Request, served: ServedModel, num_blocks: int) -> Request:
    tokens = b"".join(token.to_bytes(4, "little") for token in request.tokens)
    keys = block_keys(served.make_root(request.tenant.cache_scope), tokens)[:num_blocks]
    request.hit.tokens = 128 * num_blocks
    request.hit.block_keys.extend(keys)
    return request


def change(request: Request, **fields: object) -> None:
    """Sets dotted fields given with double underscores."""
    for path, value in fields.items():
        *parents, name = path.split("__")
        target = request
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)


BAD = [
    ("protocol", {"protocol": 0}, "PROTOCOL_TOO_OLD", "protocol 0"),
    ("attempt_id", {"key__attempt_id": b"short"}, "TOKENS_INVALID", "5 bytes, expected 16"),
    ("attempt", {"key__attempt": 0}, "TOKENS_INVALID", "attempt 0"),
    ("request_id", {"key__request_id": "has space"}, "TOKENS_INVALID", "9 characters"),
    ("weights", {"model__weights_digest": b"x" * 32}, "MODEL_MISMATCH", "weights_digest 7878"),
    ("model_id", {"model__model_id": "other"}, "MODEL_MISMATCH", "'other'"),
    ("format", {"handoff__accepted_format": b"x" * 32}, "KV_FORMAT_MISMATCH", "7878"),
    ("push", {"handoff__mode": prefill_pb2.HandoffPlan.PUSH}, "TRANSPORT_UNSUPPORTED", "PUSH"),
    ("store_only", {"handoff__mode": prefill_pb2.HandoffPlan.STORE_ONLY}, "TRANSPORT_UNSUPPORTED", "STORE_ONLY"),
    ("unknown_mode", {"handoff__mode": 99}, "TRANSPORT_UNSUPPORTED", "99"),
    ("unknown_durability", {"store__durability": 99}, "PROTOCOL_TOO_OLD", "99"),
    ("hit_multiple", {"hit__tokens": 100}, "TOKENS_INVALID", "100 tokens, expected a multiple of 128"),
    ("hit_keys", {"hit__tokens": 256}, "TOKENS_INVALID", "0 block keys for a hit of 256 tokens, expected 2"),
    ("temperature", {"first_token__temperature": -1.0}, "SAMPLING_INVALID", "-1.0"),
    ("nan", {"first_token__temperature": float("nan")}, "SAMPLING_INVALID", "nan"),
    ("top_p", {"first_token__top_p": 1.5}, "SAMPLING_INVALID", "1.5"),
    ("top_logprobs", {"first_token__top_logprobs": 1000}, "SAMPLING_INVALID", "1000"),
    ("constraint", {"first_token__constraint_kind": "regex"}, "SAMPLING_INVALID", "regex"),
    ("sample_mode", {"first_token__mode": 77}, "SAMPLING_INVALID", "77"),
    ("resume", {"resume__first_token_already_shown": True}, "SAMPLING_INVALID", "attempt 1"),
]


@pytest.mark.parametrize(("fields", "reason", "text"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_field_is_refused_with_its_value(served: ServedModel, fields: dict[str, object], reason: str, text: str):
    request = prefill_request()
    change(request, **fields)
    failure = refused(request, served)
    assert failure.reason == reason
    assert text in failure.public_message


def test_empty_prompt_is_refused(served: ServedModel):
    assert refused(prefill_request(0), served).reason == "TOKENS_INVALID"


def test_token_out_of_range_names_token_and_position(served: ServedModel):
    request = prefill_request(10)
    request.tokens[7] = served.vocab_size
    failure = refused(request, served)
    assert failure.reason == "TOKENS_INVALID"
    assert f"token id {served.vocab_size} at position 7" in failure.public_message


def test_prompt_over_the_context_is_out_of_range(served: ServedModel):
    failure = refused(prefill_request(served.max_context_tokens + 1), served)
    assert failure.reason == "PROMPT_TOO_LONG"
    assert "4097 tokens, this engine accepts 4096" in failure.public_message


def test_prompt_over_kv_memory_is_refused_towards_another_engine(served: ServedModel):
    small = dataclasses.replace(served, kv_tokens=256)
    failure = refused(prefill_request(300), small)
    assert (failure.reason, failure.retry_scope) == ("KV_MEMORY", "OTHER_PE")


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([(10, 20), (25, 5)], "IMAGE_TOKEN_MISMATCH"),
        ([(40, 5), (10, 5)], "IMAGE_TOKEN_MISMATCH"),
        ([(290, 20)], "IMAGE_TOKEN_MISMATCH"),
        ([(10, 0)], "IMAGE_TOKEN_MISMATCH"),
    ],
    ids=["overlap", "unsorted", "outside", "empty"],
)
def test_bad_image_spans_are_refused(served: ServedModel, spans: list[tuple[int, int]], reason: str):
    request = prefill_request(300)
    for start, length in spans:
        with_span(request, served, start=start, length=length)
    assert refused(request, served).reason == reason


def test_image_span_must_carry_the_image_token_and_a_full_key(served: ServedModel):
    request = with_span(prefill_request(300), served, start=10, length=5)
    request.tokens[12] = 3
    failure = refused(request, served)
    assert (failure.reason, failure.image_index) == ("IMAGE_TOKEN_MISMATCH", 0)
    assert "position 12" in failure.public_message
    short = with_span(prefill_request(300), served, start=10, length=5, key=b"k")
    assert refused(short, served).reason == "IMAGE_REJECTED"


def test_block_keys_of_another_prompt_are_refused(served: ServedModel):
    request = keyed_hit(prefill_request(300), served, 2)
    assert parse_call(request, served).offered_hit == 256
    request.tokens[200] = 4
    failure = refused(request, served)
    assert failure.reason == "TOKENS_INVALID"
    assert "block key 1 of 2" in failure.public_message


def test_block_keys_of_another_tenant_are_refused(served: ServedModel):
    request = keyed_hit(prefill_request(300), served, 1)
    request.tenant.cache_scope = b"s" * 32
    assert refused(request, served).reason == "TOKENS_INVALID"


def test_defaults_are_pull_best_effort_greedy_standard(served: ServedModel):
    call = parse_call(prefill_request(300), served)
    assert (call.handoff, call.store, call.priority, call.weight) == (True, "best_effort", 2, 1)
    assert (call.sampling.sample, call.sampling.temperature, call.sampling.top_p) == (True, 0.0, 1.0)
    assert (call.offered_hit, call.step_cap_ms, call.max_compute_rows) == (None, None, None)


def test_tokens_travel_as_little_endian_int32(served: ServedModel):
    call = parse_call(prefill_request(3), served)
    assert call.tokens == b"\x03\0\0\0\x04\0\0\0\x05\0\0\0"


def edit_tokens(request: Request) -> None:
    request.tokens[0] = 9


def edit_image(request: Request) -> None:
    request.images[0].content_key = b"o" * 32


EDITS: dict[str, Callable[[Request], None]] = {
    "tokens": edit_tokens,
    "image": edit_image,
    "sampling": lambda request: change(request, first_token__temperature=0.5),
    "handoff": lambda request: change(request, handoff__mode=prefill_pb2.HandoffPlan.NONE),
    "tenant": lambda request: change(request, tenant__tenant="other"),
    "scope": lambda request: change(request, tenant__cache_scope=b"s" * 32),
    "store": lambda request: change(request, store__durability=prefill_pb2.StorePlan.REQUIRED),
    "hit": lambda request: change(request, hit__tokens=0),
    "attempt": lambda request: change(request, key__attempt=2),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_digest_sees_every_part_of_the_content(served: ServedModel, edit: Callable[[Request], None]):
    request = with_span(prefill_request(300, attempt_id=b"a" * 16), served, start=10, length=5)
    before = parse_call(request, served).digest
    edit(request)
    assert parse_call(request, served).digest != before


def test_digest_ignores_budget_events_and_labels(served: ServedModel):
    request = prefill_request(300, attempt_id=b"a" * 16)
    before = parse_call(request, served).digest
    request.events.timeline = True
    request.budget.step_cap.seconds = 1
    request.labels["a"] = "b"
    assert parse_call(request, served).digest == before


def test_deduplicated_belongs_to_the_stream_not_to_the_event(served: ServedModel):
    body = Accepted(
        dp_rank=0,
        effective_hit=128,
        replay_rows=16,
        compute_rows=172,
        predicted_wait_seconds=0.5,
        predicted_finish_seconds=1.5,
    )
    event = Event(seq=1, since_accept_seconds=0.25, body=body)
    first = event_message(event, served=served, deduplicated=False)
    joined = event_message(event, served=served, deduplicated=True)
    assert (first.accepted.deduplicated, joined.accepted.deduplicated) == (False, True)
    assert first.since_accept.ToMilliseconds() == 250
    assert first.accepted.predicted_finish.ToMilliseconds() == 1500


def test_ticket_carries_format_lease_and_stream_regions(served: ServedModel):
    offer = TicketOffer(
        ticket_id=b"t" * 16,
        lease_id=b"l" * 16,
        fence=3,
        ttl_seconds=30.0,
        kv_tokens=300,
        regions=(Region(kind=1, num_bytes=1000), Region(kind=7, num_bytes=40)),
    )
    event = Event(seq=1, since_accept_seconds=0, body=offer)
    ticket = event_message(event, served=served, deduplicated=False).ticket
    assert ticket.format.fingerprint == served.format.fingerprint
    assert (ticket.lease.owner_epoch, ticket.lease.fence, ticket.lease.ttl.seconds) == (5, 3, 30)
    assert [(part.kind, part.region.extents[0].length) for part in ticket.regions] == [(1, 1000), (7, 40)]
    assert {part.region.stream.endpoint for part in ticket.regions} == {"127.0.0.1:1"}


def test_server_info_gives_what_clients_need_for_block_keys(served: ServedModel):
    info = server_info_message(served)
    assert info.layout_digest == block_layout(SPEC, CONFIG.kv.record_format).digest()
    assert (info.numerics_class, info.keep_tokens, info.device) == ("ref-bf16", 24, "gpu")
    assert info.formats[0].block_tokens == 128


def test_format_of_the_released_model_has_the_bytes_of_the_handover():
    spec = released_model_spec()
    blocks = block_layout(spec, CONFIG.kv.record_format)
    state = state_layout(spec, keep_tokens=140, rollback_tokens=6)
    config = tiny_config()
    ready = ready_message(0, spec, config)
    served = build_served_model(config, spec, identity=ENGINE, ranks=[ready])
    kinds = common_pb2.ComponentKind
    parts = {kinds.Name(part.kind).removeprefix("COMPONENT_KIND_"): part for part in served.format.components}
    assert set(parts) == {"REQUEST_ROW", "BLOCK_KV", "SWA_ENCODER", "SWA_DECODER", "COMPRESS_STATE", "DRAFT_SWA"}
    assert parts["BLOCK_KV"].bytes_per_token == 890
    assert parts["BLOCK_KV"].layers == (2, 8, 14, 20)
    assert (parts["SWA_ENCODER"].bytes_fixed, parts["SWA_ENCODER"].layers) == (1_415_040, tuple(range(20)))
    assert (parts["SWA_DECODER"].bytes_fixed, parts["SWA_DECODER"].layers) == (1_415_040, tuple(range(20, 40)))
    assert parts["COMPRESS_STATE"].bytes_fixed == 86_016
    assert (parts["DRAFT_SWA"].bytes_fixed, parts["DRAFT_SWA"].layers) == (212_256, (40, 41, 42))
    assert blocks.payload_bytes == 113_920
    assert state.snapshot_rows == 134


def test_fingerprint_follows_weights_and_layout_but_not_engine_or_ep(served: ServedModel):
    other = dataclasses.replace(ENGINE, engine_id="pe-9", epoch=6)
    same = build_served_model(CONFIG, SPEC, identity=other, ranks=[ready_message(0, SPEC, CONFIG)])
    assert same.format.fingerprint == served.format.fingerprint
    ready = ready_message(0, SPEC, CONFIG)
    changed = type(ready)(**{**{f: getattr(ready, f) for f in ready.__struct_fields__}, "weights_digest": b"w" * 32})
    rebuilt = build_served_model(CONFIG, SPEC, identity=ENGINE, ranks=[changed])
    assert rebuilt.format.fingerprint != served.format.fingerprint


def test_ranks_that_disagree_are_refused():
    ready = ready_message(0, SPEC, CONFIG)
    other = type(ready)(**{**{f: getattr(ready, f) for f in ready.__struct_fields__}, "rank": 1, "numerics_class": "x"})
    with pytest.raises(PeerError, match="rank 1 reports"):
        build_served_model(CONFIG, SPEC, identity=ENGINE, ranks=[ready, other])
