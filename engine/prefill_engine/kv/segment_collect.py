"""Garbage collection of a segment store: whole old generations, withdrawn first, deleted a grace period later (kv.md 3.4).

Owner of what is withdrawn and of when segments were last read here. Called by one maintenance thread. Several kvds may collect
the same store: each sees the marker of a withdrawn generation, withdraws and keeps what it finds hot, and whoever is first
deletes. The trap: readers of 3FS do not keep a deleted file alive, so grace must exceed the longest read.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from prefill_engine.kv.file_operations import FileOperations
from prefill_engine.kv.segment_counters import SegmentCounters
from prefill_engine.kv.segment_data import FILE_MODE
from prefill_engine.kv.segment_paths import MARKER_NAME, TEMP_NAME, SegmentPaths, owner_of
from prefill_engine.kv.segment_scan import SegmentScan
from prefill_engine.kv.segment_write import SegmentWriter
from prefill_engine.kv.segments import SegmentInfo
from prefill_plan.kvd_config import KvdStoreConfig

# A writer that takes this long is dead; the age that FileStore uses too.
_TEMP_MAX_AGE_SECONDS = 3600.0
# Share of what a collection gives up that may be kept because it is hot: a store that is hot all over still gets room.
_HOT_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """newest: time of its last publication."""

    name: str
    num_bytes: int
    newest: float
    is_withdrawn: bool

    @property
    def owner(self) -> str:
        """Tag of the tenant whose segments these are; "" = nobody's: written while tenants had no share."""
        return owner_of(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSegment:
    name: str
    num_bytes: int
    newest: float

    @property
    def generation(self) -> str:
        return self.name.split("/")[-3]


def plan_withdrawal(
    generations: Sequence[Generation],
    *,
    used_bytes: int,
    start_bytes: float,
    goal_bytes: float,
    protect_after: float,
    share_bytes: float,
) -> tuple[str, ...]:
    """Generations to give up, oldest first: none below start_bytes, else until goal_bytes are left. Those of tenants above their
    share go before any other, down to the share.

    Args:
        generations: all of the layout, in any order.
        used_bytes: of the medium, or of the layout; withdrawn generations included.
        protect_after: a generation that was added to later than this stays (antirez/ds4#157: stored, then evicted at once).
        share_bytes: of each tenant; young generations count to what it holds.
    """
    left = used_bytes - sum(generation.num_bytes for generation in generations if generation.is_withdrawn)
    if left <= start_bytes:
        return ()
    held: Counter[str] = Counter()
    for generation in generations:
        held[generation.owner] += 0 if generation.is_withdrawn else generation.num_bytes
    old = [one for one in generations if not one.is_withdrawn and one.newest <= protect_after]
    old.sort(key=lambda generation: generation.name)
    names: dict[str, None] = {}
    for is_share_kept in (True, False):
        for generation in old:
            if left <= goal_bytes:
                break
            is_above = bool(generation.owner) and held[generation.owner] > share_bytes
            if generation.name not in names and (is_above or not is_share_kept):
                names[generation.name] = None
                left -= generation.num_bytes
                held[generation.owner] -= generation.num_bytes
    return tuple(names)


def choose_hot(
    segments: Sequence[StoredSegment], *, last_read: Mapping[str, float], read_after: float
) -> tuple[StoredSegment, ...]:
    """Those of withdrawn segments that were read lately, last read first, up to a share of all their bytes."""
    budget = int(_HOT_SHARE * sum(segment.num_bytes for segment in segments))
    hot = sorted(
        (segment for segment in segments if last_read.get(segment.name, read_after) > read_after),
        key=lambda segment: -last_read[segment.name],
    )
    kept = []
    for segment in hot:
        if segment.num_bytes <= budget:
            kept.append(segment)
            budget -= segment.num_bytes
    return tuple(kept)


class SegmentCollector:
    """One round per `collect`; `touch` from any thread."""

    def __init__(
        self,
        *,
        config: KvdStoreConfig,
        paths: SegmentPaths,
        files: FileOperations,
        scan: SegmentScan,
        writer: SegmentWriter,
        counters: SegmentCounters,
        clock: Callable[[], float],
        remove_tree: Callable[[str], bool] | None,
    ) -> None:
        """remove_tree: a faster way to delete a directory with all it holds; False = use ours."""
        self._config, self._paths, self._files, self._scan = config, paths, files, scan
        self._writer, self._counters, self._clock, self._remove_tree = writer, counters, clock, remove_tree
        self._withdrawn: dict[str, float] = {}
        self._closed: dict[str, tuple[Generation, tuple[StoredSegment, ...]]] = {}
        self._last_read: dict[str, float] = {}
        self._lock = threading.Lock()
        if config.max_bytes:
            # What stands there already is measured by the first collection; an empty medium is not overfilled before it either.
            writer.limit(part_bytes=self._part_bytes(config.max_bytes), room_bytes=config.max_bytes)

    def touch(self, names: Sequence[str]) -> None:
        """These segments have been read."""
        now = self._clock()
        with self._lock:
            self._last_read.update(dict.fromkeys(names, now))

    def collect(
        self,
        *,
        withdraw: Callable[[Sequence[str]], None],
        announce: Callable[[Sequence[SegmentInfo]], None] | None,
    ) -> int:
        """As SegmentStore; the new names of hot segments are announced before their old ones are withdrawn."""
        now = self._clock()
        self._forget_cold(now)
        generations = self._measure(now)
        capacity, used = self._capacity(generations)
        names = plan_withdrawal(
            [generation for generation, _ in generations.values()],
            used_bytes=used,
            start_bytes=self._config.high_watermark * capacity,
            goal_bytes=self._config.low_watermark * capacity,
            protect_after=now - self._config.grace_seconds,
            share_bytes=self._config.tenant_share * capacity,
        )
        marked = [name for name, (generation, _) in generations.items() if generation.is_withdrawn]
        fresh = sorted(name for name in (*marked, *names) if name not in self._withdrawn)
        if fresh:
            segments = [segment for name in fresh for segment in generations[name][1]]
            self._withdraw(fresh, segments, now, withdraw=withdraw, announce=announce)
        num_bytes = 0
        for name, since in sorted(self._withdrawn.items()):
            if name not in generations:
                del self._withdrawn[name]
            elif now - since >= self._config.grace_seconds:
                num_bytes += self._delete(name)
        self._set_limits(generations, capacity, used - num_bytes)
        return num_bytes

    def _measure(self, now: float) -> dict[str, tuple[Generation, tuple[StoredSegment, ...]]]:
        """Every generation and its segments. One that nobody adds to any more is listed once."""
        found = {}
        for name in self._scan.generations():
            is_withdrawn = name in self._withdrawn or self._exists(f"{self._paths.generation(name)}/{MARKER_NAME}")
            known = self._closed.get(name)
            segments = known[1] if known else tuple(self._stat_segments(name))
            generation = Generation(
                name=name,
                num_bytes=sum(segment.num_bytes for segment in segments),
                newest=max((segment.newest for segment in segments), default=0.0),
                is_withdrawn=is_withdrawn,
            )
            found[name] = (generation, segments)
            self._remove_stale_temps(name, oldest=now - _TEMP_MAX_AGE_SECONDS)
        settled = now - self._config.generation_seconds - self._config.grace_seconds
        self._closed = {name: entry for name, entry in found.items() if 0 < entry[0].newest < settled}
        return found

    def _stat_segments(self, generation: str) -> list[StoredSegment]:
        segments = []
        for name in self._scan.names(generation):
            try:
                stat = self._files.stat(self._paths.path(name))
            except FileNotFoundError:
                continue
            except OSError:
                self._counters.add("collect_errors")
                continue
            segments.append(StoredSegment(name=name, num_bytes=stat.st_size, newest=stat.st_mtime))
        return segments

    def _capacity(self, generations: Mapping[str, tuple[Generation, tuple[StoredSegment, ...]]]) -> tuple[int, int]:
        """Bytes that watermarks refer to, and how many of them are used."""
        stored = sum(generation.num_bytes for generation, _ in generations.values())
        if self._config.max_bytes:
            return self._config.max_bytes, stored
        try:
            stat = self._files.statvfs(self._paths.layout)
        except OSError:
            self._counters.add("collect_errors")
            return max(1, stored), 0
        # Blocks that only root may use count as used, as `df` has it.
        return (stat.f_blocks - stat.f_bfree + stat.f_bavail) * stat.f_frsize, (
            stat.f_blocks - stat.f_bfree
        ) * stat.f_frsize

    def _withdraw(
        self,
        generations: Sequence[str],
        segments: Sequence[StoredSegment],
        now: float,
        *,
        withdraw: Callable[[Sequence[str]], None],
        announce: Callable[[Sequence[SegmentInfo]], None] | None,
    ) -> None:
        for generation in generations:
            self._writer.leave_generation(generation)
        if announce is not None:
            kept = [info for segment in self._hot(segments, now) if (info := self._keep(segment)) is not None]
            if kept:
                self._counters.add("kept_hot", len(kept))
                announce(kept)
        withdraw([segment.name for segment in segments])
        self._counters.add("withdrawn", len(segments))
        for generation in generations:
            self._withdrawn[generation] = now
            self._mark(generation)

    def _mark(self, generation: str) -> None:
        """For other kvds. A full disk refuses it: then they meet misses, which is all that it spares them."""
        marker = f"{self._paths.generation(generation)}/{MARKER_NAME}"
        try:
            self._files.close(self._files.open(marker, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        except OSError:
            self._counters.add("collect_errors")

    def _hot(self, segments: Sequence[StoredSegment], now: float) -> tuple[StoredSegment, ...]:
        with self._lock:
            last_read = {name: self._last_read[name] for s in segments if (name := s.name) in self._last_read}
        return choose_hot(segments, last_read=last_read, read_after=now - self._config.generation_seconds)

    def _keep(self, segment: StoredSegment) -> SegmentInfo | None:
        info = self._scan.read_info(segment.name)
        if info is None:
            return None
        name = self._writer.keep(self._paths.path(segment.name), owner=owner_of(segment.generation))
        if name is None:
            return None
        return SegmentInfo(name=name, layout_id=info.layout_id, keys=info.keys, num_bytes=info.num_bytes)

    def _delete(self, generation: str) -> int:
        """Everything of a generation; its marker goes last, so that half of it is never taken for a live one."""
        num_bytes = 0
        for name in self._scan.names(generation):
            with suppress(OSError):
                stat = self._files.stat(self._paths.path(name))
                num_bytes += stat.st_size if stat.st_nlink <= 1 else 0
        path = self._paths.generation(generation)
        if self._remove_tree is None or not self._remove_tree(path):
            self._remove_generation(path)
        if self._exists(path):
            self._counters.add("collect_errors")
            return 0
        self._withdrawn.pop(generation, None)
        self._counters.add("collected_bytes", num_bytes)
        return num_bytes

    def _remove_generation(self, path: str) -> None:
        for name in sorted(self._list(path), key=lambda name: name == MARKER_NAME):
            inner = f"{path}/{name}"
            if name == MARKER_NAME:
                self._try(self._files.unlink, inner)
                continue
            for file in self._list(inner):
                self._try(self._files.unlink, f"{inner}/{file}")
            self._try(self._files.rmdir, inner)
        self._try(self._files.rmdir, path)

    def _remove_stale_temps(self, generation: str, *, oldest: float) -> None:
        temps = f"{self._paths.generation(generation)}/{TEMP_NAME}"
        for name in self._list(temps):
            path = f"{temps}/{name}"
            with suppress(OSError):
                if self._files.stat(path).st_mtime < oldest:
                    self._files.unlink(path)
                    self._counters.add("stale_temps")

    def _set_limits(
        self,
        generations: Mapping[str, tuple[Generation, tuple[StoredSegment, ...]]],
        capacity: int,
        used: int,
    ) -> None:
        part = self._part_bytes(capacity)
        room = max(0, capacity - used) if self._config.max_bytes else None
        self._writer.limit(part_bytes=part, room_bytes=room)
        # Also what an earlier process or another kvd wrote there.
        for name in sorted(generations):
            if generations[name][0].num_bytes >= part:
                self._writer.leave_generation(name)

    def _part_bytes(self, capacity: int) -> int:
        """Half of what a collection frees."""
        return int(capacity * max(0.0, self._config.high_watermark - self._config.low_watermark) / 2)

    def _forget_cold(self, now: float) -> None:
        oldest = now - self._config.generation_seconds
        with self._lock:
            self._last_read = {name: when for name, when in self._last_read.items() if when > oldest}

    def _list(self, path: str) -> list[str]:
        try:
            return self._files.listdir(path)
        except FileNotFoundError:
            return []
        except OSError:
            self._counters.add("collect_errors")
            return []

    def _exists(self, path: str) -> bool:
        try:
            self._files.stat(path)
        except FileNotFoundError:
            return False
        except OSError:
            self._counters.add("collect_errors")
            return False
        return True

    def _try(self, call: Callable[[str], None], path: str) -> None:
        with suppress(FileNotFoundError):
            try:
                call(path)
            except FileNotFoundError:
                pass
            except OSError:
                self._counters.add("collect_errors")
