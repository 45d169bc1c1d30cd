"""Stores on the fake 3FS library of tests/kv/conftest.py."""

from pathlib import Path
from typing import Any, Protocol

from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_engine.kv.usrbio import UsrbioClient, open_usrbio_store
from prefill_plan.kvd_config import KvdStoreConfig, KvdStoreKind
from prefill_testing.segments import SHAPE


class Fake(Protocol):
    """tests/kv/conftest.py FakeHf3fs."""

    path: str
    mount: str

    def count(self, name: str) -> int: ...
    def fault(self, kind: str, *, at: int = 1, times: int = 1, value: int = 0) -> None: ...
    def pause(self, paused: bool) -> None: ...
    def restart(self) -> None: ...
    def reorder(self) -> None: ...
    def refuse_files(self) -> None: ...
    def finish_lost(self) -> None: ...


def config_of(fake: Fake, **changes: Any) -> KvdStoreConfig:
    values: dict[str, Any] = {
        "kind": KvdStoreKind.USRBIO,
        "path": f"{fake.mount}/store",
        "read_threads": 3,
        "usrbio_library": fake.path,
    }
    return KvdStoreConfig(**values | changes)


def open_store(fake: Fake, client: UsrbioClient) -> FileSegmentStore:
    return open_usrbio_store(Path(fake.mount) / "store", geometry=SHAPE, config=config_of(fake), client=client)
