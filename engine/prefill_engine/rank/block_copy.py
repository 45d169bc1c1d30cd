"""Copies groups of blocks from the shared pool into the KV cache of a CPU rank. Called by the copy thread.

One copy per run of slots by numpy, which lets the step thread run meanwhile. The trap: views of the pool are of plain addresses,
so the pool must outlive the copy.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from prefill_engine.kv.pool_memory import PoolMemory
from prefill_engine.kv.record import HEADER_FIELDS, KEY_BYTES
from prefill_engine.kv_cache import KvCache
from prefill_engine.rank.block_save import BlockSaver
from prefill_plan.block_keys import BlockKey

_OFFSETS = {name: offset for name, offset, _, _ in HEADER_FIELDS}
_KEY_OFFSET, _PROVENANCE_OFFSET = _OFFSETS["key"], _OFFSETS["provenance"]
_PREFIX_BYTES = 64


class GroupCopier(Protocol):
    """How groups get from the pool into the cache.

    lone_groups: as next_copy's. most_blocks: in one copy, short enough that loads take turns and a lost lease is noticed, long
    enough that the checks between copies cost nothing.
    """

    lone_groups: int
    most_blocks: int

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
    # About 20 ms. After each copy the checks find nothing of theirs in the core's caches and take 0.5 ms.
    most_blocks = 1024

    def __init__(self, cache: KvCache) -> None:
        layout = cache.layout
        self._header_bytes = layout.header_bytes
        self._offsets = (*(source.group_offset for source in layout.sources), layout.payload_bytes)
        self._blocks = cache.blocks.view(torch.uint8).numpy()

    def copy(self, pool: PoolMemory, *, groups: range, sources: Sequence[int], targets: Sequence[int]) -> int:
        """As GroupCopier."""
        start, end = self._offsets[groups.start], self._offsets[groups.stop]
        to, records = self._blocks[:, start:end], _records(pool)
        payloads = records[:, self._header_bytes + start : self._header_bytes + end]
        for source, target, length in slot_runs(sources, targets):
            to[target : target + length] = payloads[source : source + length]
        return (end - start) * len(sources)


def slot_runs(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first source, first target, length) of stretches in which both count up by one. In order, as long as they can be: pools
    give slots by the segment, and a call for each block would cost a thirtieth of the copy."""
    if not sources:
        return []
    from_slots, to_slots = np.asarray(sources, dtype=np.int64), np.asarray(targets, dtype=np.int64)
    is_break = (np.diff(from_slots) != 1) | (np.diff(to_slots) != 1)
    starts = [0, *(np.flatnonzero(is_break) + 1).tolist()]
    ends = [*starts[1:], len(from_slots)]
    return [(sources[start], targets[start], end - start) for start, end in zip(starts, ends, strict=True)]


def _records(pool: PoolMemory) -> npt.NDArray[np.uint8]:
    """The pool's records, header and all: [num_blocks, record_bytes], a view."""
    form = pool.geometry
    assert form is not None, "the pool is not laid out"
    start = pool.address + pool.record_offset(0)
    everything = (ctypes.c_uint8 * (pool.num_blocks * form.record_bytes)).from_address(start)
    return np.ctypeslib.as_array(everything).reshape(pool.num_blocks, form.record_bytes)


def matching_headers(pool: PoolMemory, slots: Sequence[int], keys: Sequence[BlockKey]) -> npt.NDArray[np.uint8]:
    """Provenances of the leading slots whose records carry the expected keys, [number of them].

    A record that kvd verified has a good header; this finds slots that were given to another block since.
    """
    heads = _records(pool)[np.asarray(slots, dtype=np.int64), :_PREFIX_BYTES]
    expected = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, KEY_BYTES)
    is_right = (heads[:, _KEY_OFFSET : _KEY_OFFSET + KEY_BYTES] == expected).all(axis=1)
    leading = len(slots) if is_right.all() else int(is_right.argmin())
    return heads[:leading, _PROVENANCE_OFFSET]
