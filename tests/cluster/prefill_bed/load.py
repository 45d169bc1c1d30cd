"""Load on a pool: calls kept in flight over its ready pods, as a router would spread them; and what became of each."""

import asyncio
import contextlib
import itertools
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from prefill_bed.api import ApiError
from prefill_bed.engine_pod import GRPC_PORT
from prefill_bed.pools import PoolView
from prefill_engine.client import PrefillClient, PrefillOptions
from prefill_engine.timeline import Accepted
from prefill_plan.errors import CallFailed

LOOK_SECONDS = 0.5
REQUEST_SECONDS = 600.0
_END_SECONDS = 300.0
# New KV is neither stored nor handed over: only the queue is of interest.
OPTIONS = PrefillOptions(handoff=False, store="skip")


class SentBackError(Exception):
    """The pod had not begun: another one may be asked."""


class Caller(Protocol):
    """What the calls are."""

    async def call(self, endpoint: str, number: int) -> None:
        """The call of this number, at this pod, until it is answered.

        Raises:
            SentBackError.
            CallFailed: any other failure; the call is lost.
        """

    async def close(self) -> None: ...


@dataclass(slots=True)
class Outcome:
    """Counts of a load so far. `moved`: sent back by a pod that had not begun them, and tried again elsewhere, as routers do."""

    completed: int = 0
    moved: int = 0
    lost: list[str] = field(default_factory=list)
    """Calls that failed in any other way, or got no answer."""


class Load:
    """Keeps a number of calls in flight, each at the ready pod that has the fewest; the thread's own state is `outcome`.

    What waits in the pool's queues then sums up to about the same, however many pods work on it.
    """

    def __init__(self, view: PoolView, caller: Caller) -> None:
        self._view, self._caller = view, caller
        self._wanted = 0
        self._stop = False
        self._numbers = itertools.count()
        self._endpoints: list[str] = []
        self._in_flight: Counter[str] = Counter()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")
        self.outcome = Outcome()

    def keep(self, in_flight: int) -> None:
        """So many calls at a time from now on; none that runs is cancelled."""
        self._wanted = in_flight

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join(_END_SECONDS + 60)

    async def _run(self) -> None:
        running: set[asyncio.Task[None]] = set()
        look = asyncio.create_task(self._look())
        while not self._stop:
            running = {task for task in running if not task.done()}
            while self._endpoints and len(running) < self._wanted:
                running.add(asyncio.create_task(self._send(next(self._numbers))))
                await asyncio.sleep(0)  # so that it has chosen its pod
            await asyncio.sleep(0.02)
        _, late = await asyncio.wait(running, timeout=_END_SECONDS) if running else (set(), set())
        self.outcome.lost += [f"not answered within {_END_SECONDS:.0f} s"] * len(late)
        for task in (look, *late):
            task.cancel()
        await asyncio.gather(look, *late, return_exceptions=True)
        await self._caller.close()

    async def _look(self) -> None:
        """Keeps the endpoints of the pods that are ready."""
        while True:
            # While the API server is away the known ones serve on.
            with contextlib.suppress(ApiError, OSError):
                ready = await asyncio.to_thread(self._view.ready)
                self._endpoints = [f"{pod['status']['podIP']}:{GRPC_PORT}" for pod in ready]
            await asyncio.sleep(LOOK_SECONDS)

    async def _send(self, number: int) -> None:
        while not await self._try(number):
            self.outcome.moved += 1
            await asyncio.sleep(LOOK_SECONDS)
            while not self._endpoints:
                await asyncio.sleep(LOOK_SECONDS)

    async def _try(self, number: int) -> bool:
        """One attempt; False if the pod sent it back."""
        endpoint = min(self._endpoints, key=lambda name: (self._in_flight[name], name))
        self._in_flight[endpoint] += 1
        try:
            await self._caller.call(endpoint, number)
        except SentBackError:
            return False
        except CallFailed as failure:
            self.outcome.lost.append(str(failure))
        else:
            self.outcome.completed += 1
        finally:
            self._in_flight[endpoint] -= 1
        return True


class Prompts:
    """Prompts of text, each another one, so that no prefix is found."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._clients: dict[str, PrefillClient] = {}

    def text(self, number: int) -> list[int]:
        return random.Random(number).choices(range(5, 400), k=self._num_tokens)

    def client(self, endpoint: str) -> PrefillClient:
        return self._clients.setdefault(endpoint, PrefillClient(endpoint))

    async def call(self, endpoint: str, number: int) -> None:
        client = self.client(endpoint)
        attempt = client.prefill(
            self.text(number), OPTIONS, request_id=f"load-{number}", timeout_seconds=REQUEST_SECONDS
        )
        try:
            await attempt.finish()
        except CallFailed as failure:
            is_accepted = any(isinstance(seen.body, Accepted) for seen in attempt.events)
            if failure.status == "UNAVAILABLE" and (not is_accepted or failure.phase == "QUEUE"):
                raise SentBackError from failure
            raise

    async def close(self) -> None:
        await asyncio.gather(*(client.__aexit__(None, None, None) for client in self._clients.values()))
