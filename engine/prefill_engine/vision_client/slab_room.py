"""Room for rows on their way to the model: a slab handed out in the order in which it was asked for (serving.md 4.5).

Owner of the slab; one event loop's. Room is reserved before an image is sent anywhere. The trap: attempts that hold rows may
wait for memory of attempts that wait for rows, so a wait in which nothing moves ends in an error instead of lasting for ever.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from prefill_engine.vision.slab import Region, Slab


@dataclass(slots=True, eq=False)
class _Waiter:
    num_bytes: int
    granted: "asyncio.Future[Region]"


class SlabRoom:
    """patience_seconds: longest wait without any region coming back. clock: monotonic seconds."""

    def __init__(self, slab: Slab, *, patience_seconds: float, clock: Callable[[], float]) -> None:
        self.slab = slab
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._waiters: deque[_Waiter] = deque()
        self._moved_at = clock()

    async def reserve(self, num_bytes: int) -> Region:
        """A region of its own; give it back with `free`.

        Raises:
            TimeoutError: nothing came back for patience_seconds. ValueError: more than the whole slab.
        """
        if num_bytes > self.slab.num_bytes:
            raise ValueError(f"rows of {num_bytes} bytes, the slab (vision.rows_bytes) has {self.slab.num_bytes}")
        waiter = _Waiter(num_bytes, asyncio.get_running_loop().create_future())
        asked_at = self._clock()
        self._waiters.append(waiter)
        self._grant()
        try:
            while not waiter.granted.done():
                await asyncio.wait([waiter.granted], timeout=self._patience_seconds)
                stood = self._clock() - max(asked_at, self._moved_at)
                if not waiter.granted.done() and stood >= self._patience_seconds:
                    raise TimeoutError(f"no room for {num_bytes} bytes of rows came free in {stood:.1f} s")
            return waiter.granted.result()
        except BaseException:
            if waiter.granted.done():
                self.free(waiter.granted.result())
            else:
                self._waiters.remove(waiter)
                self._grant()
            raise

    def free(self, region: Region) -> None:
        """Nobody looks at the region any more."""
        self.slab.free(region)
        self._moved_at = self._clock()
        self._grant()

    def _grant(self) -> None:
        while self._waiters:
            region = self.slab.allocate(self._waiters[0].num_bytes)
            if region is None:
                return
            self._waiters.popleft().granted.set_result(region)
