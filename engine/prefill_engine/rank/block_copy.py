"""Copies groups of blocks from the shared pool into the KV cache of a CPU rank. Called by the copy thread.

One memcpy per piece through ctypes, which lets the step thread run meanwhile. The trap: addresses are plain numbers, so slots
must have been checked, and cache and pool must outlive the copy.
"""

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prefill_engine.kv.pool_memory import PoolMemory
from prefill_engine.kv.record import HEADER_FIELDS, KEY_BYTES
from prefill_engine.kv_cache import KvCache
from prefill_engine.rank.block_save import BlockSaver
from prefill_plan.block_keys import BlockKey

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes, _memcpy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
_OFFSETS = {name: offset for name, offset, _, _ in HEADER_FIELDS}
_KEY_OFFSET, _PROVENANCE_OFFSET = _OFFSETS["key"], _OFFSETS["provenance"]
_PREFIX_BYTES = 64


class GroupCopier(Protocol):
    """How groups get from the pool into the cache. lone_groups: as next_copy's."""

    lone_groups: int

    def copy(self, pool: PoolMemory, *, groups: range, sources: Sequence[int], targets: Sequence[int]) -> int:
        """Copies consecutive groups of pool slots `sources` to cache slots `targets`, and returns when they are there; the
        bytes copied."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMovers:
    """Both ways between pool and cache."""

    copier: GroupCopier
    saver: BlockSaver


class CpuCopier:
    """GroupCopier for a cache in host memory. A hit that is whole already is copied in whole blocks: a step on a CPU takes so
    long that the few milliseconds by which the first group would come earlier are not worth slower copies."""

    lone_groups = 0

    def __init__(self, cache: KvCache) -> None:
        layout = cache.layout
        self._header_bytes, self._record_bytes = layout.header_bytes, layout.record_bytes
        self._offsets = (*(source.group_offset for source in layout.sources), layout.payload_bytes)
        self._cache = cache
        self._base, self._stride = cache.blocks.data_ptr(), layout.stride_bytes

    def copy(self, pool: PoolMemory, *, groups: range, sources: Sequence[int], targets: Sequence[int]) -> int:
        """As GroupCopier."""
        offset = self._offsets[groups.start]
        num_bytes = self._offsets[groups.stop] - offset
        source_base = pool.address + pool.record_offset(0) + self._header_bytes + offset
        from_addresses = np.asarray(sources, dtype=np.int64) * self._record_bytes + source_base
        to_addresses = np.asarray(targets, dtype=np.int64) * self._stride + self._base + offset
        # deque(map()) calls without a Python frame per piece.
        deque(map(_memcpy, to_addresses.tolist(), from_addresses.tolist(), repeat(num_bytes)), maxlen=0)
        return num_bytes * len(sources)


def matching_headers(pool: PoolMemory, slots: Sequence[int], keys: Sequence[BlockKey]) -> npt.NDArray[np.uint8]:
    """Provenances of the leading slots whose records carry the expected keys, [number of them].

    A record that kvd verified has a good header; this finds slots that were given to another block since.
    """
    form = pool.geometry
    assert form is not None, "the pool is not laid out"
    start = pool.address + pool.record_offset(0)
    everything = np.ctypeslib.as_array((ctypes.c_uint8 * (pool.num_blocks * form.record_bytes)).from_address(start))
    heads = everything.reshape(pool.num_blocks, form.record_bytes)[np.asarray(slots, dtype=np.int64), :_PREFIX_BYTES]
    expected = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, KEY_BYTES)
    is_right = (heads[:, _KEY_OFFSET : _KEY_OFFSET + KEY_BYTES] == expected).all(axis=1)
    leading = len(slots) if is_right.all() else int(is_right.argmin())
    return heads[:leading, _PROVENANCE_OFFSET]
