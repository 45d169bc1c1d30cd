"""NixlTransport: one-sided reads and writes through NIXL's UCX backend, for RDMA between nodes. Optional extra (kv.md 4).

Peers agree over the frames of the tcp transport (LOCATE or OFFER, PLACE, SETTLED); only the bytes travel by NIXL. The trap: a
pull that is late stays unsettled until its transfer ends by itself or `close_peer` destroys the agent that runs it, which fails
the agent's other transfers too. Two agents keep apart what we start (pulls, pushes) from what peers do to our memory.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from prefill_engine.kv.transport.contract import PullOutcome, PullState, Source
from prefill_engine.kv.transport.frame import Frame, FrameError, Op, Refusal, encode
from prefill_engine.kv.transport.grants import Grant, Grants
from prefill_engine.kv.transport.link import Link, LinkLost
from prefill_engine.kv.transport.listener import Listener, read_question, refuse
from prefill_engine.kv.transport.nixl_agent import NixlAgent, NixlFailed, Place
from prefill_engine.kv.transport.outcome import always_settled, check_arguments, ended, is_in_order, judge_answer
from prefill_engine.kv.transport.peer import read_answer
from prefill_engine.kv.transport.peers import Peers
from prefill_engine.kv.transport.rdma import Fabric
from prefill_engine.kv.transport.tcp import MAX_LINKS, MAX_LINKS_PER_PEER, endpoint_of
from prefill_engine.kv.transport.tls import load_contexts
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import TransportConfig

logger = logging.getLogger(__name__)

_MAX_PLACE_BYTES = 1 << 20
_LATE_POLL_SECONDS = 0.01
_NOTE_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class _Transfer:
    """One READ or WRITE of ours. starting: gives its number on the agent. held: its registration there. is_over: nothing of it
    can move any more."""

    endpoint: str
    agent: NixlAgent
    view: memoryview
    starting: "asyncio.Task[int] | None" = None
    held: Any = None
    is_over: bool = True


class NixlTransport:
    """Owner of both agents, the agreement listener and connections, and the grants. counters as TcpTransport's, plus recycled."""

    def __init__(
        self,
        config: TransportConfig,
        *,
        library: Any,
        pod_ip: str = "",
        fabric: Fabric = Fabric.TCP,
        regions: Sequence[memoryview] = (),
    ) -> None:
        """Raises ConfigError: require_rdma and UCX may choose something else, unusable TLS files."""
        if config.require_rdma and fabric is not Fabric.RDMA:
            raise ConfigError(f"transport.require_rdma is set and UCX is left {fabric}; not falling back to TCP")
        self._config, self._library, self._pod_ip = config, library, pod_ip
        self._fabric = fabric
        self._regions = tuple(regions)
        self._tls = load_contexts(config.tls)
        self._agents: dict[str, NixlAgent] = {}
        self._starting = asyncio.Lock()
        self._peers = Peers(context=self._tls.client if self._tls else None)
        self._grants = Grants()
        self._stuck_grants: set[Grant] = set()
        self._late: set[_Transfer] = set()
        self._watching: set[asyncio.Task[None]] = set()
        self._find: Callable[[bytes], Source | None] = lambda _key: None
        self._listener = Listener(self._answer, max_links=MAX_LINKS, max_links_per_peer=MAX_LINKS_PER_PEER)
        self._own: Counter[str] = Counter()

    @property
    def kind(self) -> str:
        return f"nixl-ucx-{self._fabric}"

    @property
    def counters(self) -> dict[str, int]:
        return {**self._own, "reconnects": self._peers.num_reconnects, **self._listener.counters}

    async def listen(self, find: Callable[[bytes], Source | None]) -> str:
        """See Transport.listen. Raises ConfigError: port taken, or UCX can't be brought up here."""
        self._find = find
        try:
            await self._agent("owner")
            await self._agent("reader")
        except NixlFailed as error:
            raise ConfigError(f"transport.kind nixl: no UCX agent could be made: {error}") from error
        context = self._tls.server if self._tls else None
        port = self._listener.start(self._config.host, self._config.port, context=context)
        return endpoint_of(self._config, pod_ip=self._pod_ip, port=port)

    async def use_region(self, region: memoryview) -> None:
        """See Transport.use_region. Agents are made anew, so nothing outside the region stays readable by peers."""
        self._regions = (region,)
        for role in list(self._agents):
            await self._recycle(role)
            try:
                await self._agent(role)
            except NixlFailed as error:
                logger.warning(
                    "no agent with the new region; the next transfer tries again", extra={"detail": str(error)}
                )

    async def pull(self, endpoint: str, key: bytes, target: memoryview, *, deadline_seconds: float) -> PullOutcome:
        """See Transport.pull."""
        question = Frame(op=Op.LOCATE, exchange=0, key=key, length=len(target))
        return await self._run("READ", endpoint, question, target, deadline_seconds)

    async def push(self, endpoint: str, key: bytes, source: memoryview, *, deadline_seconds: float) -> PullOutcome:
        """See Transport.push. A read-only source is copied first: UCX wants an address of writable memory."""
        view = memoryview(bytearray(source)) if source.readonly else source
        question = Frame(op=Op.OFFER, exchange=0, key=key, length=len(view))
        return await self._run("WRITE", endpoint, question, view, deadline_seconds)

    def accept(self, key: bytes, target: memoryview, done: Callable[[], None]) -> Callable[[], bool]:
        """See Transport.accept. A write that has begun can't be stopped: revoking answers False until it has ended, or until
        close_peer has destroyed the agent it writes through."""
        return self._grants.accept(key, target, done)

    async def close_peer(self, endpoint: str) -> None:
        self._peers.close(endpoint)
        if any(transfer.endpoint == endpoint for transfer in self._late):
            await self._recycle("reader")
        if self._stuck_grants:
            await self._recycle("owner")

    async def close(self) -> None:
        for endpoint in self._peers.endpoints():
            await self.close_peer(endpoint)
        await self._listener.close()
        for role in list(self._agents):
            await self._recycle(role)
        for task in list(self._watching):
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._regions = ()  # a view of it would keep the pool's file locked

    async def _agent(self, role: str) -> NixlAgent:
        """The living agent of a role. Raises NixlFailed."""
        async with self._starting:
            agent = self._agents.get(role)
            if agent is None:
                agent = NixlAgent(self._library, f"kvd-{role}", self._regions)
                await agent.call(agent.start_in_thread)
                self._agents[role] = agent
            return agent

    async def _recycle(self, role: str) -> None:
        """Destroys an agent, which settles everything that was in flight on it; the next use makes another."""
        agent = self._agents.pop(role, None)
        if agent is None:
            return
        self._own["recycled"] += 1
        await agent.destroy()
        for transfer in [one for one in self._late if one.agent is agent]:
            transfer.is_over = True
            self._late.discard(transfer)
        if role == "owner":
            for grant in self._stuck_grants:
                self._grants.fail(grant)
            self._stuck_grants.clear()

    async def _run(
        self, operation: str, endpoint: str, question: Frame, view: memoryview, deadline_seconds: float
    ) -> PullOutcome:
        check_arguments(question.key, deadline_seconds)
        started = time.monotonic()
        settled: Callable[[], bool] = always_settled
        transfer: _Transfer | None = None
        try:
            async with asyncio.timeout(deadline_seconds):
                transfer = _Transfer(endpoint, await self._agent("reader"), view)
                state, reason = await self._exchange(operation, question, transfer, deadline_seconds)
        except TimeoutError:
            state, reason = PullState.LATE, f"not done within {deadline_seconds:g} s"
        except (LinkLost, FrameError, NixlFailed) as error:
            state, reason = PullState.FAILED, str(error)
        finally:
            if transfer is not None:
                settled = self._leave(transfer)
        self._own[f"{'pull' if operation == 'READ' else 'push'}_{state}"] += 1
        return ended(state, reason, started=started, settled=settled)

    async def _exchange(
        self, operation: str, question: Frame, transfer: _Transfer, deadline_seconds: float
    ) -> tuple[PullState, str]:
        agent, view = transfer.agent, transfer.view
        async with self._peers.exchange(transfer.endpoint, question, deadline_seconds=deadline_seconds) as exchange:
            link, asked = exchange.link, exchange.question
            if exchange.answer.op is not Op.PLACE:
                exchange.in_order = is_in_order(exchange.answer)
                bad = judge_answer(exchange.answer, expected=Op.PLACE, length=-1)
                assert bad is not None
                return bad
            place = await _read_place(link, exchange.answer, length=len(view))
            if len(view):
                transfer.held = await agent.call(agent.hold_in_thread, view)
                begin = agent.call(agent.begin_in_thread, operation, view, place, _note(asked))
                # From here on bytes may move, whatever becomes of this coroutine.
                transfer.is_over = False
                transfer.starting = asyncio.create_task(begin)
                await self._carry_on(transfer, transfer.starting)
            await link.send(encode(replace(asked, op=Op.SETTLED)))
            bad = None
            if operation == "WRITE":
                bad = judge_answer(await read_answer(link, asked), expected=Op.STORED, length=len(view))
            exchange.in_order = bad is None
            return bad or (PullState.DONE, "")

    async def _carry_on(self, transfer: _Transfer, starting: "asyncio.Task[int]") -> None:
        """Waits for the transfer's end. Cancelled, or with its agent destroyed, it leaves is_over False."""
        agent = transfer.agent
        try:
            number = await asyncio.shield(starting)
            while not await agent.call(agent.poll_in_thread, number):
                pass
        except NixlFailed:
            transfer.is_over = not agent.is_dead
            raise
        transfer.is_over = True

    def _leave(self, transfer: _Transfer) -> Callable[[], bool]:
        """What becomes of a transfer when its call returns: ended, or watched until it has."""
        if not transfer.is_over:
            self._late.add(transfer)
        if not transfer.is_over or transfer.held is not None:
            task = asyncio.create_task(self._watch(transfer))
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)
        return lambda: transfer.is_over

    async def _watch(self, transfer: _Transfer) -> None:
        """Polls a late transfer to its end, then gives its registration back."""
        agent = transfer.agent
        try:
            if not transfer.is_over and transfer.starting is not None:
                number = await transfer.starting
                while not await agent.call(agent.poll_in_thread, number):
                    await asyncio.sleep(_LATE_POLL_SECONDS)
            if transfer.held is not None:
                await agent.call(agent.drop_in_thread, transfer.held)
        except NixlFailed:
            pass  # it failed, which is an end as well; or the agent is being destroyed
        if agent.is_dead:
            await agent.gone.wait()
        transfer.is_over = True
        self._late.discard(transfer)

    async def _answer(self, link: Link, question: Frame) -> bool:
        match question.op:
            case Op.LOCATE:
                return await self._offer_source(link, question)
            case Op.OFFER:
                return await self._offer_target(link, question)
            case _:
                raise FrameError(f"{question.op.name} is no question of a nixl transport")

    async def _offer_source(self, link: Link, question: Frame) -> bool:
        """Pins the thing until the peer says that its READ has ended, or is gone."""
        source = self._find(question.key)
        if source is None:
            self._own["served_absent"] += 1
            await link.send(encode(Frame(op=Op.ABSENT, exchange=question.exchange, key=question.key)))
            return True
        try:
            if len(source.view) != question.length:
                return await refuse(link, question, Refusal.SIZE)
            agent, held = await self._place(link, question, source.view)
            try:
                await _read_settled(link, question)
            finally:
                await _drop(agent, held)
        finally:
            source.release()
        self._own["served"] += 1
        return True

    async def _offer_target(self, link: Link, question: Frame) -> bool:
        """Lets the peer WRITE; a peer that is gone before it said SETTLED may still be writing."""
        is_writing = False

        def stop() -> bool:
            return not is_writing

        grant = self._grants.begin(question.key, stop)
        if grant is None:
            return await refuse(link, question, Refusal.NO_GRANT)
        try:
            if len(grant.target) != question.length:
                self._grants.fail(grant)
                return await refuse(link, question, Refusal.SIZE)
            is_writing = len(grant.target) > 0
            agent, held = await self._place(link, question, grant.target)
            await _read_settled(link, question)
            if is_writing:
                await _await_note(agent, _note(question))
        except BaseException:
            if is_writing:
                self._stuck_grants.add(grant)
            else:
                self._grants.fail(grant)
            raise
        self._grants.finish(grant)
        await _drop(agent, held)
        await link.send(encode(replace(question, op=Op.STORED)))
        return True

    async def _place(self, link: Link, question: Frame, view: memoryview) -> tuple[NixlAgent, Any]:
        """Tells the peer where the view stands. Raises LinkLost."""
        try:
            agent = await self._agent("owner")
            held = await agent.call(agent.hold_in_thread, view) if len(view) else None
            place = await agent.call(agent.place_in_thread, view, held)
        except NixlFailed as error:
            raise LinkLost(f"our agent: {error}") from error
        payload = msgspec.msgpack.encode(place)
        await link.send(encode(replace(question, op=Op.PLACE, length=len(payload))), more=True)
        await link.send(payload)
        return agent, held


