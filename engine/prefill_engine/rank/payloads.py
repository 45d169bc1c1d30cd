"""Payload bytes of cache slots, for threads of the host: hand-over reads, pushes, and a store in this process.

Used by exports.py, push_sender.py and store_worker.py. The trap: a part is read when it is sliced, not when it is made, so its
slot must not change before.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, overload

from prefill_engine.kv_cache import KvCache

T = TypeVar("T")


class Part(Protocol):
    """Bytes that are there once they are asked for; bytes and memoryview are."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice, /) -> bytes | memoryview: ...


class Payloads(Protocol):
    """The cache's payloads, wherever it is. Any thread; what a step has written is complete when the step has ended."""

    num_bytes: int
    """Of one payload."""

    def parts(self, slots: Sequence[int]) -> Sequence[Part]:
        """The payloads of `slots`, num_bytes each."""
        ...

    def fill(self, slot: int, read: Callable[[memoryview], T | None]) -> T | None:
        """Has `read` write the payload of a slot; the slot holds garbage when that returns None or raises."""
        ...


class PartsOfSlots(Sequence[Part]):
    """Parts that are made when they are asked for: a hand-over has hundreds, and the step thread opens it."""

    def __init__(self, slots: Sequence[int], part_of: Callable[[int], Part]) -> None:
        self._slots = tuple(slots)
        self._part_of = part_of

    def __len__(self) -> int:
        return len(self._slots)

    @overload
    def __getitem__(self, index: int) -> Part: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Part]: ...
    def __getitem__(self, index: int | slice) -> Part | Sequence[Part]:
        if isinstance(index, slice):
            return PartsOfSlots(self._slots[index], self._part_of)
        return self._part_of(self._slots[index])


class HostPayloads:
    """Payloads of a cache in host memory: nothing is copied."""

    def __init__(self, cache: KvCache) -> None:
        self.num_bytes = cache.layout.payload_bytes
        self._cache = cache

    def parts(self, slots: Sequence[int]) -> Sequence[Part]:
        """As Payloads."""
        return PartsOfSlots(slots, self._cache.block_view)

    def fill(self, slot: int, read: Callable[[memoryview], T | None]) -> T | None:
        """As Payloads."""
        return read(self._cache.block_view(slot))


def read_parts(parts: Sequence[Part], start: int, end: int) -> bytes:
    """Copy of bytes [start, end) of consecutive parts, all but the last equally long; clipped to them."""
    size = len(parts[0]) if parts else 0
    last = min(end, size * len(parts)) - 1
    if size == 0 or start > last:
        return b""
    pieces = []
    for index in range(start // size, last // size + 1):
        base = index * size
        pieces.append(parts[index][max(0, start - base) : end - base])
    return b"".join(pieces)
