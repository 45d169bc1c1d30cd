"""BlockStore in this process's memory: the default without a disk, and the reference for the other stores."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from prefill_engine.kv.record import RecordCodec, decode_info
from prefill_engine.kv.store import Buffer, StoredBlock
from prefill_engine.kv.store_counters import StoreCounters
from prefill_plan.block_keys import BlockKey
from prefill_plan.errors import StoreUnavailable
from prefill_plan.kv_layout import BlockLayout


class MemoryStore:
    """Keeps whole records, at most `max_bytes` of them (0 = none); the least recently read or written one goes first.

    records: the medium, least recently used first. Tests pass their own, to damage what is in it.
    """

    def __init__(
        self, layout: BlockLayout, *, max_bytes: int, records: OrderedDict[BlockKey, bytes] | None = None
    ) -> None:
        self._codec = RecordCodec(layout)
        self._max_records = max_bytes // layout.record_bytes
        self._lock = threading.Lock()
        self._records: OrderedDict[BlockKey, bytes] | None = OrderedDict() if records is None else records
        self._counters = StoreCounters()

    def count_present(self, keys: Sequence[BlockKey]) -> int:
        """As BlockStore."""
        with self._lock:
            records = self._open_records()
            return next((index for index, key in enumerate(keys) if key not in records), len(keys))

    def read(self, key: BlockKey, out: memoryview) -> StoredBlock | None:
        """As BlockStore; a damaged record is forgotten."""
        self._codec.check_target(out)
        with self._lock:
            records = self._open_records()
            record = records.get(key)
            if record is not None:
                records.move_to_end(key)
        if record is None:
            self._counters.add_miss(None)
            return None
        header, payload = self._codec.split(record)
        failure = self._codec.verify(header, payload, key=key)
        if failure is not None:
            self._counters.add_miss(f"verify_fail_{failure}")
            with self._lock:
                records.pop(key, None)
            return None
        out[:] = payload
        self._counters.add_hit(payload.nbytes)
        return decode_info(header)

    def write(self, key: BlockKey, payload: Buffer, *, block_index: int, provenance: int) -> bool:
        """As BlockStore; evicts to stay within max_bytes."""
        header = self._codec.encode_header(key=key, payload=payload, block_index=block_index, provenance=provenance)
        record = b"".join((header, payload))
        with self._lock:
            records = self._open_records()
            is_new = key not in records
            records.setdefault(key, record)
            records.move_to_end(key)
            num_evicted = max(0, len(records) - self._max_records)
            for _ in range(num_evicted):
                records.popitem(last=False)
            is_present = key in records
        self._counters.add("evicted", num_evicted)
        if is_new:
            self._counters.add_write(len(record))
        else:
            self._counters.add("writes_present")
        return is_present

    def counters(self) -> dict[str, int]:
        """As BlockStore."""
        return self._counters.snapshot()

    def close(self) -> None:
        """As BlockStore."""
        with self._lock:
            self._records = None

    def _open_records(self) -> OrderedDict[BlockKey, bytes]:
        if self._records is None:
            raise StoreUnavailable("the memory store is closed")
        return self._records
