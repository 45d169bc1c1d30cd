"""Segments of every store by name, and their blocks by key. Pure; part of DirectoryState.

The trap: equal keys may stand in several segments. When one of those is withdrawn, the others must still be found.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from prefill_engine.kv.segments import BlockLocation, SegmentInfo
from prefill_plan.block_keys import BlockKey


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    store_id: str
    info: SegmentInfo


class SegmentTable:
    """Owner of both indexes; least recently published or read segments go when max_blocks is passed."""

    def __init__(self, *, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._segments: OrderedDict[tuple[str, str], _Segment] = OrderedDict()
        # (store, layout) -> key -> segments that hold it, newest last, with the record's index.
        self._blocks: dict[tuple[str, bytes], dict[bytes, tuple[tuple[_Segment, int], ...]]] = {}
        self.num_blocks = 0
        self.num_dropped = 0

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def publish(self, store_id: str, segments: Sequence[SegmentInfo]) -> None:
        """A name that is known with the same keys is only marked as used; with others it is replaced."""
        for info in segments:
            name = (store_id, info.name)
            known = self._segments.get(name)
            if known is not None and (known.info.keys, known.info.layout_id) == (info.keys, info.layout_id):
                self._segments.move_to_end(name)
                continue
            if known is not None:
                self._remove(known)
            self._add(_Segment(store_id, info))
        while self.num_blocks > self._max_blocks:
            self._remove(next(iter(self._segments.values())))
            self.num_dropped += 1

    def withdraw(self, store_id: str, names: Sequence[str]) -> None:
        for name in names:
            known = self._segments.get((store_id, name))
            if known is not None:
                self._remove(known)

    def lookup(self, store_id: str, layout_id: bytes, keys: Sequence[BlockKey]) -> tuple[BlockLocation, ...]:
        """Locations of the leading keys that are known; a run stays in one segment where it can."""
        blocks = self._blocks.get((store_id, layout_id), {})
        found: list[BlockLocation] = []
        current: _Segment | None = None
        for key in keys:
            places = blocks.get(key)
            if places is None:
                break
            segment, record = next((place for place in places if place[0] is current), places[-1])
            if segment is not current:
                self._segments.move_to_end((store_id, segment.info.name))
                current = segment
            found.append(BlockLocation(segment=segment.info.name, record=record))
        return tuple(found)

    def _add(self, segment: _Segment) -> None:
        self._segments[segment.store_id, segment.info.name] = segment
        blocks = self._blocks.setdefault((segment.store_id, segment.info.layout_id), {})
        for record, key in enumerate(segment.info.keys):
            blocks[key] = (*blocks.get(key, ()), (segment, record))
        self.num_blocks += len(segment.info.keys)

    def _remove(self, segment: _Segment) -> None:
        table = (segment.store_id, segment.info.layout_id)
        del self._segments[segment.store_id, segment.info.name]
        blocks = self._blocks.get(table, {})  # gone already when the last segment left has no keys
        for key in segment.info.keys:
            places = tuple(place for place in blocks.get(key, ()) if place[0] is not segment)
            if places:
                blocks[key] = places
            else:
                blocks.pop(key, None)
        if not blocks:
            self._blocks.pop(table, None)
        self.num_blocks -= len(segment.info.keys)
