"""Hand-off plans at the engine's door: what is served, what is refused, and with which reason."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prefill_engine.front.served_model import EngineIdentity, ServedModel, build_served_model
from prefill_engine.rpc import common_pb2, prefill_pb2
from prefill_engine.rpc.convert import served_modes
from prefill_engine.rpc.parse_handoff import parse_handoff
from prefill_engine.rpc.status import ServingFailure
from prefill_plan.config import StoreConfig, StoreKind
from prefill_plan.model_spec import load_model_spec
from prefill_testing.engine_rig import TINY_MODEL, prefill_request, tiny_config
from prefill_testing.fake_rank import ready_message

Plan = prefill_pb2.HandoffPlan
TOKENS = 300


def served_by(*, store: StoreKind = StoreKind.FILE, data_port: int = 7000) -> ServedModel:
    config = tiny_config(store=StoreConfig(kind=store, path="/kv"))
    spec = load_model_spec(Path(TINY_MODEL))
    identity = EngineIdentity(engine_id="pe", epoch=1, endpoint="10.0.0.1:50", zone="", build="")
    ready = ready_message(0, spec, config, data_port=data_port)
    return build_served_model(config, spec, identity=identity, ranks=[ready])


SERVED = served_by()


BLOCK_BYTES = SERVED.format.lengths(128)[1]


def push_plan(**changes: object) -> prefill_pb2.HandoffPlan:
    plan = Plan(mode=Plan.PUSH, decode_endpoint="d:1", decode_engine_id="d1", early_send=True)
    plan.push.grant_id = b"g" * 16
    plan.push.lease.ttl.FromSeconds(12)
    for kind, length in SERVED.format.lengths(TOKENS).items():
        plan.push.regions.append(region(kind, length))
    for name, value in changes.items():
        setattr(plan, name, value)
    return plan


def region(kind: int, length: int, *, offset: int = 0, **peer: object) -> prefill_pb2.ComponentRegions:
    terms: dict[str, object] = {"kind": "tcp", "endpoint": "d:2", "key": b"k" * 32, "piece_bytes": 4096, **peer}
    return prefill_pb2.ComponentRegions(
        kind=common_pb2.ComponentKind.Name(kind),
        region=common_pb2.RegionRef(
            peer=common_pb2.PeerRegion(**terms), extents=[common_pb2.Extent(offset=offset, length=length)]
        ),
    )


def request_with(plan: prefill_pb2.HandoffPlan, *, store: int = 0) -> prefill_pb2.PrefillRequest:
    request = prefill_request(TOKENS)
    request.handoff.CopyFrom(plan)
    request.store.durability = store
    return request


def reason_of(request: prefill_pb2.PrefillRequest, served: ServedModel = SERVED) -> tuple[str, str]:
    with pytest.raises(ServingFailure) as error:
        parse_handoff(request, served)
    return error.value.failure.reason, error.value.failure.public_message


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(Plan.MODE_UNSPECIFIED, "pull"), (Plan.PULL, "pull"), (Plan.STORE_ONLY, "store_only"), (Plan.NONE, "none")],
)
def test_mode_is_understood(mode: int, expected: str):
    assert parse_handoff(request_with(Plan(mode=mode)), SERVED).mode == expected


def test_unknown_mode_fails_closed():
    reason, text = reason_of(request_with(Plan(mode=9)))
    assert (reason, "mode 9" in text) == ("TRANSPORT_UNSUPPORTED", True)


def test_push_plan_becomes_places_for_every_component():
    push = parse_handoff(request_with(push_plan()), SERVED).push
    assert push is not None
    assert {each.kind: each.num_bytes for each in push.regions} == dict(SERVED.format.lengths(TOKENS))
    assert (push.endpoint, push.engine_id, push.grant_id, push.lease_seconds, push.early_send) == (
        "d:1",
        "d1",
        b"g" * 16,
        12.0,
        True,
    )


@pytest.mark.parametrize(
    ("offset", "cached"), [(1000, 0), (BLOCK_BYTES, 128), (2 * BLOCK_BYTES - 1, 128)], ids=["less", "one", "almost-two"]
)
def test_blocks_that_the_decode_side_has_may_be_left_out(offset: int, cached: int):
    blocks = SERVED.format.lengths(TOKENS)[1]
    plan = push_plan()
    kept = [part for part in plan.push.regions if part.kind != 1]
    del plan.push.regions[:]
    plan.push.regions.extend([*kept, region(1, blocks - offset, offset=offset)])
    push = parse_handoff(request_with(plan), SERVED).push
    assert push is not None
    assert [(each.offset, each.num_bytes) for each in push.regions if each.kind == 1] == [(offset, blocks - offset)]
    assert push.already_cached_tokens == cached, "whole blocks count"


def change_region(kind: int, change: Callable[[prefill_pb2.ComponentRegions], object]) -> prefill_pb2.HandoffPlan:
    plan = push_plan()
    change(next(part for part in plan.push.regions if part.kind == kind))
    return plan


def without(kind: int) -> prefill_pb2.HandoffPlan:
    plan = push_plan()
    kept = [part for part in plan.push.regions if part.kind != kind]
    del plan.push.regions[:]
    plan.push.regions.extend(kept)
    return plan


def twice() -> prefill_pb2.HandoffPlan:
    plan = push_plan()
    plan.push.regions.append(plan.push.regions[0])
    return plan


def stranger() -> prefill_pb2.HandoffPlan:
    plan = push_plan()
    plan.push.regions.append(region(2, 10))
    return plan


def no_grant() -> prefill_pb2.HandoffPlan:
    plan = push_plan()
    plan.push.grant_id = b""
    return plan


@pytest.mark.parametrize(
    ("plan", "reason", "text"),
    [
        pytest.param(no_grant(), "TRANSPORT_UNSUPPORTED", "push.grant_id", id="no-grant"),
        pytest.param(push_plan(decode_endpoint=""), "TRANSPORT_UNSUPPORTED", "decode_endpoint", id="no-endpoint"),
        pytest.param(push_plan(accepted_format=b"x" * 32), "KV_FORMAT_MISMATCH", "KV format", id="other-format"),
        pytest.param(without(4), "KV_FORMAT_MISMATCH", "SWA_DECODER is granted up to byte 0", id="component-missing"),
        pytest.param(twice(), "KV_FORMAT_MISMATCH", "granted twice", id="component-twice"),
        pytest.param(stranger(), "KV_FORMAT_MISMATCH", "this prompt has none", id="strange-component"),
        pytest.param(
            change_region(1, lambda part: setattr(part.region.extents[0], "length", 5)),
            "KV_FORMAT_MISMATCH",
            "BLOCK_KV is granted up to byte 5",
            id="short",
        ),
        pytest.param(
            change_region(3, lambda part: setattr(part.region.extents[0], "offset", 5)),
            "KV_FORMAT_MISMATCH",
            "only blocks can be left out",
            id="state-from-the-middle",
        ),
        pytest.param(
            change_region(3, lambda part: part.region.extents.add(length=1)),
            "KV_FORMAT_MISMATCH",
            "2 extents",
            id="two-extents",
        ),
        pytest.param(
            change_region(3, lambda part: setattr(part.region.peer, "kind", "nixl")),
            "TRANSPORT_UNSUPPORTED",
            "no place reachable by tcp",
            id="other-transport",
        ),
        pytest.param(
            change_region(3, lambda part: setattr(part.region.peer, "key", b"k")),
            "KV_FORMAT_MISMATCH",
            "a key of 1 bytes",
            id="short-key",
        ),
        pytest.param(
            change_region(3, lambda part: setattr(part.region.peer, "piece_bytes", 0)),
            "KV_FORMAT_MISMATCH",
            "pieces of 0 bytes",
            id="no-pieces",
        ),
    ],
)
def test_push_that_cannot_work_is_refused_before_anything_is_computed(
    plan: prefill_pb2.HandoffPlan, reason: str, text: str
):
    found, message = reason_of(request_with(plan))
    assert (found, text in message) == (reason, True), message


def test_push_to_an_engine_without_a_data_transport_is_refused():
    served = served_by(data_port=-1)
    assert reason_of(request_with(push_plan()), served)[0] == "TRANSPORT_UNSUPPORTED"
    assert served_modes(served) == ["PULL", "STORE_ONLY", "NONE"]


@pytest.mark.parametrize(
    ("served", "store", "text"),
    [
        pytest.param(served_by(store=StoreKind.MEMORY), 0, "its own memory", id="memory-store"),
        pytest.param(SERVED, prefill_pb2.StorePlan.SKIP, "store SKIP", id="skip"),
    ],
)
def test_store_only_needs_a_store_that_others_can_read(served: ServedModel, store: int, text: str):
    reason, message = reason_of(request_with(Plan(mode=Plan.STORE_ONLY), store=store), served)
    assert (reason, text in message) == ("TRANSPORT_UNSUPPORTED", True)


def test_modes_that_the_engine_names_are_those_it_serves():
    assert served_modes(SERVED) == ["PULL", "PUSH", "STORE_ONLY", "NONE"]
    assert served_modes(replace(SERVED, store_kind="memory")) == ["PULL", "PUSH", "NONE"]
