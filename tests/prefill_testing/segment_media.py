"""The media that every SegmentStore test runs on: files, files read with O_DIRECT, and the fake 3FS library."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_engine.kv.segments import SegmentInfo, SegmentStore
from prefill_engine.kv.usrbio import UsrbioClient, open_usrbio_store
from prefill_plan.kvd_config import KvdStoreConfig
from prefill_testing.segments import SHAPE, make_records

CONFIG = KvdStoreConfig(read_threads=3)


@dataclass(frozen=True)
class Medium:
    """open: another store on the same files, as another kvd has it. is_grouped: reads pieces of records. can_turn: also when a
    job becomes urgent on the way."""

    store: SegmentStore
    root: Path
    open: Callable[..., SegmentStore]
    is_grouped: bool
    can_turn: bool

    def file(self, segment: SegmentInfo) -> Path:
        return self.root / segment.name


def open_medium(request: pytest.FixtureRequest) -> Iterator[Medium]:
    """A store on the medium that request.param names; for the fixture `medium` of tests/kv/conftest.py."""
    with ExitStack() as stack:
        if request.param == "usrbio":
            fake = request.getfixturevalue("hf3fs")
            root = Path(fake.mount) / "store"
            config = replace_config(CONFIG, usrbio_library=fake.path, usrbio_mount=fake.mount)
            client = UsrbioClient(config, sync=os.fsync)
            stack.callback(client.close_rings)

            def open_store(*, clock: Callable[[], float] = time.time, **changes: object) -> SegmentStore:
                changed = replace_config(config, **changes)
                store = open_usrbio_store(root, geometry=SHAPE, config=changed, client=client, clock=clock)
                stack.callback(store.close)
                return store

        else:
            root = request.getfixturevalue("disk_path") / "store"
            config = replace_config(CONFIG, direct_io=request.param == "direct")

            def open_store(*, clock: Callable[[], float] = time.time, **changes: object) -> SegmentStore:
                changed = replace_config(config, **changes)
                store = FileSegmentStore(root, geometry=SHAPE, config=changed, clock=clock)
                stack.callback(store.close)
                return store

        yield Medium(
            store=open_store(),
            root=root,
            open=open_store,
            is_grouped=request.param != "direct",
            can_turn=request.param not in ("direct", "usrbio"),
        )
    if request.param == "usrbio":
        assert (fake.count("violations"), fake.count("rejected_fds")) == (0, 0)
        assert fake.count("registered") == fake.count("deregistered")


def replace_config(config: KvdStoreConfig, **changes: object) -> KvdStoreConfig:
    return KvdStoreConfig(**{name: getattr(config, name) for name in config.__struct_fields__} | changes)


def publish(medium: Medium, *labels: str) -> SegmentInfo:
    return medium.store.publish(make_records(labels))


def corrupt(medium: Medium, segment: SegmentInfo, change: Callable[[bytearray], bytearray]) -> None:
    """Another file under the same name, so that no cache of the old one is in play."""
    path = medium.file(segment)
    content = change(bytearray(path.read_bytes()))
    path.unlink()
    path.write_bytes(content)


def flip(offset: int) -> Callable[[bytearray], bytearray]:
    def change(content: bytearray) -> bytearray:
        content[offset] ^= 0x10
        return content

    return change
