"""HandoffSource over gRPC against a fake rank: who wins, what is read, what an ended lease means."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from prefill_engine.messages import Release
from prefill_engine.rpc import common_pb2, handoff_pb2, prefill_pb2
from prefill_plan.config import HandoffConfig
from prefill_testing.engine_rig import Rig, engine_rig, prefill_request, tiny_config
from prefill_testing.fake_rank import FIRST_TOKEN, REGIONS, component_bytes
from prefill_testing.rpc_calls import claim, next_of, read_kv, read_stream, refused, settle

BLOCK_KV = common_pb2.COMPONENT_KIND_BLOCK_KV
Scenario = Callable[[Rig, prefill_pb2.Ticket], Awaitable[None]]


def play(scenario: Scenario, *, ticket_seconds: float = 5.0) -> list[prefill_pb2.PrefillEvent]:
    """Runs a scenario on an offered ticket; returns what the stream still said after it."""

    async def run() -> list[prefill_pb2.PrefillEvent]:
        async with engine_rig(tiny_config(handoff=HandoffConfig(ticket_seconds=ticket_seconds))) as rig:
            call = rig.stub.Prefill(prefill_request())
            ticket = (await next_of(call, "ticket")).ticket
            await asyncio.wait_for(scenario(rig, ticket), 15)
            if rig.front.lifecycle.attempts.live():
                call.cancel()
                return []
            return (await read_stream(call))[0]

    return asyncio.run(run())


def test_hello_agrees_on_protocol_format_and_transport():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        hello = handoff_pb2.HelloRequest(
            protocol_min=1, protocol_max=9, engine_id="d1", epoch=4, transports=["rdma", "stream"]
        )
        hello.readable.add(fingerprint=ticket.format.fingerprint)
        reply = await rig.source.Hello(hello)
        assert (reply.protocol, reply.transport, reply.engine_id) == (1, "stream", "pe-test")
        assert reply.chosen.fingerprint == ticket.format.fingerprint
        assert 0 < reply.renew_every.ToMilliseconds() < 5000

    play(scenario)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"protocol_max": 0}, "PROTOCOL_TOO_OLD"),
        ({"protocol_max": 1, "transports": ["rdma"]}, "TRANSPORT_UNSUPPORTED"),
        ({"protocol_max": 1, "readable": [common_pb2.KvFormat(fingerprint=b"x" * 32)]}, "KV_FORMAT_MISMATCH"),
    ],
    ids=["protocol", "transport", "format"],
)
def test_hello_refuses_what_it_cannot_serve(fields: dict[str, object], reason: str):
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        failure = await refused(rig.source.Hello(handoff_pb2.HelloRequest(**fields)))
        assert (failure.reason, failure.code) == (reason, grpc.StatusCode.FAILED_PRECONDITION)

    play(scenario)


def test_exactly_one_of_many_claimants_wins():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        results = await asyncio.gather(
            *(claim(rig, ticket, engine_id=f"d{i}") for i in range(8)), return_exceptions=True
        )
        won = [result for result in results if not isinstance(result, BaseException)]
        lost = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert (len(won), len(lost)) == (1, 7)
        assert {error.code() for error in lost} == {grpc.StatusCode.ABORTED}
        assert won[0].first_token.token == FIRST_TOKEN
        assert won[0].ticket.kv_tokens == 300

    play(scenario)


def test_repeated_claim_of_the_winner_gets_the_same_claim():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        first, second = await claim(rig, ticket), await claim(rig, ticket)
        assert first.claim_id == second.claim_id
        assert (await refused(claim(rig, ticket, epoch=2))).reason == "TICKET_CLAIMED"

    play(scenario)


def test_claim_in_another_format_or_of_an_unknown_ticket_fails():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        wrong = handoff_pb2.ClaimTicketRequest(ticket_id=ticket.ticket_id, engine_id="d", format_fingerprint=b"x" * 32)
        assert (await refused(rig.source.Claim(wrong))).reason == "KV_FORMAT_MISMATCH"
        unknown = await refused(rig.source.Claim(handoff_pb2.ClaimTicketRequest(ticket_id=b"?" * 16)))
        assert (unknown.reason, unknown.code) == ("TICKET_GONE", grpc.StatusCode.NOT_FOUND)

    play(scenario)


def test_several_reads_at_once_each_get_their_component():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        claimed = await claim(rig, ticket)
        kinds = [region.kind for region in REGIONS]
        parts = await asyncio.gather(*(read_kv(rig, ticket, claimed.claim_id, kind) for kind in kinds))
        assert list(parts) == [component_bytes(kind) for kind in kinds]

    play(scenario)


@pytest.mark.parametrize("offset", [1, 1 << 20, 3 * (1 << 20) + 16, 3 * (1 << 20) + 17])
def test_read_from_an_offset_gives_the_rest(offset: int):
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        claimed = await claim(rig, ticket)
        data = await read_kv(rig, ticket, claimed.claim_id, BLOCK_KV, offset=offset)
        assert data == component_bytes(BLOCK_KV)[offset:]

    play(scenario)


def test_read_without_the_claim_or_of_a_foreign_part_fails():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        claimed = await claim(rig, ticket)
        assert (await refused(read_kv(rig, ticket, b"?", BLOCK_KV))).reason == "TICKET_CLAIMED"
        assert (await refused(read_kv(rig, ticket, claimed.claim_id, 2))).reason == "KV_FORMAT_MISMATCH"
        beyond = read_kv(rig, ticket, claimed.claim_id, BLOCK_KV, offset=1 << 40)
        assert (await refused(beyond)).reason == "KV_FORMAT_MISMATCH"

    play(scenario)


def test_abort_during_a_read_stops_it_and_drains():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        rig.ranks[0].read_delay_seconds = 0.1
        claimed = await claim(rig, ticket)
        reading = asyncio.create_task(refused(read_kv(rig, ticket, claimed.claim_id, BLOCK_KV)))
        while not rig.ranks[0].reads:
            await asyncio.sleep(0.005)
        abort = handoff_pb2.AbortTicketRequest(ticket_id=ticket.ticket_id, generation=3, reason="no pages")
        first = await rig.source.Abort(abort)
        assert (first.known, first.drained, first.generation) == (True, False, 3)
        assert (await reading).reason == "TICKET_GONE"
        while not (await rig.source.Abort(abort)).drained:
            await asyncio.sleep(0.005)
        assert len(rig.ranks[0].messages(Release)) == 1

    events = play(scenario)
    assert events[-1].completed.handoff.state == prefill_pb2.HandoffState.ABORTED


def test_abort_of_an_unknown_ticket_is_answered_unknown():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        reply = await rig.source.Abort(handoff_pb2.AbortTicketRequest(ticket_id=b"?" * 16, generation=2))
        assert (reply.known, reply.drained, reply.generation) == (False, True, 2)

    play(scenario)


def test_settle_after_the_lease_says_discard():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        claimed = await claim(rig, ticket)
        while rig.front.lifecycle.tickets.open_tickets():
            await asyncio.sleep(0.01)
        assert not await settle(rig, ticket, claimed.claim_id)

    events = play(scenario, ticket_seconds=0.2)
    assert events[-1].completed.handoff.state == prefill_pb2.HandoffState.EXPIRED


def test_renewals_keep_the_ticket_alive():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        claimed = await claim(rig, ticket)
        record = rig.front.lifecycle.tickets.find(ticket.ticket_id)
        before = record.expires
        renew = handoff_pb2.RenewTicketsRequest(engine_id="d1", ticket_ids=[ticket.ticket_id, b"?"])
        reply = await rig.source.RenewTickets(renew)
        assert (list(reply.lost), reply.source_epoch) == ([b"?"], 1_000_123)
        assert record.expires > before
        assert await settle(rig, ticket, claimed.claim_id)

    play(scenario)


def test_settle_is_idempotent_and_releases_the_rank_once():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        claimed = await claim(rig, ticket)
        assert await settle(rig, ticket, claimed.claim_id)
        assert await settle(rig, ticket, claimed.claim_id)
        while not rig.ranks[0].messages(Release):
            await asyncio.sleep(0.005)
        assert len(rig.ranks[0].messages(Release)) == 1

    events = play(scenario)
    assert events[-1].completed.handoff.state == prefill_pb2.HandoffState.DELIVERED


def test_rank_that_dies_during_a_read_fails_the_read():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        rig.ranks[0].read_delay_seconds = 10.0
        claimed = await claim(rig, ticket)
        reading = asyncio.create_task(refused(read_kv(rig, ticket, claimed.claim_id, BLOCK_KV)))
        while not rig.ranks[0].reads:
            await asyncio.sleep(0.005)
        rig.front.lanes[0].fail_reads()
        rig.front.lifecycle.lose_rank(0)
        failure = await reading
        assert (failure.reason, failure.code) == ("RANK_LOST", grpc.StatusCode.UNAVAILABLE)

    play(scenario)


def play_with_data_port(scenario: Scenario) -> None:
    """As play, on an engine whose rank has a data transport."""

    async def run() -> None:
        async with engine_rig(tiny_config(), data_port=7001) as rig:
            call = rig.stub.Prefill(prefill_request())
            ticket = (await next_of(call, "ticket")).ticket
            await asyncio.wait_for(scenario(rig, ticket), 15)
            call.cancel()

    asyncio.run(run())


def claim_by(rig: Rig, ticket: prefill_pb2.Ticket, *transports: str) -> Awaitable[handoff_pb2.ClaimTicketResponse]:
    return rig.source.Claim(
        handoff_pb2.ClaimTicketRequest(ticket_id=ticket.ticket_id, engine_id="d1", epoch=1, transports=transports)
    )


def test_hello_chooses_the_data_transport_when_both_speak_it():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        for transports, chosen in (["tcp", "stream"], "tcp"), (["stream"], "stream"), ([], "stream"):
            hello = handoff_pb2.HelloRequest(protocol_min=1, protocol_max=1, transports=transports)
            assert (await rig.source.Hello(hello)).transport == chosen

    play_with_data_port(scenario)


def test_keys_of_the_data_transport_go_to_the_winner_of_the_claim_only():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        assert all(not part.alternatives for part in ticket.regions)
        claimed = (await claim_by(rig, ticket, "tcp", "stream")).ticket
        places = [part.alternatives[0].peer for part in claimed.regions]
        assert {(place.kind, place.endpoint) for place in places} == {("tcp", "127.0.0.1:7001")}
        keys = [place.key for place in places]
        assert {len(key) for key in keys} == {32}
        assert len(set(keys)) == len(keys) == len(REGIONS)
        assert [named.key for named in rig.ranks[0].exposed[0].keys] == keys

    play_with_data_port(scenario)


def test_repeated_claims_get_the_same_keys():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        first, second = await asyncio.gather(*(claim_by(rig, ticket, "tcp") for _ in range(2)))
        assert first.ticket.regions == second.ticket.regions

    play_with_data_port(scenario)


def test_peer_that_speaks_grpc_only_is_given_no_keys():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        claimed = (await claim_by(rig, ticket, "stream")).ticket
        assert all(not part.alternatives for part in claimed.regions)
        assert rig.ranks[0].exposed == []

    play_with_data_port(scenario)


def test_delivery_over_the_data_transport_is_counted_by_mode_and_transport():
    async def scenario(rig: Rig, ticket: prefill_pb2.Ticket) -> None:
        claimed = await claim_by(rig, ticket, "tcp")
        request = handoff_pb2.SettleRequest(
            ticket_id=ticket.ticket_id, claim_id=claimed.claim_id, delivered=True, bytes=1 << 40
        )
        assert (await rig.source.Settle(request)).still_owned
        labels = {"mode": "pull", "transport": "tcp"}
        assert rig.registry.get_sample_value("kv_handoff_seconds_count", labels) == 1
        sent = rig.registry.get_sample_value(
            "pe_kv_transfer_bytes_total", {"direction": "out", "component": "block_kv"}
        )
        assert sent == len(component_bytes(BLOCK_KV))
        record = rig.front.lifecycle.tickets.find(ticket.ticket_id)
        assert record is not None
        assert record.bytes_read == record.num_bytes  # never more than there was

    play_with_data_port(scenario)
