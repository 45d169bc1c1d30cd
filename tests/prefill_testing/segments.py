"""Records, jobs and read-outs for tests of segment stores. No torch."""

import mmap
import threading
import time
from collections.abc import Callable, Sequence

from prefill_engine.kv.record import RecordCodec, RecordShape
from prefill_engine.kv.segments import BlockLocation, ReadJob, RecordRead, RecordWrite, SegmentInfo, SegmentStore
from prefill_plan.block_keys import BlockKey
from prefill_testing.blocks import make_key, make_payload, tiny_layout

LAYOUT = tiny_layout()
SHAPE = RecordShape.of_layout(LAYOUT)
NUM_GROUPS = len(SHAPE.group_bytes)


def make_record(label: str) -> RecordWrite:
    payload = make_payload(LAYOUT, label)
    header = RecordCodec(LAYOUT).encode_header(key=make_key(label), payload=payload, block_index=1, provenance=0)
    return RecordWrite(key=make_key(label), record=memoryview(header + payload))


def make_records(labels: Sequence[str]) -> list[RecordWrite]:
    return [make_record(label) for label in labels]


class Clock:
    """Wall time that a test can move on."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self._ahead

    def advance(self, seconds: float) -> None:
        self._ahead += seconds


class Reading:
    """A job, its page-aligned targets, and what it was told.

    groups: per read, every count told. bad: reason per read. events: (read, groups) in the order of the calls.
    """

    def __init__(
        self,
        wanted: Sequence[tuple[BlockKey, BlockLocation]],
        *,
        group_major: bool = False,
        is_cancelled: Callable[[], bool] = lambda: False,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        self._memory = mmap.mmap(-1, max(1, len(wanted)) * SHAPE.record_bytes)
        view = memoryview(self._memory)
        view[:] = b"\xa5" * view.nbytes
        size = SHAPE.record_bytes
        self.targets = [view[index * size : (index + 1) * size] for index in range(len(wanted))]
        self.groups: dict[int, list[int]] = {}
        self.bad: dict[int, str] = {}
        self.events: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        reads = [
            RecordRead(key=key, location=location, target=target)
            for (key, location), target in zip(wanted, self.targets, strict=True)
        ]
        self.job = ReadJob(
            reads=reads,
            group_major=group_major,
            on_group=self._tell_group,
            on_bad=self._tell_bad,
            is_cancelled=is_cancelled,
            is_urgent=is_urgent,
        )

    def _tell_group(self, index: int, groups: int) -> None:
        with self._lock:
            assert index not in self.bad, "groups of a bad record"
            told = self.groups.setdefault(index, [])
            assert not told or groups > told[-1], "groups went back"
            told.append(groups)
            self.events.append((index, groups))

    def _tell_bad(self, index: int, reason: str) -> None:
        with self._lock:
            assert index not in self.bad, "bad twice"
            assert NUM_GROUPS not in self.groups.get(index, []), "bad after the last group"
            self.bad[index] = reason

    @property
    def complete(self) -> list[int]:
        """Reads whose groups have all been verified."""
        return sorted(index for index, groups in self.groups.items() if groups[-1] == NUM_GROUPS)

    def is_untouched(self, index: int) -> bool:
        return self.targets[index].tobytes() == b"\xa5" * SHAPE.record_bytes


def locations(*segments: SegmentInfo) -> list[tuple[BlockKey, BlockLocation]]:
    """Every record of these segments, in order."""
    return [
        (key, BlockLocation(segment=segment.name, record=record))
        for segment in segments
        for record, key in enumerate(segment.keys)
    ]


def read(
    store: SegmentStore, wanted: Sequence[tuple[BlockKey, BlockLocation]], *, group_major: bool = False
) -> Reading:
    reading = Reading(wanted, group_major=group_major)
    store.read(reading.job)
    # Whatever happens, every read ends one way or the other, and a verified record is the right one.
    assert sorted([*reading.complete, *reading.bad]) == list(range(len(wanted)))
    for index in reading.complete:
        header = RecordCodec(LAYOUT).split(reading.targets[index])
        assert RecordCodec(LAYOUT).verify(*header, key=wanted[index][0]) is None
    return reading
