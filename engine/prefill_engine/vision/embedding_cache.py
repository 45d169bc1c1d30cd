"""Rows in the shared-memory slab: being computed, held by tickets, or cached under their content key. The one owner of that slab.

Called by encode_queue and tickets. A pinned entry is computed, held or read; an unpinned one is cache, least recently used first
to go, and the first to go for room. The trap: an entry without content is not found by its key, and its last pin frees it.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from prefill_engine.vision.plan import ImagePlan
from prefill_engine.vision.slab import Region, Slab


@dataclass(slots=True, eq=False, kw_only=True)
class Rows:
    """Rows of one image. crc32c: of all of them, valid once is_filled. pins: who needs the memory to stay."""

    key: bytes
    plan: ImagePlan
    region: Region
    crc32c: int = 0
    is_filled: bool = False
    pins: int = 1


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """hits, misses: look-ups. evicted: entries that made room."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0


@dataclass(slots=True, kw_only=True)
class EmbeddingCache:
    """Owner of the slab's memory. cache_bytes: most that entries without pins may take; 0 = they go at once."""

    slab: Slab
    cache_bytes: int
    counters: CacheCounters = field(default_factory=CacheCounters)
    cached_bytes: int = 0
    _by_key: dict[bytes, Rows] = field(default_factory=dict)
    _unpinned: "OrderedDict[bytes, Rows]" = field(default_factory=OrderedDict)

    def find(self, key: bytes) -> Rows | None:
        """The rows of this key, pinned once more for the caller; None = a miss."""
        rows = self._by_key.get(key)
        if rows is None:
            self.counters.misses += 1
            return None
        self.counters.hits += 1
        self.pin(rows)
        return rows

    def reserve(self, key: bytes, plan: ImagePlan, num_bytes: int) -> Rows | None:
        """Memory for rows to be computed, pinned once. None: what is pinned leaves no room."""
        region = self.slab.allocate(num_bytes)
        while region is None and self._unpinned:
            self._evict()
            region = self.slab.allocate(num_bytes)
        return None if region is None else Rows(key=key, plan=plan, region=region)

    def fill(self, rows: Rows, *, crc32c: int) -> None:
        """The rows are there; from now on their key finds them."""
        rows.crc32c, rows.is_filled = crc32c, True
        self._by_key[rows.key] = rows

    def pin(self, rows: Rows) -> None:
        rows.pins += 1
        if self._unpinned.pop(rows.key, None) is not None:
            self.cached_bytes -= rows.region.length

    def unpin(self, rows: Rows) -> None:
        """Back into the cache with the last pin, or freed if it has no content or no room there."""
        assert rows.pins > 0, "unpinned more often than pinned"
        rows.pins -= 1
        if rows.pins:
            return
        if not rows.is_filled:
            self.slab.free(rows.region)
            return
        self._unpinned[rows.key] = rows
        self.cached_bytes += rows.region.length
        while self.cached_bytes > self.cache_bytes:
            self._evict()

    def drop_cached(self) -> None:
        """Frees everything that nobody holds."""
        while self._unpinned:
            self._evict()

    def _evict(self) -> None:
        key, rows = self._unpinned.popitem(last=False)
        del self._by_key[key]
        self.cached_bytes -= rows.region.length
        self.slab.free(rows.region)
        self.counters.evicted += 1
