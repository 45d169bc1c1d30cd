"""Which bytes a read job will ask its medium for, in which order: for a medium that begins before it is asked. Pure.

Called by segment_store with the strips that segment_read gets. The trap: it is a guess; after an error or a bad record other
bytes are read, or none.
"""

from collections.abc import Iterator, Sequence

from prefill_engine.kv.record import RecordCodec
from prefill_engine.kv.segment_data import FileRange
from prefill_engine.kv.segment_file import SegmentForm
from prefill_engine.kv.segment_paths import SegmentPaths
from prefill_engine.kv.segment_read import Strip
from prefill_engine.kv.segments import ReadJob


def plan_ranges(
    job: ReadJob, strips: Sequence[Strip], *, codec: RecordCodec, form: SegmentForm, paths: SegmentPaths, by_group: bool
) -> Iterator[FileRange]:
    """As SegmentRead takes them: strip by strip; of a group-major job group by group where the medium reads pieces (by_group)."""
    placed = [(path, strip) for strip in strips if (path := paths.resolve(strip.segment)) is not None]
    if not (job.group_major and by_group):
        for path, strip in placed:
            offset = form.record_offset(strip.first_record)
            yield FileRange(path=path, offset=offset, num_bytes=len(strip.reads) * form.record_bytes)
        return
    for group in range(codec.num_groups):
        start, end = codec.group_range(group)
        # The header comes with the first group.
        start = start if group else 0
        for path, strip in placed:
            for index in strip.reads:
                offset = form.record_offset(job.reads[index].location.record) + start
                yield FileRange(path=path, offset=offset, num_bytes=end - start)
