"""The decode peer that takes pushes, over real gRPC and TCP: grants, verdicts, abandons; and the engine side's calls to it."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest

from prefill_engine.client_events import to_duration
from prefill_engine.front.call import PushPlan
from prefill_engine.front.grants import CallKind, Grants, SinkAnswer, SinkCall
from prefill_engine.front.sink_calls import SinkCaller
from prefill_engine.front.tickets import Ticket, Tickets
from prefill_engine.handoff_pieces import PieceChecks, checksums, cut_pieces
from prefill_engine.handoff_sink import DecodeSink
from prefill_engine.kv.transport.contract import PullState
from prefill_engine.kv.transport.tcp import TcpTransport
from prefill_engine.messages import Region
from prefill_engine.rpc import common_pb2, handoff_pb2, handoff_pb2_grpc, prefill_pb2
from prefill_engine.rpc.convert import format_message
from prefill_engine.sink_grants import SinkState
from prefill_plan.kvd_config import TransportConfig
from prefill_testing.engine_rig import tiny_config
from prefill_testing.fake_rank import tiny_served_model

TOKENS = 300
KEY = common_pb2.AttemptKey(request_id="r", attempt=1, attempt_id=b"a" * 16)


SERVED = tiny_served_model(tiny_config())
FORMAT = format_message(SERVED.format)
LENGTHS = SERVED.format.lengths(TOKENS)
CONTENT = {kind: bytes((kind * 31 + i) % 256 for i in range(length)) for kind, length in LENGTHS.items()}


class Rig:
    def __init__(self, sink: DecodeSink, stub: handoff_pb2_grpc.HandoffSinkStub, engine: TcpTransport) -> None:
        self.sink, self.stub, self.engine = sink, stub, engine

    async def reserve(self, **fields: object) -> handoff_pb2.ReserveResponse:
        terms: dict[str, object] = {
            "key": KEY,
            "kv_tokens": TOKENS,
            "format_fingerprint": FORMAT.fingerprint,
            "ttl": to_duration(30.0),
            **fields,
        }
        return await self.stub.Reserve(handoff_pb2.ReserveRequest(**terms))

    async def fill(self, target: prefill_pb2.PushTarget) -> dict[int, bytes]:
        """Pushes everything; checksums by kind."""
        checks = {}
        for part in target.regions:
            peer, data = part.region.peer, CONTENT[part.kind]
            for piece in cut_pieces(peer.key, num_bytes=len(data), piece_bytes=peer.piece_bytes):
                view = memoryview(data)[piece.start : piece.end]
                outcome = await self.engine.push(peer.endpoint, piece.key, view, deadline_seconds=10.0)
                assert outcome.state is PullState.DONE, outcome
            checks[part.kind] = checksums(data, piece_bytes=peer.piece_bytes)
        return checks


def play(scenario: Callable[[Rig], Awaitable[None]], **terms: object) -> None:
    async def run() -> None:
        engine = TcpTransport(TransportConfig(host="127.0.0.1"))
        peer = TcpTransport(TransportConfig(host="127.0.0.1"))
        async with (
            DecodeSink(peer, FORMAT, engine_id="d", **terms) as sink,  # type: ignore[arg-type]
            grpc.aio.insecure_channel(sink.endpoint) as channel,
        ):
            await asyncio.wait_for(scenario(Rig(sink, handoff_pb2_grpc.HandoffSinkStub(channel), engine)), 15)
        await engine.close()

    asyncio.run(run())


def offer_of(reply: handoff_pb2.ReserveResponse, checks: dict[int, bytes]) -> handoff_pb2.OfferRequest:
    return handoff_pb2.OfferRequest(
        key=KEY,
        grant_id=reply.grant_id,
        ticket=prefill_pb2.Ticket(format=FORMAT, kv_tokens=TOKENS),
        first_token=prefill_pb2.FirstToken(token=9),
        data_landed=True,
        checksums=[
            handoff_pb2.ComponentChecksum(kind=common_pb2.ComponentKind.Name(kind), value=value)
            for kind, value in checks.items()
        ],
    )


def test_reserved_filled_and_offered_memory_is_accepted_and_taken():
    async def scenario(rig: Rig) -> None:
        reply = await rig.reserve()
        checks = await rig.fill(reply.target)
        verdicts = handoff_pb2.OfferResponse
        assert (await rig.stub.Offer(offer_of(reply, checks))).verdict == verdicts.ACCEPTED
        assert (await rig.stub.Offer(offer_of(reply, checks))).verdict == verdicts.DUPLICATE
        assert await rig.sink.take(reply.grant_id) == (CONTENT, 9)
        assert not (await rig.stub.Abandon(handoff_pb2.AbandonRequest(grant_id=reply.grant_id))).released

    play(scenario, piece_bytes=1 << 12)


def test_repeated_reserve_gets_the_same_grant_and_a_renewal_only_renews():
    async def scenario(rig: Rig) -> None:
        first, second = await rig.reserve(), await rig.reserve()
        assert (first.grant_id, first.target) == (second.grant_id, second.target)
        before = rig.sink.grants.find(first.grant_id)
        assert before is not None
        expires = before.expires
        assert (await rig.reserve(grant_id=first.grant_id)).grant_id == first.grant_id
        assert before.expires > expires
        await rig.stub.Abandon(handoff_pb2.AbandonRequest(grant_id=first.grant_id, writes_drained=True))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rig.reserve(grant_id=first.grant_id)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND

    play(scenario)


@pytest.mark.parametrize(
    ("fields", "terms", "code"),
    [
        ({"format_fingerprint": b"x" * 32}, {}, grpc.StatusCode.FAILED_PRECONDITION),
        ({}, {"capacity_bytes": 1000}, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["format", "no-room"],
)
def test_reserve_that_cannot_work_is_refused(fields: dict[str, object], terms: dict[str, object], code: object):
    async def scenario(rig: Rig) -> None:
        free = rig.sink.grants.free_bytes
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rig.reserve(**fields)
        assert error.value.code() is code
        assert rig.sink.grants.free_bytes == free

    play(scenario, **terms)


def test_abandoned_grant_takes_no_further_byte():
    async def scenario(rig: Rig) -> None:
        free = rig.sink.grants.free_bytes
        reply = await rig.reserve()
        assert rig.sink.grants.free_bytes < free
        assert (await rig.stub.Abandon(handoff_pb2.AbandonRequest(grant_id=reply.grant_id))).released
        peer = reply.target.regions[0].region.peer
        piece = cut_pieces(peer.key, num_bytes=LENGTHS[reply.target.regions[0].kind], piece_bytes=peer.piece_bytes)[0]
        outcome = await rig.engine.push(peer.endpoint, piece.key, memoryview(bytes(piece.end)), deadline_seconds=5.0)
        assert (outcome.state, rig.sink.grants.free_bytes) == (PullState.FAILED, free)
        assert await rig.sink.take(reply.grant_id) is None

    play(scenario)


def test_grant_of_an_engine_that_died_comes_back_by_revoking_after_its_lease():
    async def scenario(rig: Rig) -> None:
        free = rig.sink.grants.free_bytes
        reply = await rig.reserve(ttl=to_duration(0.2))
        reservation = rig.sink.grants.find(reply.grant_id)
        assert reservation is not None
        while reservation.state is not SinkState.FREED:
            await asyncio.sleep(0.01)
        assert rig.sink.grants.free_bytes == free
        verdict = (await rig.stub.Offer(offer_of(reply, {}))).verdict
        assert verdict == handoff_pb2.OfferResponse.REFUSED_EXPIRED

    play(scenario)


def ticket() -> Ticket:
    return Tickets(ttl_seconds=30.0, max_seconds=600.0, keep_seconds=60.0).offer(
        ids=(b"t" * 16, b"l" * 16),
        attempt_id=KEY.attempt_id,
        rank=0,
        kv_tokens=TOKENS,
        regions=tuple(Region(kind=kind, num_bytes=length) for kind, length in LENGTHS.items()),
        first_token=None,
        ttl_seconds=None,
        now=0.0,
        mode="push",
    )


async def called(call: SinkCall, the_ticket: Ticket | None = None) -> SinkAnswer:
    """Lets the engine's caller make a call, and waits for what it reports."""
    answered: asyncio.Future[SinkAnswer] = asyncio.get_running_loop().create_future()
    caller = SinkCaller(lambda _call, answer: answered.set_result(answer))
    caller.start(call, the_ticket, SERVED)
    try:
        return await answered
    finally:
        await caller.close()


