"""Counts of one segment store, shared by its threads."""

import threading
from enum import StrEnum


class BadReason(StrEnum):
    """Why a record is not served; what ReadJob.on_bad is told."""

    CRC = "crc"
    KEY = "key"
    LAYOUT = "layout"
    """Not a record of this version and layout; also a segment of another layout."""
    SHORT = "short"
    HOLE = "hole"
    """Bytes that were never written, or lost: zeros where data should be (kv.md 3.2)."""
    IO = "io"
    """The medium refused, or the segment is gone."""


_NAMES = (
    "opens",
    "bytes_read",
    "segments_gone",
    "bytes_written",
    "published",
    "publish_failed",
    "publish_full",
    "withdrawn",
    "kept_hot",
    "collected_bytes",
    "collect_errors",
    "stale_temps",
    "bad_toc",
    *(f"bad_{reason}" for reason in BadReason),
)


class SegmentCounters:
    """Monotonic counts under a lock.

    segments_gone: opens that met no file. publish_full: publications refused for want of room, included in publish_failed.
    withdrawn, kept_hot: segments. bad_toc: segments that a scan skipped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_NAMES, 0)

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
