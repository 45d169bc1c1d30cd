"""Prefill over real gRPC and real lanes against a fake rank: the happy path from request to settled ticket."""

import asyncio

import crc32c

from prefill_engine.messages import Release
from prefill_engine.rpc import common_pb2, handoff_pb2, prefill_pb2
from prefill_testing.engine_rig import Rig, engine_rig, prefill_request, tiny_config
from prefill_testing.fake_rank import FIRST_TOKEN, REGIONS, component_bytes

PHASES = {"PHASE_ADMISSION", "PHASE_QUEUE", "PHASE_COMPUTE", "PHASE_STORE", "PHASE_HANDOFF"}


async def take_over(rig: Rig, ticket: prefill_pb2.Ticket, *, engine_id: str = "decode-1") -> dict[int, bytes]:
    """Claims, reads all components checking each piece, settles as delivered."""
    claim = await rig.source.Claim(
        handoff_pb2.ClaimTicketRequest(ticket_id=ticket.ticket_id, engine_id=engine_id, epoch=1)
    )
    parts: dict[int, bytes] = {}
    for region in claim.ticket.regions:
        request = handoff_pb2.ReadKvRequest(ticket_id=ticket.ticket_id, claim_id=claim.claim_id, kind=region.kind)
        data = b""
        async for piece in rig.source.ReadKv(request):
            assert (piece.kind, piece.offset) == (region.kind, len(data))
            assert piece.crc32c == crc32c.crc32c(piece.data)
            assert len(piece.data) <= 1 << 20
            data += piece.data
            assert piece.last == (len(data) == region.region.extents[0].length)
        parts[region.kind] = data
    settled = await rig.source.Settle(
        handoff_pb2.SettleRequest(ticket_id=ticket.ticket_id, claim_id=claim.claim_id, delivered=True)
    )
    assert settled.still_owned
    return parts


def test_prefill_streams_events_and_hands_over_every_byte():
    async def run() -> tuple[list[prefill_pb2.PrefillEvent], dict[int, bytes], int]:
        async with engine_rig(tiny_config()) as rig:
            request = prefill_request(300)
            request.events.timeline = True
            events, parts = [], {}
            async for event in rig.stub.Prefill(request, timeout=10):
                events.append(event)
                if event.HasField("ticket"):
                    parts = await take_over(rig, event.ticket)
            return events, parts, len(rig.ranks[0].messages(Release))

    events, parts, num_releases = asyncio.run(run())
    kinds = [event.WhichOneof("body") for event in events]
    assert [kind for kind in kinds if kind != "chunk"][:4] == ["accepted", "queued", "first_token", "ticket"]
    assert 1 <= kinds.count("chunk") <= 2
    assert kinds[-1] == "completed"
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert {event.pe_epoch for event in events} == {1_000_123}
    assert parts == {region.kind: component_bytes(region.kind) for region in REGIONS}
    states = [event.handoff.state for event in events if event.HasField("handoff")]
    assert states == [2, 3, 4]  # CLAIMED, MOVING, DELIVERED
    done = events[-1].completed
    assert done.handoff.state == prefill_pb2.HandoffState.DELIVERED
    assert done.usage.prompt_tokens == 300
    assert done.usage.cached_tokens + done.usage.computed_tokens == 300
    assert done.usage.kv_bytes_moved == sum(region.num_bytes for region in REGIONS)
    assert done.store.blocks_committed == 2
    names = [common_pb2.Phase.Name(stage.phase) for stage in done.timeline]
    assert set(names) == PHASES
    first = next(event.first_token for event in events if event.HasField("first_token"))
    assert first.token == FIRST_TOKEN
    assert num_releases == 1
