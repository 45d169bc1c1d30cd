"""What a nixl transport lets peers do to our memory: READ what they ask for, WRITE into what was granted. Used by nixl.py only.

The trap: nobody on this side can end a transfer of a peer. What a vanished peer may still touch is kept apart (stuck grants,
quarantined windows) until the agent that showed it has been destroyed.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec

from prefill_engine.kv.transport.contract import Source
from prefill_engine.kv.transport.frame import Frame, FrameError, Op, Refusal, encode
from prefill_engine.kv.transport.grants import Grant, Grants
from prefill_engine.kv.transport.link import Link, LinkLost
from prefill_engine.kv.transport.listener import read_question, refuse
from prefill_engine.kv.transport.nixl_agent import NixlAgent, NixlFailed
from prefill_engine.kv.transport.staging import Staging, Window

_NOTE_SECONDS = 5.0
# A reader that waits longer is quicker by another way.
_WINDOW_SECONDS = 1.0


class OwnerSide:
    """Owner of the grants, of writes that may still run, and of what the windows show.

    open_agent: the living agent. staging: what is asked for is copied there to be READ, and its owner's memory is never shown;
    None = it is shown where it stands. find: set when the transport listens. on_quarantine: called after each new one.
    """

    def __init__(
        self,
        open_agent: Callable[[], Awaitable[NixlAgent]],
        *,
        staging: Staging | None,
        counters: Counter[str],
        on_quarantine: Callable[[], None],
    ) -> None:
        self.grants = Grants()
        self.find: Callable[[bytes], Source | None] = lambda _key: None
        self._open_agent = open_agent
        self._staging = staging
        self._counters = counters
        self._on_quarantine = on_quarantine
        self._stuck_grants: dict[Grant, NixlAgent] = {}
        self._shown: dict[Window, NixlAgent] = {}

    @property
    def stuck_agents(self) -> set[NixlAgent]:
        """Peers vanished while they wrote; their grants can't be revoked before the agent is destroyed."""
        return set(self._stuck_grants.values())

    def agent_gone(self, agent: NixlAgent) -> None:
        """Nothing of this agent writes or is read any more."""
        for grant in [one for one, other in self._stuck_grants.items() if other is agent]:
            del self._stuck_grants[grant]
            self.grants.fail(grant)
        if self._staging is not None:
            for window in self._staging.quarantined():
                if self._shown.get(window) is agent:
                    del self._shown[window]
                    self._staging.give_back(window)

    async def answer(self, link: Link, question: Frame) -> bool:
        """One question of a peer; see Listener."""
        match question.op:
            case Op.LOCATE if self._staging is not None:
                return await self._offer_copy(link, question, self._staging)
            case Op.LOCATE:
                return await self._offer_source(link, question)
            case Op.OFFER:
                return await self._offer_target(link, question)
            case _:
                raise FrameError(f"{question.op.name} is no question of a nixl transport")

    async def _offer_copy(self, link: Link, question: Frame, staging: Staging) -> bool:
        """Shows a copy, so that the thing itself is released at once; the window is free when the peer's READ has ended."""
        source = self.find(question.key)  # who knows no key gets no window either
        if source is None:
            return await self._say_absent(link, question)
        length = len(source.view)
        source.release()
        if length != question.length:
            return await refuse(link, question, Refusal.SIZE)
        patience = min(_WINDOW_SECONDS, question.patience_ms / 2e3 or _WINDOW_SECONDS)
        window = await staging.take(question.length, seconds=patience)
        if window is None:
            self._counters["no_window"] += 1
            return await refuse(link, question, Refusal.NO_WINDOW)
        is_over = True  # nobody knows of the window yet
        try:
            source = self.find(question.key)
            if source is None:
                return await self._say_absent(link, question)
            try:
                if len(source.view) != question.length:
                    return await refuse(link, question, Refusal.SIZE)
                view = window.fill(source.view)
            finally:
                source.release()
            self._shown[window] = await self._agent()
            is_over = False
            await self._place(link, question, view, self._shown[window])
            await _read_settled(link, question)
            is_over = True
        finally:
            self._leave(window, staging, is_over=is_over)
        self._counters["served"] += 1
        return True

    def _leave(self, window: Window, staging: Staging, *, is_over: bool) -> None:
        if is_over or self._shown[window].gone.is_set():
            self._shown.pop(window, None)
            staging.give_back(window)
        else:
            self._counters["quarantined"] += 1
            staging.quarantine(window)
            self._on_quarantine()

    async def _offer_source(self, link: Link, question: Frame) -> bool:
        """Pins the thing until the peer says that its READ has ended, or is gone."""
        source = self.find(question.key)
        if source is None:
            return await self._say_absent(link, question)
        try:
            if len(source.view) != question.length:
                return await refuse(link, question, Refusal.SIZE)
            agent = await self._agent()
            held = await self._place(link, question, source.view, agent)
            try:
                await _read_settled(link, question)
            finally:
                await _drop(agent, held)
        finally:
            source.release()
        self._counters["served"] += 1
        return True

    async def _offer_target(self, link: Link, question: Frame) -> bool:
        """Lets the peer WRITE; a peer that is gone before it said SETTLED may still be writing."""
        is_writing = False

        def stop() -> bool:
            return not is_writing

        grant = self.grants.begin(question.key, stop)
        if grant is None:
            return await refuse(link, question, Refusal.NO_GRANT)
        try:
            if len(grant.target) != question.length:
                self.grants.fail(grant)
                return await refuse(link, question, Refusal.SIZE)
            agent = await self._agent()
            is_writing = len(grant.target) > 0
            held = await self._place(link, question, grant.target, agent)
            await _read_settled(link, question)
            if is_writing:
                await _await_note(agent, note_of(question))
        except BaseException:
            if is_writing and not agent.gone.is_set():
                self._stuck_grants[grant] = agent
            else:
                self.grants.fail(grant)
            raise
        self.grants.finish(grant)
        await _drop(agent, held)
        await link.send(encode(replace(question, op=Op.STORED)))
        return True

    async def _say_absent(self, link: Link, question: Frame) -> bool:
        self._counters["served_absent"] += 1
        await link.send(encode(Frame(op=Op.ABSENT, exchange=question.exchange, key=question.key)))
        return True

    async def _agent(self) -> NixlAgent:
        """Raises LinkLost."""
        try:
            return await self._open_agent()
        except NixlFailed as error:
            raise LinkLost(f"our agent: {error}") from error

    async def _place(self, link: Link, question: Frame, view: memoryview, agent: NixlAgent) -> Any:
        """Tells the peer where the view stands; its registration, None where a region covers it. Raises LinkLost."""
        try:
            held = await agent.call(agent.hold_in_thread, view) if len(view) else None
            place = await agent.call(agent.place_in_thread, view, held)
        except NixlFailed as error:
            raise LinkLost(f"our agent: {error}") from error
        payload = msgspec.msgpack.encode(place)
        await link.send(encode(replace(question, op=Op.PLACE, length=len(payload))), more=True)
        await link.send(payload)
        return held


def note_of(frame: Frame) -> bytes:
    """Names one WRITE to the side that is written to."""
    return frame.key + frame.exchange.to_bytes(4, "little")


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
