"""What a segment store holds, read from its directories and tables of contents.

Called at start, when a directory service has lost its state, and by the collector. The trap: anything may stand in a store's
directories; whatever is not a complete segment of this layout is passed over.
"""

import os
from collections.abc import Iterator

from prefill_engine.kv.file_operations import FileOperations
from prefill_engine.kv.segment_counters import SegmentCounters
from prefill_engine.kv.segment_file import HEADER_BYTES, SegmentForm
from prefill_engine.kv.segment_paths import (
    MARKER_NAME,
    SegmentPaths,
    is_generation,
    is_segment_file,
    is_shard,
)
from prefill_engine.kv.segments import SegmentInfo


class SegmentScan:
    """Reads only; stateless."""

    def __init__(
        self, *, paths: SegmentPaths, form: SegmentForm, files: FileOperations, counters: SegmentCounters
    ) -> None:
        self._paths, self._form, self._files, self._counters = paths, form, files, counters

    def generations(self) -> list[str]:
        """Newest first, withdrawn ones included."""
        return sorted(filter(is_generation, self._list(self._paths.layout)), reverse=True)

    def names(self, generation: str) -> Iterator[str]:
        """Segments of a generation, unread."""
        path = self._paths.generation(generation)
        for shard in sorted(filter(is_shard, self._list(path))):
            for file in sorted(filter(is_segment_file, self._list(f"{path}/{shard}"))):
                yield self._paths.name(generation, file.removesuffix(".seg"))

    def segments(self) -> Iterator[SegmentInfo]:
        """As SegmentStore.scan."""
        for generation in self.generations():
            if MARKER_NAME in self._list(self._paths.generation(generation)):
                continue
            for name in self.names(generation):
                info = self.read_info(name)
                if info is not None:
                    yield info

    def read_info(self, name: str) -> SegmentInfo | None:
        """From the table of contents; None, counted, for a damaged or unreadable one."""
        header = bytearray(HEADER_BYTES)
        path = self._paths.path(name)
        try:
            num_bytes = self._files.stat(path).st_size
            self._counters.add("opens")
            fd = self._files.open(path, os.O_RDONLY | os.O_CLOEXEC, 0)
            try:
                # A short read leaves zeros, which have no valid checksum.
                self._files.preadv(fd, [memoryview(header)], 0)
            finally:
                self._files.close(fd)
        except OSError:
            self._counters.add("bad_toc")
            return None
        keys = self._form.decode_header(header, file_bytes=num_bytes)
        if keys is None:
            self._counters.add("bad_toc")
            return None
        return SegmentInfo(name=name, layout_id=self._form.layout_id, keys=keys, num_bytes=num_bytes)

    def _list(self, path: str) -> list[str]:
        try:
            return self._files.listdir(path)
        except OSError:
            return []
