"""Pulls one component of a claimed hand-over over the data transport, piece by piece, and verifies it. No torch, no gRPC.

Called by HandoffClient. The trap: a piece that came late may still be written into its target, so a pull that failed waits for
its transfers to be settled before it says so: then the memory may be used again.
"""

import asyncio

from prefill_engine.client_ticket import PeerPlace
from prefill_engine.handoff_pieces import CHECK_BYTES, CHECKS_INDEX, cut_pieces, first_damaged, piece_key
from prefill_engine.kv.transport.contract import PullOutcome, PullState, Transport
from prefill_plan.errors import BlockCorrupt, CallFailed

_WINDOW = 4
_SETTLE_POLL_SECONDS = 0.02


class PeerBusy(Exception):
    """The peer has the component and can't give it by this transport now; nothing of it was used. Never leaves HandoffClient."""


async def pull_component(
    transport: Transport, place: PeerPlace, *, num_bytes: int, name: str, piece_seconds: float
) -> bytes:
    """All bytes of a component.

    Raises:
        CallFailed: the peer is gone, came late, or no longer has it (the hand-off has ended).
        BlockCorrupt: the bytes are not those that the peer's checksums speak of; nothing was used.
        PeerBusy: it has to be read another way.
    """
    data = bytearray(num_bytes)
    pieces = cut_pieces(place.key, num_bytes=num_bytes, piece_bytes=place.piece_bytes)
    checks = bytearray(len(pieces) * CHECK_BYTES)
    targets = [(piece.key, memoryview(data)[piece.start : piece.end]) for piece in pieces]
    await _pull_all(transport, place, targets, name=name, piece_seconds=piece_seconds)
    # Asked for at the end: these are the checksums of what was served.
    checks_key = piece_key(place.key, CHECKS_INDEX)
    await _pull_all(transport, place, [(checks_key, memoryview(checks))], name=name, piece_seconds=piece_seconds)
    damaged = first_damaged(data, bytes(checks), piece_bytes=place.piece_bytes)
    if damaged is not None:
        raise BlockCorrupt(
            f"hand-over of {name}: piece {damaged} of {len(pieces)} is not what its CRC32C says; dropped"
        )
    return bytes(data)


async def _pull_all(
    transport: Transport,
    place: PeerPlace,
    targets: list[tuple[bytes, memoryview]],
    *,
    name: str,
    piece_seconds: float,
) -> None:
    window = asyncio.Semaphore(_WINDOW)
    bad: list[PullOutcome] = []

    async def one(key: bytes, target: memoryview) -> None:
        async with window:
            if not bad:
                outcome = await transport.pull(place.endpoint, key, target, deadline_seconds=piece_seconds)
                if outcome.state is not PullState.DONE:
                    bad.append(outcome)

    await asyncio.gather(*(one(key, target) for key, target in targets))
    if not bad:
        return
    await _settle(transport, place.endpoint, bad)
    if all(outcome.state is PullState.BUSY for outcome in bad):
        raise PeerBusy
    first = next(outcome for outcome in bad if outcome.state is not PullState.BUSY)
    reason = "HANDOFF_TIMEOUT" if first.state is PullState.LATE else "TICKET_GONE"
    raise CallFailed(
        f"{place.endpoint}: hand-over of {name} by {transport.kind}: {first.state} ({first.reason}) after "
        f"{first.seconds:.3g} s; what was read is discarded",
        status="UNAVAILABLE",
        reason=reason,
        phase="HANDOFF",
    )


async def _settle(transport: Transport, endpoint: str, outcomes: list[PullOutcome]) -> None:
    if any(not outcome.settled() for outcome in outcomes):
        await transport.close_peer(endpoint)
    while any(not outcome.settled() for outcome in outcomes):
        await asyncio.sleep(_SETTLE_POLL_SECONDS)
