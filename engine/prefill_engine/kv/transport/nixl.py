"""NixlTransport: one-sided reads and writes through NIXL's UCX backend, for RDMA between nodes. Optional extra (kv.md 4).

Peers agree over the frames of the tcp transport (LOCATE or OFFER, PLACE, SETTLED); only the bytes travel by NIXL. The trap: a
pull that is late stays unsettled until its transfer ends by itself or `close_peer` destroys the agent that runs it, which fails
the agent's other transfers too. Two agents keep apart what we start (pulls, pushes; here) from what peers do to our memory
(nixl_owner.py).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from prefill_engine.kv.transport.contract import PullOutcome, PullState, Source
from prefill_engine.kv.transport.frame import Frame, FrameError, Op, encode
from prefill_engine.kv.transport.link import Link, LinkLost
from prefill_engine.kv.transport.listener import Listener
from prefill_engine.kv.transport.nixl_agent import NixlAgent, NixlFailed, Place
from prefill_engine.kv.transport.nixl_owner import OwnerSide, note_of
from prefill_engine.kv.transport.outcome import always_settled, check_arguments, ended, is_in_order, judge_answer
from prefill_engine.kv.transport.peer import read_answer
from prefill_engine.kv.transport.peers import Peers
from prefill_engine.kv.transport.rdma import Fabric
from prefill_engine.kv.transport.staging import Staging, Window, may_recycle
from prefill_engine.kv.transport.tcp import MAX_LINKS, MAX_LINKS_PER_PEER, endpoint_of
from prefill_engine.kv.transport.tls import load_contexts
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import TransportConfig

logger = logging.getLogger(__name__)

_OWNER, _READER = "owner", "reader"
_MAX_PLACE_BYTES = 1 << 20
_LATE_POLL_SECONDS = 0.01
_RELIEF_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSize:
    """Of what peers READ, and the same again for what we WRITE. window_bytes: longest thing that is served."""

    num_bytes: int
    window_bytes: int

    def make(self) -> Staging:
        """Raises ValueError: less than one window."""
        return Staging(num_bytes=self.num_bytes, window_bytes=self.window_bytes)


@dataclass(slots=True, eq=False)
class _Transfer:
    """One READ or WRITE of ours. window: of the staging, that the view is in. starting: gives its number on the agent. held: its
    registration there. is_over: nothing of it can move any more."""

    endpoint: str
    agent: NixlAgent
    view: memoryview
    window: Window | None = None
    starting: "asyncio.Task[int] | None" = None
    held: Any = None
    is_over: bool = True


class NixlTransport:
    """Owner of both agents, the agreement listener and connections, and the staging.

    counters: as TcpTransport's, plus recycled (agents), and with staging no_window (refused for want of one) and quarantined.
    """

    def __init__(
        self,
        config: TransportConfig,
        *,
        library: Any,
        pod_ip: str = "",
        fabric: Fabric = Fabric.TCP,
        regions: Sequence[memoryview] = (),
        staging: StagingSize | None = None,
    ) -> None:
        """staging: what is served and pushed is copied there; beside that and the regions, a push that finds no window free
        registers its own copy for as long as it takes.

        Raises ConfigError: require_rdma and UCX may choose something else, unusable TLS files.
        """
        if config.require_rdma and fabric is not Fabric.RDMA:
            raise ConfigError(f"transport.require_rdma is set and UCX is left {fabric}; not falling back to TCP")
        self._config, self._library, self._pod_ip = config, library, pod_ip
        self._fabric = fabric
        self._regions = tuple(regions)
        self._tls = load_contexts(config.tls)
        self._agents: dict[str, NixlAgent] = {}
        self._starting, self._closing = asyncio.Lock(), asyncio.Lock()
        self._peers = Peers(context=self._tls.client if self._tls else None)
        self._late: set[_Transfer] = set()
        self._watching: set[asyncio.Task[None]] = set()
        self._own: Counter[str] = Counter()
        self._staging = {} if staging is None else {role: staging.make() for role in (_OWNER, _READER)}
        self._relieving: asyncio.Task[None] | None = None
        self._owner = OwnerSide(
            lambda: self._agent(_OWNER),
            staging=self._staging.get(_OWNER),
            counters=self._own,
            on_quarantine=self._begin_relief,
        )
        self._listener = Listener(self._owner.answer, max_links=MAX_LINKS, max_links_per_peer=MAX_LINKS_PER_PEER)

    @property
    def kind(self) -> str:
        return f"nixl{'+tls' if self._tls else ''}-ucx-{self._fabric}"

    @property
    def counters(self) -> dict[str, int]:
        return {**self._own, "reconnects": self._peers.num_reconnects, **self._listener.counters}

    async def listen(self, find: Callable[[bytes], Source | None]) -> str:
        """See Transport.listen. Raises ConfigError: port taken, or UCX can't be brought up here."""
        self._owner.find = find
        try:
            await self._agent(_OWNER)
            await self._agent(_READER)
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
        check_arguments(key, deadline_seconds)
        question = Frame(op=Op.OFFER, exchange=0, key=key, length=len(source))
        if not source.readonly:
            return await self._run("WRITE", endpoint, question, source, deadline_seconds)
        staging = self._staging.get(_READER)
        window = staging.take_now(len(source)) if staging is not None else None
        view = window.fill(source) if window is not None else memoryview(bytearray(source))
        return await self._run("WRITE", endpoint, question, view, deadline_seconds, window=window)

    def accept(self, key: bytes, target: memoryview, done: Callable[[], None]) -> Callable[[], bool]:
        """See Transport.accept. A write that has begun can't be stopped: revoking answers False until it has ended, or until
        close_peer has destroyed the agent it writes through."""
        return self._owner.grants.accept(key, target, done)

    async def close_peer(self, endpoint: str) -> None:
        self._peers.close(endpoint)
        async with self._closing:  # an end under way may settle what this one is asked for
            if any(one.endpoint == endpoint and one.agent is self._agents.get(_READER) for one in self._late):
                await self._recycle(_READER)
            if self._agents.get(_OWNER) in self._owner.stuck_agents:
                await self._recycle(_OWNER)

    async def close(self) -> None:
        for endpoint in self._peers.endpoints():
            await self.close_peer(endpoint)
        await self._listener.close()
        for role in list(self._agents):
            await self._recycle(role)
        if self._relieving is not None:  # it may be destroying an agent
            await asyncio.gather(self._relieving, return_exceptions=True)
        for task in list(self._watching):
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._regions = ()  # a view of it would keep the pool's file locked

    async def _agent(self, role: str) -> NixlAgent:
        """The living agent of a role. Raises NixlFailed."""
        async with self._starting:
            agent = self._agents.get(role)
            if agent is None:
                staged = [self._staging[role].memory] if role in self._staging else []
                regions = (*self._regions, *staged)
                agent = NixlAgent(self._library, role, regions, is_served=role == _OWNER)
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
        if role == _OWNER:
            self._owner.agent_gone(agent)

    def _begin_relief(self) -> None:
        if self._relieving is None or self._relieving.done():
            self._relieving = asyncio.create_task(self._relieve())
            self._watching.add(self._relieving)
            self._relieving.add_done_callback(self._watching.discard)

    async def _relieve(self) -> None:
        """Gets quarantined windows back, at a moment when no transfer of another peer is failed by it."""
        while (state := self._staging[_OWNER].state).quarantined:
            if may_recycle(state) and _OWNER in self._agents:
                await self._recycle(_OWNER)
            else:
                await asyncio.sleep(_RELIEF_POLL_SECONDS)

    async def _run(
        self,
        operation: str,
        endpoint: str,
        question: Frame,
        view: memoryview,
        deadline_seconds: float,
        *,
        window: Window | None = None,
    ) -> PullOutcome:
        check_arguments(question.key, deadline_seconds)
        started = time.monotonic()
        settled: Callable[[], bool] = always_settled
        transfer: _Transfer | None = None
        try:
            async with asyncio.timeout(deadline_seconds):
                transfer = _Transfer(endpoint, await self._agent(_READER), view, window)
                state, reason = await self._exchange(operation, question, transfer, deadline_seconds)
        except TimeoutError:
            state, reason = PullState.LATE, f"not done within {deadline_seconds:g} s"
        except (LinkLost, FrameError, NixlFailed) as error:
            state, reason = PullState.FAILED, str(error)
        finally:
            if transfer is not None:
                settled = self._leave(transfer)
            elif window is not None:
                self._staging[_READER].give_back(window)
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
                # Nobody takes the notes of READs: they would pile up at the owner.
                note = note_of(asked) if operation == "WRITE" else b""
                begin = agent.call(agent.begin_in_thread, operation, view, place, note)
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
        else:
            self._give_back(transfer)
        return lambda: transfer.is_over

    def _give_back(self, transfer: _Transfer) -> None:
        if transfer.window is not None:
            self._staging[_READER].give_back(transfer.window)

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
        self._give_back(transfer)


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
