"""TcpTransport: pulls and pushes over plain TCP or mutual TLS; always there, and what CI tests (decision 14).

A pull that is given up closes its connection, and all receiving is done by callbacks of the one loop: so nothing lands later,
every outcome is settled at once. The trap is on the other side: sendfile sends pages, not a copy. Bytes that the owner rewrites
after `release` may still leave this machine, so a reader must verify (generation and checksum of the record).
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from prefill_engine.kv.transport.contract import PullOutcome, PullState, Source
from prefill_engine.kv.transport.frame import Frame, FrameError, Op, Refusal, encode
from prefill_engine.kv.transport.grants import Grants
from prefill_engine.kv.transport.link import Link, LinkLost
from prefill_engine.kv.transport.listener import Listener, refuse
from prefill_engine.kv.transport.outcome import check_arguments, ended, is_in_order, judge_answer
from prefill_engine.kv.transport.peer import read_answer
from prefill_engine.kv.transport.peers import MAX_LINKS_TO_PEER, Exchange, Peers
from prefill_engine.kv.transport.tls import load_contexts
from prefill_plan.kvd_config import TransportConfig

MAX_LINKS = 1024
MAX_LINKS_PER_PEER = 32

GoOn = Callable[[Exchange], Awaitable[tuple[PullState, str] | None]]
"""What follows the expected answer; None = done, else how it ended."""


class TcpTransport:
    """Owner of its listener, its connections and its grants. pod_ip: what peers are told when config.advertise is empty.

    counters: monotonic; pull_<state>, push_<state>, served, served_absent, reconnects, and those of the listener.
    """

    def __init__(
        self,
        config: TransportConfig,
        *,
        pod_ip: str = "",
        max_links_per_peer: int = MAX_LINKS_PER_PEER,
        max_links_to_peer: int = MAX_LINKS_TO_PEER,
    ) -> None:
        """Raises ConfigError for unusable TLS files."""
        self._config = config
        self._pod_ip = pod_ip
        self._tls = load_contexts(config.tls)
        self._peers = Peers(context=self._tls.client if self._tls else None, max_links=max_links_to_peer)
        self._grants = Grants()
        self._find: Callable[[bytes], Source | None] = lambda _key: None
        self._listener = Listener(self._answer, max_links=MAX_LINKS, max_links_per_peer=max_links_per_peer)
        self._own: Counter[str] = Counter()

    @property
    def kind(self) -> str:
        return "tcp" if self._tls is None else "tcp+tls"

    @property
    def counters(self) -> dict[str, int]:
        return {**self._own, "reconnects": self._peers.num_reconnects, **self._listener.counters}

    async def listen(self, find: Callable[[bytes], Source | None]) -> str:
        """See Transport.listen. Raises ConfigError if the port cannot be bound."""
        self._find = find
        context = self._tls.server if self._tls else None
        port = self._listener.start(self._config.host, self._config.port, context=context)
        return endpoint_of(self._config, pod_ip=self._pod_ip, port=port)

    async def use_region(self, region: memoryview) -> None:
        """Nothing is registered."""

    async def pull(self, endpoint: str, key: bytes, target: memoryview, *, deadline_seconds: float) -> PullOutcome:
        """See Transport.pull."""

        async def take(exchange: Exchange) -> None:
            await exchange.link.receive(target)
            exchange.in_order = True

        question = Frame(op=Op.GET, exchange=0, key=key, length=len(target))
        return await self._run("pull", endpoint, question, Op.DATA, take, deadline_seconds)

    async def push(self, endpoint: str, key: bytes, source: memoryview, *, deadline_seconds: float) -> PullOutcome:
        """See Transport.push."""

        async def give(exchange: Exchange) -> tuple[PullState, str] | None:
            await exchange.link.send(source)
            stored = await read_answer(exchange.link, exchange.question)
            bad = judge_answer(stored, expected=Op.STORED, length=len(source))
            exchange.in_order = bad is None
            return bad

        question = Frame(op=Op.PUT, exchange=0, key=key, length=len(source))
        return await self._run("push", endpoint, question, Op.GRANTED, give, deadline_seconds)

    def accept(self, key: bytes, target: memoryview, done: Callable[[], None]) -> Callable[[], bool]:
        """See Transport.accept. Revoking closes the connection of a write in flight, so it always answers True."""
        return self._grants.accept(key, target, done)

    async def close_peer(self, endpoint: str) -> None:
        self._peers.close(endpoint)

    async def close(self) -> None:
        for endpoint in self._peers.endpoints():
            await self.close_peer(endpoint)
        await self._listener.close()

    async def _run(
        self, verb: str, endpoint: str, question: Frame, expected: Op, go_on: GoOn, deadline_seconds: float
    ) -> PullOutcome:
        check_arguments(question.key, deadline_seconds)
        started = time.monotonic()
        try:
            async with (
                asyncio.timeout(deadline_seconds),
                self._peers.exchange(endpoint, question, deadline_seconds=deadline_seconds) as exchange,
            ):
                bad = judge_answer(exchange.answer, expected=expected, length=question.length)
                if bad is not None:
                    exchange.in_order = is_in_order(exchange.answer)
                state, reason = bad or await go_on(exchange) or (PullState.DONE, "")
        except TimeoutError:
            state, reason = PullState.LATE, f"not done within {deadline_seconds:g} s"
        except (LinkLost, FrameError) as error:
            state, reason = PullState.FAILED, str(error)
        self._own[f"{verb}_{state}"] += 1
        return ended(state, reason, started=started)

    async def _answer(self, link: Link, question: Frame) -> bool:
        match question.op:
            case Op.GET:
                return await self._serve(link, question)
            case Op.PUT:
                return await self._store(link, question)
            case _:
                raise FrameError(f"{question.op.name} is no question of a tcp transport")

    async def _serve(self, link: Link, question: Frame) -> bool:
        source = self._find(question.key)
        if source is None:
            self._own["served_absent"] += 1
            await link.send(encode(Frame(op=Op.ABSENT, exchange=question.exchange, key=question.key)))
            return True
        try:
            if len(source.view) != question.length:
                return await refuse(link, question, Refusal.SIZE)
            answer = Frame(op=Op.DATA, exchange=question.exchange, key=question.key, length=question.length)
            await link.send(encode(answer), more=question.length > 0)
            await link.send_file(source.fd, source.offset, source.view)
        finally:
            source.release()
        self._own["served"] += 1
        return True

    async def _store(self, link: Link, question: Frame) -> bool:
        def stop() -> bool:
            link.abort()
            return True

        grant = self._grants.begin(question.key, stop)
        if grant is None:
            return await refuse(link, question, Refusal.NO_GRANT)
        if len(grant.target) != question.length:
            self._grants.fail(grant)
            return await refuse(link, question, Refusal.SIZE)
        try:
            granted = Frame(op=Op.GRANTED, exchange=question.exchange, key=question.key, length=question.length)
            await link.send(encode(granted))
            await link.receive(grant.target)
        except BaseException:
            self._grants.fail(grant)
            raise
        self._grants.finish(grant)
        stored = Frame(op=Op.STORED, exchange=question.exchange, key=question.key, length=question.length)
        await link.send(encode(stored))
        return True


def endpoint_of(config: TransportConfig, *, pod_ip: str, port: int) -> str:
    """host:port that peers are told: advertise, else the pod's address, else the host (loopback when that is a wildcard)."""
    host = config.advertise or pod_ip or config.host
    if host in ("", "0.0.0.0"):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
