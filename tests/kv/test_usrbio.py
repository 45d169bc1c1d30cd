"""USRBIO against the fake library: the traps of kv.md 3.1 and 3.2 that are ours to avoid, and every fault a miss."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_engine.kv.segments import SegmentInfo
from prefill_engine.kv.usrbio import UsrbioClient
from prefill_engine.kv.usrbio_library import UsrbioLibrary
from prefill_engine.kv.usrbio_ring import RingIo, UsrbioRing
from prefill_plan.errors import StoreUnavailable
from prefill_testing.segments import SHAPE, Reading, locations, make_records, read
from prefill_testing.usrbio_rig import Fake, config_of, open_store


@pytest.fixture
def make_client(hf3fs: Fake) -> Iterator[Callable[..., UsrbioClient]]:
    with ExitStack() as stack:

        def make(**changes: Any) -> UsrbioClient:
            values: dict[str, Any] = {"sync": os.fsync, "deadline_seconds": 20.0}
            client = UsrbioClient(config_of(hf3fs), **values | changes)
            stack.callback(client.close_rings)
            return client

        yield make


@pytest.fixture
def client(make_client: Callable[..., UsrbioClient]) -> UsrbioClient:
    return make_client()


@pytest.fixture
def store(hf3fs: Fake, client: UsrbioClient) -> FileSegmentStore:
    return open_store(hf3fs, client)


@pytest.fixture
def segment(store: FileSegmentStore) -> SegmentInfo:
    return store.publish(make_records("abcdef"))


# --- start ---


# --- rings, batches, registration ---


def test_stores_come_and_go_with_the_same_two_rings(hf3fs: Fake, client: UsrbioClient) -> None:
    """3FS leaks rings that have flags (UsrbIo.cc:154 against :213)."""
    for _ in range(3):
        store = open_store(hf3fs, client)
        assert read(store, locations(store.publish(make_records("ab")))).bad == {}
        store.close()

    assert hf3fs.count("rings") == 2
    assert hf3fs.count("iovs") == 2


def test_ios_that_are_ready_together_are_submitted_together(hf3fs: Fake, client: UsrbioClient) -> None:
    library = UsrbioLibrary(hf3fs.path)
    path = Path(hf3fs.mount) / "data"
    path.write_bytes(os.urandom(64 * 4096))
    iov = library.create_iov(hf3fs.mount, 64 * 4096)
    ring = UsrbioRing(library, hf3fs.mount, entries=128, for_read=True, flags=0)
    handle = client.open(str(path))
    hf3fs.pause(True)
    before = hf3fs.count("submits")
    ios = [
        RingIo(iov=iov, address=int(iov.base) + 4096 * n, fd=handle, offset=4096 * n, num_bytes=4096) for n in range(64)
    ]
    batch = ring.start(ios)
    assert not batch.wait(0.05)
    hf3fs.pause(False)

    assert batch.wait(20)
    assert batch.results == [4096] * 64
    assert hf3fs.count("submits") - before <= 2 + 64 // 16  # each wait for completions posts none here
    assert hf3fs.count("max_batch") >= 32
    client.close(handle)
    assert ring.close()
    library.destroy_iov(iov)


def test_a_ring_that_is_full_waits_for_completions(hf3fs: Fake, client: UsrbioClient) -> None:
    library = UsrbioLibrary(hf3fs.path)
    path = Path(hf3fs.mount) / "data"
    path.write_bytes(bytes(4096))
    iov = library.create_iov(hf3fs.mount, 4096)
    ring = UsrbioRing(library, hf3fs.mount, entries=4, for_read=True, flags=0)
    handle = client.open(str(path))
    io = RingIo(iov=iov, address=int(iov.base), fd=handle, offset=0, num_bytes=4096)

    batch = ring.start([io] * 50)

    assert batch.wait(20)
    assert batch.results == [4096] * 50
    assert hf3fs.count("max_batch") <= 4
    client.close(handle)
    assert ring.close()
    library.destroy_iov(iov)


def test_an_io_that_cannot_be_prepared_fails_alone(hf3fs: Fake, store: FileSegmentStore, segment: SegmentInfo) -> None:
    hf3fs.fault("prep", value=errno.EIO)

    assert read(store, locations(segment)).bad == {}  # the strip was read again, record by record


def test_a_file_number_that_is_used_again_reads_the_new_file(hf3fs: Fake, client: UsrbioClient) -> None:
    """hf3fs_usrbio.h:138: without a deregistration before the close, the number is refused, or reads the old file."""
    paths = [Path(hf3fs.mount) / name for name in "ab"]
    for path in paths:
        path.write_bytes(path.name.encode() * 100)
    seen = []
    for path in paths * 5:
        handle = client.open(str(path))
        target = bytearray(100)
        client.read(handle, [memoryview(target)], 0)
        seen.append((handle, bytes(target[:1])))
        client.close(handle)

    assert len({handle for handle, _ in seen}) == 1
    assert [data for _, data in seen] == [b"a", b"b"] * 5
    assert hf3fs.count("rejected_fds") == 0
    assert hf3fs.count("registered") == hf3fs.count("deregistered") == 10


def test_a_close_without_a_deregistration_is_what_the_fake_refuses(hf3fs: Fake, client: UsrbioClient) -> None:
    """The fake is no good if it does not punish the mistake."""
    path = Path(hf3fs.mount) / "a"
    path.write_bytes(b"a")
    handle = client.open(str(path))
    os.close(handle)

    with pytest.raises(OSError, match="hf3fs_reg_fd") as caught:
        client.open(str(path))

    assert caught.value.errno == errno.EINVAL
    assert hf3fs.count("rejected_fds") == 1


def test_a_descriptor_that_cannot_be_registered_is_closed(hf3fs: Fake, client: UsrbioClient) -> None:
    path = Path(hf3fs.mount) / "a"
    path.write_bytes(b"a")
    num_open = len(os.listdir("/proc/self/fd"))
    hf3fs.refuse_files()

    with pytest.raises(OSError, match="hf3fs_reg_fd"):
        client.open(str(path))

    assert len(os.listdir("/proc/self/fd")) == num_open


def test_completions_in_any_order_find_their_reads(hf3fs: Fake, client: UsrbioClient) -> None:
    hf3fs.reorder()
    store = open_store(hf3fs, client)
    segments = [store.publish(make_records([f"{number} {record}" for record in range(4)])) for number in range(8)]
    failures: list[object] = []

    def work() -> None:
        for _ in range(5):
            failures.extend(read(store, locations(*segments)).bad.items())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "the other thread has not ended within 60 s"

    assert failures == []
    assert hf3fs.count("violations") == 0


# --- reading ---


@pytest.mark.parametrize("group_major", [False, True], ids=["record_major", "group_major"])
@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("error", errno.EIO, "io"),
        ("error", 4001, "io"),
        ("hole", 0, "hole"),
        ("short", 100, "short"),
        ("short", 0, "short"),
    ],
    ids=["EIO", "3fs_status", "hole", "short", "nothing"],
)
def test_a_failing_read_is_a_miss_with_its_reason(
    hf3fs: Fake, store: FileSegmentStore, segment: SegmentInfo, kind: str, value: int, reason: str, group_major: bool
) -> None:
    hf3fs.fault(kind, times=10**6, value=value)
    reading = read(store, locations(segment), group_major=group_major)
    hf3fs.fault(kind, times=0)

    assert reading.bad == dict.fromkeys(range(6), reason)
    assert read(store, locations(segment), group_major=group_major).bad == {}


def test_an_error_of_a_strip_is_tried_again_by_record(
    hf3fs: Fake, store: FileSegmentStore, segment: SegmentInfo
) -> None:
    hf3fs.fault("error", value=errno.EIO)

    assert read(store, locations(segment)).bad == {}


def test_lost_chunks_are_errors_and_not_zeros(hf3fs: Fake, store: FileSegmentStore) -> None:
    """PioV.cc:225: without the flag a hole reads as zeros. A real hole, and the ring of the store."""
    segment = store.publish(make_records("abc"))
    path = Path(hf3fs.mount) / "store" / segment.name
    content = path.read_bytes()
    path.unlink()
    with path.open("wb") as file:
        file.write(content[: 4096 + SHAPE.record_bytes])
        file.seek(4096 + 2 * SHAPE.record_bytes)
        file.write(content[4096 + 2 * SHAPE.record_bytes :])
        os.fsync(file.fileno())

    reading = read(store, locations(segment))

    assert reading.bad == {1: "hole"}
    assert reading.is_untouched(1)  # an error by the ring's flag: zeros never reached the target


def test_a_lost_completion_costs_a_deadline_and_spares_the_target(
    hf3fs: Fake, make_client: Callable[..., UsrbioClient]
) -> None:
    store = open_store(hf3fs, make_client(deadline_seconds=0.3))
    segment = store.publish(make_records("abc"))
    executed = hf3fs.count("executed")
    hf3fs.fault("lose", times=10**6)

    reading = read(store, locations(segment))

    assert reading.bad == dict.fromkeys(range(3), "io")
    hf3fs.fault("lose", times=0)
    assert hf3fs.count("executed") - executed <= 3  # one try per strip, not one more per record
    hf3fs.finish_lost()
    # The late data has landed in a buffer of ours: the slot may hold something else by now.
    assert read(store, locations(segment)).bad == {}
    assert all(reading.is_untouched(index) for index in range(3))


def test_buffers_of_lost_completions_come_back_with_them(hf3fs: Fake, make_client: Callable[..., UsrbioClient]) -> None:
    store = open_store(hf3fs, make_client(deadline_seconds=0.05))
    segment = store.publish(make_records("a"))
    hf3fs.fault("lose", times=10**6)
    # More than there are buffers: from some point on, reads fail for want of one.
    for _ in range(60):
        assert read(store, locations(segment)).bad == {0: "io"}
    assert hf3fs.count("prepared") < 60 + 4
    hf3fs.fault("lose", times=0)
    assert read(store, locations(segment)).bad == {0: "io"}

    hf3fs.finish_lost()

    reading = Reading(locations(segment))
    for _ in range(100):  # the waiting thread hands them back one by one
        reading = read(store, locations(segment))
        if not reading.bad:
            break
    assert reading.bad == {}


def test_a_daemon_that_stands_still_and_goes_on_loses_nothing(
    hf3fs: Fake, store: FileSegmentStore, segment: SegmentInfo
) -> None:
    hf3fs.pause(True)
    timer = threading.Timer(0.3, hf3fs.pause, [False])
    timer.start()

    assert read(store, locations(segment)).bad == {}
    timer.join(60)
    assert not timer.is_alive(), "the other thread has not ended within 60 s"


# --- writing ---


@pytest.mark.parametrize(
    ("kind", "value"),
    [("error", errno.ENOSPC), ("error", 4001), ("short", 1000), ("short", 0), ("prep", errno.ENOMEM)],
    ids=["ENOSPC", "3fs_status", "short", "nothing", "prepare"],
)
def test_a_failed_write_leaves_nothing_visible(hf3fs: Fake, store: FileSegmentStore, kind: str, value: int) -> None:
    """kv.md 8, bug 4."""
    hf3fs.fault(kind, value=value)

    with pytest.raises(StoreUnavailable, match="not stored"):
        store.publish(make_records("ab"))

    assert list(store.scan()) == []
    assert [path for path in Path(hf3fs.mount).rglob("*") if path.is_file() and path.name != "store-id"] == []
    assert store.counters()["publish_full"] == (value == errno.ENOSPC)
    assert read(store, locations(store.publish(make_records("ab")))).bad == {}
    assert hf3fs.count("registered") == hf3fs.count("deregistered")


def test_a_segment_is_synced_before_it_has_a_name(hf3fs: Fake, make_client: Callable[..., UsrbioClient]) -> None:
    """kv.md 3.2: a file's length is settled by HF3FS_IOC_FSYNC only."""
    seen: list[tuple[int, int]] = []

    def sync(fd: int) -> None:
        segments = len(list(Path(hf3fs.mount).rglob("*.seg")))
        seen.append((os.fstat(fd).st_size, segments))
        os.fsync(fd)

    store = open_store(hf3fs, make_client(sync=sync))
    segment = store.publish(make_records("ab"))

    assert seen == [(segment.num_bytes, 0)]


