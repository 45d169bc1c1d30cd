"""A prefill of a real engine whose hand-off goes to a decode peer of its own process: for tests that kill or stop either."""

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

from prefill_engine.client import PrefillAttempt, PrefillClient, PrefillOptions
from prefill_engine.local_engine import LocalEngine
from prefill_engine.rpc import prefill_pb2
from prefill_engine.timeline import Completed
from prefill_plan.errors import CallFailed
from prefill_testing.decode_peer import PATIENCE_SECONDS, DecodePeer

OVERRIDES = (
    "replay.keep_tokens=24",
    "kv.pool_tokens=5120",
    "kv.state_slots=8",
    "max_context_tokens=2048",
    "scheduler.chunk_cap_tokens=256",
    "scheduler.min_chunk_tokens=16",
    "handoff.ticket_seconds=1.5",
    "handoff.piece_seconds=1.0",
)
GRANT_SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class End:
    """How the attempt ended for its caller: state of the hand-off, or reason of the failure."""

    handoff: str = ""
    reason: str = ""


def prompt(seed: str, length: int = 300) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 480) for _ in range(length)]


async def run_way(
    engine: LocalEngine, peer: DecodePeer, way: str, tokens: list[int], *, grant_seconds: float = GRANT_SECONDS
) -> End:
    """way: the transport of a pull, or "push-" and that of a push. grant_seconds: lease of a push's memory."""
    if way.startswith("push-"):
        transport = way.removeprefix("push-")
        return await run_push(engine, peer, tokens, grant_seconds=grant_seconds, transport=transport)
    return await run_pull(engine, peer, tokens, transport=way)


async def run_pull(engine: LocalEngine, peer: DecodePeer, tokens: list[int], *, transport: str) -> End:
    """Sends the prompt; its ticket goes to the peer."""
    async with PrefillClient(engine.endpoint) as client:
        attempt = _TicketAttempt(client, tokens, PrefillOptions())

        async def hand_over() -> None:
            ticket = await attempt.ticket_message
            peer.tell(op="pull", ticket=ticket.SerializeToString().hex(), transport=transport)

        helper = asyncio.create_task(hand_over())
        end = await _end_of(attempt.attempt)
        await helper
        return end


async def run_push(
    engine: LocalEngine, peer: DecodePeer, tokens: list[int], *, grant_seconds: float, transport: str
) -> End:
    """The peer grants memory, the engine pushes into it."""
    async with PrefillClient(engine.endpoint) as client:
        info = await client.server_info()
        attempt = client.prefill(tokens, PrefillOptions(mode="push", store="skip"), timeout_seconds=PATIENCE_SECONDS)
        peer.tell(
            op="push",
            transport=transport,
            key=attempt.key.SerializeToString().hex(),
            tokens=len(tokens),
            format=info.format.SerializeToString().hex(),
            ttl_seconds=grant_seconds,
        )
        granted: dict[str, Any] = await asyncio.to_thread(peer.expect, "granted")
        target = prefill_pb2.PushTarget.FromString(bytes.fromhex(granted["target"]))
        attempt.push_to(target, endpoint=granted["endpoint"], engine_id="d")
        return await _end_of(attempt)


class _TicketAttempt:
    """An attempt whose ticket is kept as it came."""

    def __init__(self, client: PrefillClient, tokens: list[int], options: PrefillOptions) -> None:
        self.attempt = client.prefill(tokens, options, timeout_seconds=PATIENCE_SECONDS)
        self.ticket_message: asyncio.Future[prefill_pb2.Ticket] = asyncio.get_running_loop().create_future()
        receive = self.attempt._receive

        def keep(message: prefill_pb2.PrefillEvent) -> Any:
            if message.HasField("ticket") and not self.ticket_message.done():
                self.ticket_message.set_result(message.ticket)
            return receive(message)

        self.attempt._receive = keep  # type: ignore[method-assign]


async def _end_of(attempt: PrefillAttempt) -> End:
    completed: Completed | None = None
    try:
        async for event in attempt:
            if isinstance(event.body, Completed):
                completed = event.body
    except CallFailed as error:
        return End(reason=error.reason or error.status)
    assert completed is not None
    return End(handoff=completed.handoff.state if completed.handoff is not None else "")


async def free_tokens(engine: LocalEngine) -> tuple[int, int, int]:
    """Free KV tokens, free state slots and open tickets of the rank, from the load report."""
    async with PrefillClient(engine.endpoint) as client:
        report = await client.stub.GetLoad(prefill_pb2.GetLoadRequest(), timeout=10.0)
        rank = report.ranks[0]
        return rank.kv_tokens_free, rank.state_slots_free, rank.tickets_open


def wait_until_free(engine: LocalEngine, expected: tuple[int, int, int]) -> None:
    """Fails unless every slot comes back: 0 leaked."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := asyncio.run(free_tokens(engine))) != expected:
        assert time.monotonic() < deadline, f"free {found}, expected {expected}"
        time.sleep(0.05)
