"""Windows of host memory that is registered once: all of a hand-over that peers can touch by one-sided access (kv.md 7.6).

Owned by NixlTransport, used on its loop. A piece is copied in, its READ or WRITE runs, and the window is free again when its end
is known. The trap: nobody can stop a READ whose reader vanished, so its window is quarantined until the agent that showed it has
been destroyed. And the memory stays mapped until the process ends: UCX over tcp serves a READ by address, whatever is there.
"""

import asyncio
import contextlib
import mmap
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

IDLE_QUARANTINE_SECONDS = 5.0
"""After that an agent with quarantined windows is destroyed as soon as nothing else uses it."""
_QUARANTINE_SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingState:
    """Of a moment. held: windows whose transfer is under way. oldest_seconds: of the oldest quarantine."""

    num_windows: int
    held: int
    quarantined: int
    oldest_seconds: float = 0.0


def is_full_of_quarantine(state: StagingState) -> bool:
    """A quarter of the windows is lost: no more are given out, so that the rest comes back and the agent can be destroyed."""
    return state.quarantined >= max(1, state.num_windows // _QUARANTINE_SHARE)


def may_recycle(state: StagingState) -> bool:
    """Destroying the agent would free windows, is due, and fails nobody's transfer."""
    if state.held or not state.quarantined:
        return False
    return is_full_of_quarantine(state) or state.oldest_seconds >= IDLE_QUARANTINE_SECONDS


@dataclass(slots=True, eq=False)
class Window:
    """view: its whole memory."""

    view: memoryview

    def fill(self, data: memoryview) -> memoryview:
        """Copies data in; the part of the window that holds it."""
        self.view[: len(data)] = data
        return self.view[: len(data)]


@dataclass(slots=True, eq=False)
class Staging:
    """Owner of the memory and of the windows' states. Raises ValueError without room for one window."""

    num_bytes: int
    window_bytes: int
    clock: Callable[[], float] = time.monotonic
    memory: memoryview = field(init=False)
    _num_windows: int = field(init=False)
    _free: list[Window] = field(init=False)
    _held: set[Window] = field(default_factory=set)
    _quarantined: dict[Window, float] = field(default_factory=dict)
    _waiting: "deque[asyncio.Future[Window]]" = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._num_windows = self.num_bytes // self.window_bytes
        if self._num_windows < 1:
            raise ValueError(f"staging of {self.num_bytes} bytes, expected at least one window of {self.window_bytes}")
        size = self.window_bytes
        self.memory = memoryview(mmap.mmap(-1, self._num_windows * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._free = [Window(self.memory[one * size : (one + 1) * size]) for one in reversed(range(self._num_windows))]

    @property
    def state(self) -> StagingState:
        oldest = min(self._quarantined.values(), default=0.0)
        return StagingState(
            num_windows=self._num_windows,
            held=len(self._held),
            quarantined=len(self._quarantined),
            oldest_seconds=self.clock() - oldest if self._quarantined else 0.0,
        )

    def take_now(self, num_bytes: int) -> Window | None:
        """A window for num_bytes; None: too many bytes, none is free, or others wait."""
        if num_bytes > self.window_bytes or self._waiting or is_full_of_quarantine(self.state) or not self._free:
            return None
        window = self._free.pop()
        self._held.add(window)
        return window

    async def take(self, num_bytes: int, *, seconds: float) -> Window | None:
        """As take_now, but waits for its turn."""
        window = self.take_now(num_bytes)
        if window is not None or num_bytes > self.window_bytes or is_full_of_quarantine(self.state):
            return window
        turn: asyncio.Future[Window] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(seconds):
                return await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.give_back(turn.result())
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                return None
            raise

    def give_back(self, window: Window) -> None:
        """Its transfer has ended. A quarantined window is free then, too."""
        self._held.discard(window)
        self._quarantined.pop(window, None)
        self._free.append(window)
        self._serve()

    def quarantine(self, window: Window) -> None:
        """Its transfer may still run, and nobody will tell when it ends."""
        self._held.discard(window)
        self._quarantined[window] = self.clock()

    def quarantined(self) -> list[Window]:
        return list(self._quarantined)

    def _serve(self) -> None:
        while self._waiting and self._free and not is_full_of_quarantine(self.state):
            turn = self._waiting.popleft()
            if not turn.done():
                window = self._free.pop()
                self._held.add(window)
                turn.set_result(window)
