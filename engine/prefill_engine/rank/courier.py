"""Moves hand-overs over the data transport, on a thread and an event loop of its own: serves pulls, pushes to decode peers (C42).

The step thread tells it what is complete and is never waited for; the front hears from it directly (PushReport). The trap: it
works on views of pool slots, so an attempt with a push is not idle until `collect` has named it: only then is nothing in
flight any more (serving.md 0, fact 5), and a push that was cancelled or failed is not over before that either. A fault of ours
can't promise that, so it ends the rank: `collect` raises it.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from prefill_engine.handoff_pieces import PushRegion
from prefill_engine.kv.transport.contract import Source, Transport
from prefill_engine.messages import PushReport
from prefill_engine.rank.payloads import Part
from prefill_engine.rank.push import Push
from prefill_plan.errors import ConfigError

logger = logging.getLogger(__name__)

_START_SECONDS = 30.0
_STOP_SECONDS = 5.0


class Courier:
    """Owner of the rank's transport, its thread and its pushes.

    open_transport: called on the new loop. report: gets PushReports on the courier's thread. wake: ends the step thread's wait.
    """

    def __init__(
        self,
        open_transport: Callable[[], Transport],
        *,
        piece_seconds: float,
        report: Callable[[PushReport], None],
        wake: Callable[[], None],
    ) -> None:
        self.kind = ""
        self.port = -1
        self._open_transport = open_transport
        self._piece_seconds = piece_seconds
        self._report = report
        self._wake = wake
        self._drained: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._fault: BaseException | None = None
        self._pushes: dict[bytes, Push] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self._transport: Transport | None = None

    # --- any thread
    def start(self, find: Callable[[bytes], Source | None]) -> None:
        """Listens for peers; sets kind and port.

        Raises:
            ConfigError: the port cannot be bound, or the transport not be had in time.
        """
        self._thread.start()
        try:
            endpoint = self._ask(self._listen(find)).result(_START_SECONDS)
        except TimeoutError:
            raise ConfigError(f"the data port's transport is not up after {_START_SECONDS:g} s") from None
        self.port = int(endpoint.rpartition(":")[2])

    def stop(self) -> None:
        """Ends what is in flight, closes the transport and joins the thread."""
        with contextlib.suppress(TimeoutError):
            self._ask(self._close()).result(_STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_SECONDS)

    def counters(self) -> dict[str, int]:
        """What the transport has counted, by name."""
        return dict(self._transport.counters) if self._transport is not None else {}

    # --- step thread
    def begin(self, attempt_id: bytes, regions: Sequence[PushRegion]) -> None:
        """An attempt whose hand-over is pushed. `collect` names it when nothing of it is in flight any more."""
        self._call(self._begin, attempt_id, tuple(regions))

    def add(self, attempt_id: bytes, kind: int, parts: Sequence[Part]) -> None:
        """Further consecutive bytes of a component, complete and unchanged until the push has drained."""
        self._call(self._add, attempt_id, kind, tuple(parts))

    def finish(self, attempt_id: bytes) -> None:
        """Everything has been added: the push has landed when all of it is there."""
        self._call(self._finish, attempt_id)

    def cancel(self, attempt_id: bytes) -> None:
        """Starts nothing more; what is in flight ends by itself. Again, and for an ended push, is fine."""
        self._call(self._cancel, attempt_id)

    def collect(self) -> Iterator[bytes]:
        """Attempts whose push has drained since the last call. Raises what a push ended with unexpectedly."""
        if self._fault is not None:
            raise self._fault
        while True:
            try:
                yield self._drained.get_nowait()
            except queue.Empty:
                return

    # --- courier's thread
    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._note_failure)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _ask(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the rank ends
            self._loop.call_soon_threadsafe(function, *arguments)

    async def _listen(self, find: Callable[[bytes], Source | None]) -> str:
        self._transport = self._open_transport()
        self.kind = self._transport.kind
        return await self._transport.listen(find)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._transport is not None:
            await self._transport.close()

    def _begin(self, attempt_id: bytes, regions: tuple[PushRegion, ...]) -> None:
        assert self._transport is not None, "start() comes first"
        push = Push(attempt_id, regions, transport=self._transport, piece_seconds=self._piece_seconds)
        self._pushes[attempt_id] = push
        task = self._loop.create_task(self._carry(push))
        self._tasks.add(task)
        task.add_done_callback(self._carried)

    def _carried(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A call of the step thread failed here; what else the loop tells is logged as usual."""
        error = context.get("exception")
        if error is not None and "handle" in context:
            self._fail(error)
        loop.default_exception_handler(context)

    def _fail(self, error: BaseException) -> None:
        self._fault = self._fault or error
        self._wake()

    def _add(self, attempt_id: bytes, kind: int, parts: tuple[Part, ...]) -> None:
        push = self._pushes.get(attempt_id)
        if push is not None:
            push.add(kind, parts)

    def _finish(self, attempt_id: bytes) -> None:
        push = self._pushes.get(attempt_id)
        if push is not None:
            push.finish()

    def _cancel(self, attempt_id: bytes) -> None:
        push = self._pushes.get(attempt_id)
        if push is not None:
            push.cancel()

    async def _carry(self, push: Push) -> None:
        """One push from its first piece until nothing of it is in flight; always ends in `collect`."""
        started = time.monotonic()
        landed = await push.send_all()
        if landed:
            self._tell(push, "landed")
        elif push.reason:
            logger.warning(
                "push failed",
                extra={"attempt_id": push.attempt_id.hex(), "reason": push.reason, "detail": push.detail},
            )
            self._tell(push, "failed")
        await push.drain()
        if not landed:
            self._tell(push, "drained")
        seconds = time.monotonic() - started
        logger.info("push ended", extra={"landed": landed, "bytes": push.num_bytes, "seconds": round(seconds, 6)})
        del self._pushes[push.attempt_id]
        self._drained.put(push.attempt_id)
        self._wake()

    def _tell(self, push: Push, state: str) -> None:
        self._report(
            PushReport(
                attempt_id=push.attempt_id,
                state=state,
                num_bytes=push.num_bytes,
                reason=push.reason if state == "failed" else "",
                detail=push.detail if state == "failed" else "",
                checks=push.checks() if state == "landed" else (),
                at_ns=time.monotonic_ns(),
            )
        )
