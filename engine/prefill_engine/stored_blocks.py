"""Blocks of a store-only hand-over, read by key from the decode side's own block store. No torch.

Called by take-over, blocking: on a thread of its own. The trap: what the source committed may be gone by now (evicted,
collected); then the hand-over as a whole is refused, never filled up with something else.
"""

from collections.abc import Sequence
from typing import Protocol

from prefill_engine.kv.store import StoredBlock
from prefill_plan.block_keys import BlockKey
from prefill_plan.errors import KvError


class StoredBlocks(Protocol):
    """What is read from: any BlockStore, or the segments of a kvd (stored_segments.py)."""

    def read(self, key: BlockKey, out: memoryview) -> StoredBlock | None:
        """As BlockStore."""
        ...

    def close(self) -> None: ...


def read_stored_blocks(store: StoredBlocks, keys: Sequence[bytes], *, payload_bytes: int) -> bytes:
    """Verified payloads of the leading blocks, in order.

    Raises:
        KvError: a block is not in this store, or not undamaged, or is another block of the prompt.
        StoreUnavailable: the medium failed.
    """
    data = bytearray(len(keys) * payload_bytes)
    view = memoryview(data)
    for index, key in enumerate(keys):
        target = view[index * payload_bytes : (index + 1) * payload_bytes]
        stored = store.read(BlockKey(key), target)
        if stored is None or stored.block_index != index:
            what = "is missing or damaged" if stored is None else f"is stored as block {stored.block_index}"
            raise KvError(f"store-only hand-over: block {index} of {len(keys)} {what}; the hand-over is refused")
    return bytes(data)