def _note(frame: Frame) -> bytes:
    """Names one WRITE to the side that is written to."""
    return frame.key + frame.exchange.to_bytes(4, "little")


async def _read_place(link: Link, answer: Frame, *, length: int) -> Place:
    """Raises LinkLost, FrameError."""
    if answer.length > _MAX_PLACE_BYTES:
        raise FrameError(f"place of {answer.length} bytes, limit {_MAX_PLACE_BYTES}")
    payload = bytearray(answer.length)
    await link.receive(memoryview(payload))
    try:
        place = msgspec.msgpack.decode(payload, type=Place)
    except msgspec.DecodeError as error:
        raise FrameError(f"place: {error}") from error
    if place.length != length:
        raise FrameError(f"place of {place.length} bytes, asked was {length}")
    return place


async def _read_settled(link: Link, question: Frame) -> None:
    """Raises LinkLost, FrameError."""
    frame = await read_question(link)
    if (frame.op, frame.exchange) != (Op.SETTLED, question.exchange):
        raise FrameError(f"{frame.op.name} of exchange {frame.exchange}, expected SETTLED of {question.exchange}")


async def _await_note(agent: NixlAgent, note: bytes) -> None:
    """Raises TimeoutError, LinkLost."""
    try:
        async with asyncio.timeout(_NOTE_SECONDS):
            while not await agent.call(agent.has_note_in_thread, note):
                await asyncio.sleep(0)
    except NixlFailed as error:
        raise LinkLost(f"our agent: {error}") from error


async def _drop(agent: NixlAgent, held: Any) -> None:
    if held is not None:
        with contextlib.suppress(NixlFailed):
            await agent.call(agent.drop_in_thread, held)