def test_a_failing_sync_publishes_nothing(hf3fs: Fake, make_client: Callable[..., UsrbioClient]) -> None:
    def sync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = open_store(hf3fs, make_client(sync=sync))

    with pytest.raises(StoreUnavailable, match="EIO"):
        store.publish(make_records("a"))

    assert list(store.scan()) == []


def test_lost_writes_refuse_publications_until_they_come(hf3fs: Fake, make_client: Callable[..., UsrbioClient]) -> None:
    store = open_store(hf3fs, make_client(deadline_seconds=0.2))
    hf3fs.fault("lose", times=2)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="ETIMEDOUT"):
            store.publish(make_records("a"))
    # Both write buffers belong to the daemon still.
    with pytest.raises(StoreUnavailable, match="EBUSY"):
        store.publish(make_records("a"))

    hf3fs.finish_lost()

    for _ in range(100):
        try:
            segment = store.publish(make_records("a"))
            break
        except StoreUnavailable:
            continue
    assert read(store, locations(segment)).bad == {}
    assert {info.name for info in store.scan()} == {segment.name}


def test_a_generation_is_removed_by_the_mount_itself_where_it_can(hf3fs: Fake, client: UsrbioClient) -> None:
    removals = Path(hf3fs.mount) / "3fs-virt" / "rm-rf"
    assert not client.remove_tree(f"{hf3fs.mount}/store")
    removals.mkdir()

    assert client.remove_tree(f"{hf3fs.mount}/store")

    (link,) = removals.iterdir()
    assert os.readlink(link) == os.path.realpath(f"{hf3fs.mount}/store")
