"""Stand-ins for a CUDA driver: one that remembers calls, and one whose streams run on host memory, as late as they may."""

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from prefill_engine.kv_cache import KvCache
from prefill_engine.rank.cuda_payloads import DevicePayloads

READ_STREAM = 9


class StubDriver:
    """Remembers calls; a stream is done when the test says so."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.waits: list[tuple[int, int, int]] = []
        self.copies: list[tuple[int, int, int]] = []
        self.saves: list[tuple[int, int, int]] = []
        self.events: list[tuple[str, int, int]] = []
        self.synchronized: list[int] = []
        self.is_standing_still = False
        """No event is reached."""
        self.num_queries = 0
        self._numbers = itertools.count(100)
        self._buffers: list[ctypes.Array[ctypes.c_uint32]] = []

    def register_host(self, address: int, num_bytes: int) -> None:
        self.registered[address] = num_bytes

    def unregister_host(self, address: int) -> None:
        del self.registered[address]

    def device_address(self, address: int) -> int:
        return address

    def allocate_words(self, num_words: int) -> int:
        self._buffers.append((ctypes.c_uint32 * num_words)())
        return ctypes.addressof(self._buffers[-1])

    def wait_word(self, stream: int, device_address: int, value: int) -> None:
        self.waits.append((stream, device_address, value))

    def copy_to_device(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        self.copies.append((target, source, num_bytes))

    def copy_from_device(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        self.saves.append((target, source, num_bytes))

    def create_event(self) -> int:
        return next(self._numbers)

    def record_event(self, event: int, stream: int) -> None:
        self.events.append(("record", event, stream))

    def wait_event(self, stream: int, event: int) -> None:
        self.events.append(("wait", event, stream))

    def is_reached(self, event: int) -> bool:
        self.num_queries += 1
        return not self.is_standing_still

    def synchronize(self, stream: int) -> None:
        self.synchronized.append(stream)


@dataclass
class _Stream:
    queued: deque[Callable[[], None]] = field(default_factory=deque)
    num_done: int = 0

    def run(self, upto: int) -> None:
        while self.num_done < upto:
            self.num_done += 1
            self.queued.popleft()()

    @property
    def end(self) -> int:
        return self.num_done + len(self.queued)


class LateDriver(StubDriver):
    """Device memory is host memory. Nothing that was queued happens before something that waits for it: whoever forgets to wait
    reads what stood there before. Several threads may use it."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._streams: dict[int, _Stream] = {}
        self._recorded: dict[int, tuple[_Stream, int]] = {}

    def queue(self, stream: int, work: Callable[[], None]) -> None:
        """A kernel."""
        with self._lock:
            self._of(stream).queued.append(work)

    def reach(self, stream: int) -> None:
        """What is queued now has happened, as before a later kernel of that stream."""
        with self._lock:
            self._of(stream).run(self._of(stream).end)

    def copy_from_device(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        super().copy_from_device(stream, target, source, num_bytes)
        self.queue(stream, lambda: ctypes.memmove(target, source, num_bytes) and None)

    def copy_to_device(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        super().copy_to_device(stream, target, source, num_bytes)
        self.queue(stream, lambda: ctypes.memmove(target, source, num_bytes) and None)

    def record_event(self, event: int, stream: int) -> None:
        super().record_event(event, stream)
        with self._lock:
            self._recorded[event] = (self._of(stream), self._of(stream).end)

    def wait_event(self, stream: int, event: int) -> None:
        super().wait_event(stream, event)
        with self._lock:
            other, upto = self._recorded[event]
        self.queue(stream, lambda: other.run(upto))

    def synchronize(self, stream: int) -> None:
        super().synchronize(stream)
        self.reach(stream)

    def _of(self, stream: int) -> _Stream:
        return self._streams.setdefault(stream, _Stream())


@contextmanager
def caches_on_device(driver: StubDriver) -> Iterator[None]:
    """Ranks that are built meanwhile reach payloads through the driver, as those of a cache in device memory."""

    def make(cache: KvCache) -> DevicePayloads:
        payloads = DevicePayloads(
            driver, layout=cache.layout, cache_address=cache.blocks.data_ptr(), stream=READ_STREAM
        )
        cache.block_view = _no_address  # type: ignore[method-assign]
        return payloads

    with patch("prefill_engine.rank.build.HostPayloads", make):
        yield


def _no_address(slot: int) -> memoryview:
    raise ValueError(f"block slot {slot} has no host address")