def call_of(kind: CallKind, *, endpoint: str, grant_id: bytes, checks: dict[int, bytes]) -> SinkCall:
    plan = PushPlan(
        endpoint=endpoint, engine_id="d", grant_id=grant_id, lease_seconds=30.0, regions=(), early_send=True
    )
    grants = Grants()
    grant = grants.open(plan, key=("r", 1, KEY.attempt_id), kv_tokens=TOKENS, rank=0, now=0.0)
    grant.checks = tuple(PieceChecks(kind=kind_, checks=value) for kind_, value in checks.items())
    return SinkCall(kind=kind, grant=grant, sent_at=0.0, writes_drained=True, generation=1)


def test_engine_s_calls_are_understood_and_their_answers_too():
    async def scenario(rig: Rig) -> None:
        reply = await rig.reserve()
        checks = await rig.fill(reply.target)
        terms = {"endpoint": rig.sink.endpoint, "grant_id": reply.grant_id, "checks": checks}
        renewed = await called(call_of(CallKind.RENEW, **terms))
        assert (renewed.answered, renewed.gone) == (True, False)
        assert (await called(call_of(CallKind.OFFER, **terms), ticket())).verdict == "ACCEPTED"
        assert not (await called(call_of(CallKind.ABANDON, **terms))).released

    play(scenario)


def test_engine_s_calls_to_a_peer_that_is_gone_or_forgot_the_grant():
    async def scenario(rig: Rig) -> None:
        forgotten = {"endpoint": rig.sink.endpoint, "grant_id": b"?" * 16, "checks": {}}
        assert (await called(call_of(CallKind.RENEW, **forgotten))).gone
        assert (await called(call_of(CallKind.ABANDON, **forgotten))).released
        gone = {**forgotten, "endpoint": "127.0.0.1:1"}
        for kind in (CallKind.RENEW, CallKind.ABANDON):
            answer = await called(call_of(kind, **gone))
            assert (answer.answered, answer.gone, answer.released) == (False, False, False)

    play(scenario)
