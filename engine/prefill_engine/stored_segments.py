"""Blocks in the segments of a kvd's store, found by key through their tables of contents: a decode side without a kvd of its own.

Opened by takeover_way for store-only hand-overs; blocks, on a thread of its own; writes nothing, so a read-only mount will do.
The traps: a segment may be collected between scan and read, which is a miss; and what the index lacks may have been published
since, so a key that is not found causes one more scan.
"""

from collections.abc import Mapping
from pathlib import Path

from prefill_engine.kv.file_operations import FileOperations
from prefill_engine.kv.record import RecordCodec, decode_info
from prefill_engine.kv.segment_counters import SegmentCounters
from prefill_engine.kv.segment_data import PosixData
from prefill_engine.kv.segment_file import SegmentForm
from prefill_engine.kv.segment_paths import SegmentPaths
from prefill_engine.kv.segment_read import SegmentRead, plan_strips
from prefill_engine.kv.segment_scan import SegmentScan
from prefill_engine.kv.segments import BlockLocation, ReadJob, RecordRead
from prefill_engine.kv.store import StoredBlock
from prefill_plan.block_keys import BlockKey
from prefill_plan.kv_layout import BlockLayout


class StoredSegments:
    """StoredBlocks over `store.path` of a kvd's configuration."""

    def __init__(self, root: Path, layout: BlockLayout) -> None:
        self._codec = RecordCodec(layout)
        self._form = SegmentForm.of_geometry(self._codec.shape)
        self._paths = SegmentPaths(root=str(root), layout_id=self._form.layout_id)
        self._counters = SegmentCounters()
        files = FileOperations()
        self._data = PosixData(files, direct_io=False)
        self._scan = SegmentScan(paths=self._paths, form=self._form, files=files, counters=self._counters)
        self._locations: Mapping[BlockKey, BlockLocation] = {}

    @property
    def exists(self) -> bool:
        """Whether a kvd has kept segments of this layout there."""
        return Path(self._paths.layout).is_dir()

    def read(self, key: BlockKey, out: memoryview) -> StoredBlock | None:
        """As BlockStore."""
        if key not in self._locations:
            self._locations = self._index()
        location = self._locations.get(key)
        if location is None:
            return None
        record = bytearray(self._codec.shape.record_bytes)
        failures: list[str] = []
        job = ReadJob(
            reads=(RecordRead(key=key, location=location, target=memoryview(record)),),
            group_major=False,
            on_group=lambda _index, _groups: None,
            on_bad=lambda _index, reason: failures.append(reason),
            is_cancelled=lambda: False,
        )
        self._run(job)
        header, payload = self._codec.split(record)
        if failures or self._codec.verify(header, payload[: out.nbytes], key=key) is not None:
            return None
        out[:] = payload[: out.nbytes]
        return decode_info(header)

    def close(self) -> None:
        """Nothing is held between reads."""

    def _run(self, job: ReadJob) -> None:
        read = SegmentRead(
            job,
            strips=plan_strips(job.reads, max_records=1),
            data=self._data,
            codec=self._codec,
            form=self._form,
            paths=self._paths,
            counters=self._counters,
        )
        try:
            read.work()
        finally:
            read.finish()

    def _index(self) -> dict[BlockKey, BlockLocation]:
        return {
            key: BlockLocation(segment=segment.name, record=record)
            for segment in self._scan.segments()
            for record, key in enumerate(segment.keys)
        }
