"""3FS's FUSE process is started again under a running kvd: its rings are dead, and the link to the store makes new ones."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from prefill_engine.kv.directory import Holder
from prefill_engine.kv.segments import SegmentInfo, SegmentStore
from prefill_engine.kv.usrbio import UsrbioClient
from prefill_engine.kvd.breaker import Renewal
from prefill_engine.kvd.build import StoreMaker
from prefill_engine.kvd.directory_local import LocalDirectory, new_local_state
from prefill_engine.kvd.fuse_mount import FuseMount
from prefill_engine.kvd.store_link import StoreLink
from prefill_testing.in_loop import in_loop
from prefill_testing.keeper_rig import until
from prefill_testing.kvd_fakes import GEOMETRY, FakeStore
from prefill_testing.segments import Reading, locations, make_records, read
from prefill_testing.usrbio_rig import Fake, config_of


def maker_of(fake: Fake) -> StoreMaker:
    return StoreMaker(config_of(fake), make_client=partial(UsrbioClient, sync=os.fsync, deadline_seconds=1.0))


def new_directory() -> LocalDirectory:
    return LocalDirectory(
        new_local_state(), Holder(holder_id="me", epoch=1, endpoint="127.0.0.1:1"), clock=time.monotonic
    )


@asynccontextmanager
async def linked(maker: StoreMaker, *, renew_seconds: float) -> AsyncIterator[StoreLink]:
    link = StoreLink(
        maker.open,
        new_directory(),
        forget_medium=maker.forget_mount,
        renewal=Renewal(first_seconds=renew_seconds, last_seconds=renew_seconds, clock=time.monotonic),
        collect_seconds=0.02,
    )
    link.start(GEOMETRY)
    try:
        yield link
    finally:
        await link.stop()
        link.close()
        await asyncio.to_thread(maker.forget_mount())


async def reader_of(link: StoreLink) -> SegmentStore:
    """Once a read may be tried."""
    found: list[SegmentStore] = []

    def is_there() -> bool:
        store = link.reader()
        found.extend([store] if store is not None else [])
        return bool(found)

    await until(is_there)
    return found[0]


async def publish(store: SegmentStore) -> SegmentInfo:
    return await asyncio.to_thread(store.publish, make_records("abc"))


async def try_read(link: StoreLink, segment: SegmentInfo) -> Reading:
    """As the keeper reads, with its notes."""
    store = await reader_of(link)
    reading = await asyncio.to_thread(read, store, locations(segment))
    link.note_read(not reading.bad)
    return reading


def ring_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("usrbio-")}


@in_loop
async def test_a_mount_of_somebody_else_that_came_back_gets_new_rings_when_reads_go_on_failing(hf3fs: Fake) -> None:
    others = ring_threads()
    async with linked(maker_of(hf3fs), renew_seconds=0.1) as link:
        first = await reader_of(link)
        segment = await publish(first)
        assert (await try_read(link, segment)).bad == {}
        assert len(ring_threads() - others) == 4

        hf3fs.restart()

        assert (await try_read(link, segment)).bad == dict.fromkeys(range(3), "io")
        async with asyncio.timeout(40):
            while (await try_read(link, segment)).bad:
                pass
        assert await reader_of(link) is not first
        assert link.is_up
        # The dead rings' threads have ended.
        await until(lambda: len(ring_threads() - others) == 4)


@in_loop
async def test_rings_that_die_before_the_store_was_opened_are_given_up_too(hf3fs: Fake) -> None:
    maker = maker_of(hf3fs)
    await asyncio.to_thread(maker.check)
    hf3fs.restart()

    async with linked(maker, renew_seconds=0.1) as link:
        segment = await publish(await reader_of(link))
        assert (await try_read(link, segment)).bad == {}


@in_loop
async def test_a_client_of_our_own_that_was_started_again_gets_new_rings_at_once(hf3fs: Fake, tmp_path: Path) -> None:
    """FuseMount tells the link, before any read has failed."""
    others = ring_threads()
    async with linked(maker_of(hf3fs), renew_seconds=1000.0) as link:
        first = await reader_of(link)
        segment = await publish(first)
        mount = fuse_mount(tmp_path, link.reopen)
        await mount.start(seconds=30)
        hf3fs.restart()
        (tmp_path / "mnt/mounted").unlink()
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        await until(lambda: link.reader() not in (None, first))

        assert (await try_read(link, segment)).bad == {}
        await until(lambda: len(ring_threads() - others) == 4)
        (tmp_path / "mnt/mounted").unlink()
        await mount.stop()


def fuse_mount(tmp_path: Path, on_remount: Callable[[], None]) -> FuseMount:
    """With a client that "mounts" by making a file."""
    client, config = tmp_path / "client", tmp_path / "fuse.toml"
    client.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid; touch {tmp_path}/mnt/mounted; exec sleep 600\n")
    client.chmod(0o755)
    config.write_text(f'mountpoint = "{tmp_path}/mnt"\n')
    return FuseMount(
        config, on_remount=on_remount, binary=str(client), is_mounted=lambda path: Path(f"{path}/mounted").exists()
    )


@in_loop
async def test_a_medium_without_rings_stays_open_while_it_fails() -> None:
    openings: list[object] = []
    collections: list[int] = []

    class CountingStore(FakeStore):
        def collect(self, *, withdraw: Callable[[Sequence[str]], None], announce: object = None) -> int:
            collections.append(1)
            return super().collect(withdraw=withdraw, announce=announce)

    def open_store(geometry: object) -> SegmentStore:
        openings.append(geometry)
        return CountingStore()

    renewal = Renewal(first_seconds=0.0, last_seconds=0.0, clock=time.monotonic)
    link = StoreLink(open_store, new_directory(), renewal=renewal, collect_seconds=0.01)
    link.start(GEOMETRY)
    await reader_of(link)
    for _ in range(3):
        link.note_read(False)
    assert not link.is_up
    seen = len(collections)
    await until(lambda: len(collections) > seen + 3)
    await link.stop()
    link.close()

    assert len(openings) == 1
