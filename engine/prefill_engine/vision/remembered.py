"""Short memory: values that are known for some seconds and then forgotten. For rejected images and for cancelled attempts."""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Remembered(Generic[T]):
    """Owner of its entries. At most max_entries; the oldest goes first."""

    def __init__(self, *, seconds: float, max_entries: int) -> None:
        self._seconds = seconds
        self._max_entries = max_entries
        self._entries: OrderedDict[bytes, tuple[float, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: bytes, value: T, *, now: float) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (now + self._seconds, value)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def get(self, key: bytes, *, now: float) -> T | None:
        """None: never known, or forgotten."""
        found = self._entries.get(key)
        if found is None or found[0] > now:
            return None if found is None else found[1]
        del self._entries[key]
        return None
