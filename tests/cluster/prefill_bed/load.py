"""Load on a pool: prompts kept in flight over its ready engines, as a router would spread them; and what became of each."""

import asyncio
import contextlib
import itertools
import random
import threading
from collections import Counter
from dataclasses import dataclass, field

from prefill_bed.api import ApiError
from prefill_bed.engine_pod import GRPC_PORT
from prefill_bed.pools import PoolView
from prefill_engine.client import PrefillClient, PrefillOptions
from prefill_engine.timeline import Accepted
from prefill_plan.errors import CallFailed

_LOOK_SECONDS = 0.5
_REQUEST_SECONDS = 600.0
_END_SECONDS = 300.0
# New KV is neither stored nor handed over: only the queue is of interest.
_OPTIONS = PrefillOptions(handoff=False, store="skip")


@dataclass(slots=True)
class Outcome:
    """Counts of a load so far. `moved`: sent back by an engine that had not started them, and tried again elsewhere, as
    routers do."""

    completed: int = 0
    moved: int = 0
    lost: list[str] = field(default_factory=list)
    """Prompts that failed in any other way, or got no answer."""


class PrefillLoad:
    """Keeps a number of prompts in flight, each at the ready engine that has the fewest; the thread's own state is `outcome`.

    The uncomputed rows of the pool's queues then sum up to about the same, however many engines work on them.
    """

    def __init__(self, view: PoolView, *, prompt_tokens: int) -> None:
        self._view, self._prompt_tokens = view, prompt_tokens
        self._wanted = 0
        self._stop = False
        self._numbers = itertools.count()
        self._endpoints: list[str] = []
        self._in_flight: Counter[str] = Counter()
        self._clients: dict[str, PrefillClient] = {}
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")
        self.outcome = Outcome()

    def keep(self, in_flight: int) -> None:
        """So many prompts at a time from now on; none that runs is cancelled."""
        self._wanted = in_flight

    def __enter__(self) -> "PrefillLoad":
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
                await asyncio.sleep(0)  # so that it has chosen its engine
            await asyncio.sleep(0.02)
        _, late = await asyncio.wait(running, timeout=_END_SECONDS) if running else (set(), set())
        self.outcome.lost += [f"not answered within {_END_SECONDS:.0f} s"] * len(late)
        for task in (look, *late):
            task.cancel()
        await asyncio.gather(look, *late, return_exceptions=True)
        await asyncio.gather(*(client.__aexit__(None, None, None) for client in self._clients.values()))

    async def _look(self) -> None:
        """Keeps the endpoints of the engines that are ready."""
        while True:
            # While the API server is away the known ones serve on.
            with contextlib.suppress(ApiError, OSError):
                ready = await asyncio.to_thread(self._view.ready)
                self._endpoints = [f"{pod['status']['podIP']}:{GRPC_PORT}" for pod in ready]
            await asyncio.sleep(_LOOK_SECONDS)

    async def _send(self, number: int) -> None:
        # Another prompt each time, so that no prefix is found.
        prompt = random.Random(number).choices(range(5, 400), k=self._prompt_tokens)
        while not await self._try(number, prompt):
            self.outcome.moved += 1
            await asyncio.sleep(_LOOK_SECONDS)
            while not self._endpoints:
                await asyncio.sleep(_LOOK_SECONDS)

    async def _try(self, number: int, prompt: list[int]) -> bool:
        """One attempt; False if the engine sent it back."""
        endpoint = min(self._endpoints, key=lambda name: (self._in_flight[name], name))
        client = self._clients.setdefault(endpoint, PrefillClient(endpoint))
        attempt = client.prefill(prompt, _OPTIONS, request_id=f"load-{number}", timeout_seconds=_REQUEST_SECONDS)
        self._in_flight[endpoint] += 1
        try:
            await attempt.finish()
        except CallFailed as failure:
            is_accepted = any(isinstance(seen.body, Accepted) for seen in attempt.events)
            if failure.status == "UNAVAILABLE" and (not is_accepted or failure.phase == "QUEUE"):
                return False
            self.outcome.lost.append(str(failure))
        else:
            self.outcome.completed += 1
        finally:
            self._in_flight[endpoint] -= 1
        return True
