"""Contestant: the segment store of kvd, every record verified (CRC32C) before it counts, writes durable before they are found."""

from pathlib import Path

from contest import DIRECTORY, Manifest, digest_of, make_targets, serve

from prefill_engine.kv.record import RecordShape
from prefill_engine.kv.segment_file import HEADER_BYTES
from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_engine.kv.segments import BlockLocation, ReadJob, RecordRead, RecordWrite
from prefill_plan.block_keys import BlockKey
from prefill_plan.config import RecordFormat
from prefill_plan.kv_layout import block_layout
from prefill_plan.kvd_config import KvdStoreConfig
from prefill_plan.model_spec import released_model_spec

SHAPE = RecordShape.of_layout(block_layout(released_model_spec(), RecordFormat.FP4))
ROOT = DIRECTORY / "segments"
_DIRECT_THREADS = 4


def main() -> None:
    manifest = Manifest()
    memory, offsets = make_targets(manifest)
    view = memoryview(memory)
    targets = [view[offset : offset + manifest.record_bytes] for offset in offsets]
    stores = {
        "read": open_store(threads=manifest.threads),
        "read_one_thread": open_store(threads=1),
        "read_direct": open_store(threads=_DIRECT_THREADS, direct_io=True),
    }
    reads = [
        RecordRead(key=BlockKey(index.to_bytes(32, "big")), location=location_of(path, offset), target=target)
        for index, ((path, offset), target) in enumerate(zip(manifest.places, targets, strict=True))
    ]
    new = [
        RecordWrite(key=read.key, record=memoryview(record))
        for read, record in zip(reads[: manifest.new_records], manifest.records(), strict=False)
    ]

    def arrived(name: str) -> str:
        view[:] = bytes(len(view))
        read_all(stores[name], reads)
        return digest_of(targets)

    actions = {name: lambda store=store: read_all(store, reads) for name, store in stores.items()}
    serve(actions | {"write": lambda: publish(stores["read"], new)}, arrived=arrived)


def open_store(*, threads: int, direct_io: bool = False) -> FileSegmentStore:
    return FileSegmentStore(ROOT, geometry=SHAPE, config=KvdStoreConfig(read_threads=threads, direct_io=direct_io))


def location_of(path: str, offset: int) -> BlockLocation:
    name = str(Path(path).relative_to(ROOT))
    return BlockLocation(segment=name, record=(offset - HEADER_BYTES) // SHAPE.record_bytes)


def publish(store: FileSegmentStore, records: list[RecordWrite]) -> None:
    store.publish(records)


def read_all(store: FileSegmentStore, reads: list[RecordRead]) -> None:
    bad: list[str] = []
    store.read(
        ReadJob(
            reads=reads,
            group_major=False,
            on_group=lambda _index, _groups: None,
            on_bad=lambda _index, reason: bad.append(reason),
            is_cancelled=lambda: False,
        )
    )
    if bad:
        raise SystemExit(f"{len(bad)} records are bad: {bad[0]}")


if __name__ == "__main__":
    main()
