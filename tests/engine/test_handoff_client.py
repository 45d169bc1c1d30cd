"""HandoffClient and take_over against a small source on loopback: pieces, checksums, claims, settling."""

import pytest

from prefill_engine.handoff_client import HandoffClient
from prefill_engine.rpc import common_pb2, handoff_pb2
from prefill_engine.rpc.status import Failure
from prefill_engine.takeover import TakenOver, take_over
from prefill_plan.errors import BlockCorrupt, CallFailed
from prefill_testing.scripted_engine import ROW, SECRET, TICKET, Source, call, piece


def read_hand_over(source: Source) -> dict[int, bytes]:
    async def scenario(endpoint: str) -> dict[int, bytes]:
        async with HandoffClient(endpoint, engine_id="decode-0", epoch=1) as client:
            assert await client.hello() == 77
            claim = await client.claim(TICKET)
            assert claim.first_token == 9
            parts = await client.read_all(claim)
            assert await client.settle(claim, delivered=True, num_bytes=len(ROW), took_seconds=0.5)
            return parts

    return call(scenario, source=source)


def test_hand_over_is_read_in_pieces_and_settled() -> None:
    source = Source([piece(ROW[:150], 0), piece(ROW[150:], 150)])
    assert read_hand_over(source) == {common_pb2.COMPONENT_KIND_REQUEST_ROW: ROW}
    settled = source.settled[0]
    assert (settled.claim_id, settled.bytes, settled.took.ToMilliseconds()) == (SECRET[::-1], len(ROW), 500)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([piece(ROW, 0, crc=1)], "has CRC32C"),
        ([piece(ROW[:150], 0)], "150 bytes, ticket says 200"),
        ([piece(ROW[:150], 0), piece(ROW[150:], 149)], "expected offset 150"),
        ([piece(ROW, 0, kind=common_pb2.COMPONENT_KIND_BLOCK_KV)], "got a piece of BLOCK_KV"),
        ([], "0 bytes, ticket says 200"),
    ],
    ids=["bit flip", "short", "gap", "other component", "empty"],
)
def test_damaged_hand_over_is_refused(pieces: list[handoff_pb2.KvBytes], message: str) -> None:
    with pytest.raises(BlockCorrupt, match=message):
        read_hand_over(Source(pieces))


def run_take_over(source: Source) -> TakenOver:
    async def scenario(endpoint: str) -> TakenOver:
        return await take_over(TICKET, endpoint=endpoint)

    return call(scenario, source=source)


def test_take_over_claims_reads_and_settles_as_delivered() -> None:
    source = Source([piece(ROW, 0)])
    taken = run_take_over(source)
    assert (taken.components, taken.first_token) == ({common_pb2.COMPONENT_KIND_REQUEST_ROW: ROW}, 9)
    assert [settled.delivered for settled in source.settled] == [True]


def test_damaged_take_over_is_settled_as_failed() -> None:
    source = Source([piece(ROW, 0, crc=1)])
    with pytest.raises(BlockCorrupt):
        run_take_over(source)
    assert [settled.delivered for settled in source.settled] == [False]


def test_bytes_of_an_expired_lease_are_discarded() -> None:
    with pytest.raises(CallFailed, match="the lease of 30 s ran out while 200 bytes were read") as caught:
        run_take_over(Source([piece(ROW, 0)], still_owned=False))
    assert caught.value.reason == "TICKET_GONE"


def test_a_lost_claim_says_who_is_to_blame() -> None:
    with pytest.raises(CallFailed) as caught:
        read_hand_over(
            Source([], Failure(reason="TICKET_CLAIMED", phase="HANDOFF", public_message="another peer holds it"))
        )
    assert (caught.value.status, caught.value.reason) == ("ABORTED", "TICKET_CLAIMED")


def test_abort_reports_drained() -> None:
    async def scenario(endpoint: str) -> bool:
        async with HandoffClient(endpoint, engine_id="decode-0", epoch=1) as client:
            return await client.abort(TICKET, reason="no pages")

    assert call(scenario)
