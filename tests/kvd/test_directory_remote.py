"""RemoteDirectory against a service in this process: what travels, who is fenced, and what a caller notices of failures."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefill_engine.kv.directory import Holder
from prefill_engine.kv.segments import BlockLocation, SegmentInfo
from prefill_engine.kvd.directory_client import RemoteDirectory
from prefill_engine.kvd.directory_local import LocalDirectory, new_local_state
from prefill_engine.kvd.directory_messages import runs_to_locations
from prefill_engine.kvd.directory_server import DirectoryServer
from prefill_engine.kvd.directory_service import DIRECTORY_SERVICE, DirectoryService
from prefill_engine.kvd.directory_state import DirectoryLimits, DirectoryState
from prefill_engine.rpc import directory_pb2 as pb
from prefill_engine.rpc import directory_pb2_grpc
from prefill_plan.block_keys import BlockKey, snapshot_key
from prefill_plan.config import TlsConfig
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import DirectoryConfig
from prefill_testing.certificates import make_tls
from prefill_testing.in_loop import in_loop
from prefill_testing.raw_peer import until

_LAYOUT = b"layout-1"
_HEARTBEAT = 0.1


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def snapshot(number: int) -> bytes:
    return snapshot_key(key(number))


class Rig:
    """A directory service and the kvds that joined it. have: snapshots that each kvd serves."""

    def __init__(self, tls: TlsConfig) -> None:
        self.tls = tls
        self.state = DirectoryState(DirectoryLimits(expiry_seconds=1.0))
        self.port = 0
        self.have: dict[str, set[bytes]] = {}
        self.resyncs: list[str] = []
        self.clients: list[RemoteDirectory] = []

    def client(
        self, name: str, *, epoch: int = 1, zone: str = "", seconds: float = 5.0, tls: TlsConfig | None = None
    ) -> RemoteDirectory:
        self.have.setdefault(name, set())
        client = RemoteDirectory(
            DirectoryConfig(address=f"127.0.0.1:{self.port}", deadline_seconds=seconds),
            Holder(holder_id=name, epoch=epoch, endpoint=f"{name}:{epoch}", zone=zone),
            snapshot_keys=lambda: list(self.have[name]),
            on_resync=lambda: self.resyncs.append(name),
            tls=tls or self.tls,
        )
        self.clients.append(client)
        return client

    async def joined(self, name: str, **options: Any) -> RemoteDirectory:
        client = self.client(name, **options)
        await until(lambda: client.is_joined)
        return client

    def counts(self) -> tuple[int, int]:
        counts = self.state.counts()
        return counts.holders, counts.snapshots


@asynccontextmanager
async def rig_with(tls: TlsConfig | None = None) -> AsyncIterator[Rig]:
    rig = Rig(tls or TlsConfig())
    service = DirectoryService(
        rig.state, heartbeat_seconds=_HEARTBEAT, expiry_seconds=1.0, epoch=7, count=lambda _method: None
    )
    server = DirectoryServer(service)
    rig.port = await server.start("127.0.0.1", 0, tls=rig.tls)
    try:
        yield rig
    finally:
        for client in rig.clients:
            await client.close()
        await server.close()


@in_loop
async def test_blocks_travel_as_runs_and_come_back_in_order() -> None:
    async with rig_with() as rig:
        a, b = await rig.joined("a"), await rig.joined("b")
        segments = [
            SegmentInfo(name="h/1.seg", layout_id=_LAYOUT, keys=tuple(key(n) for n in range(24)), num_bytes=9),
            SegmentInfo(name="h/2.seg", layout_id=_LAYOUT, keys=(key(24),), num_bytes=9),
        ]
        await a.publish_segments("store", segments)
        found = await b.lookup_blocks("store", _LAYOUT, [key(n) for n in range(30)])
        assert found == (
            *(BlockLocation(segment="h/1.seg", record=n) for n in range(24)),
            BlockLocation(segment="h/2.seg", record=0),
        )
        await a.withdraw_segments("store", ["h/1.seg"])
        assert await b.lookup_blocks("store", _LAYOUT, [key(0)]) == ()
        assert len(await b.lookup_blocks("store", _LAYOUT, [key(24)])) == 1


@in_loop
async def test_snapshots_are_announced_found_by_others_and_withdrawn() -> None:
    async with rig_with() as rig:
        rig.have["a"] = {snapshot(1)}
        a, b, c = await rig.joined("a", zone="x"), await rig.joined("b", zone="y"), await rig.joined("c", zone="y")
        await b.publish_snapshots([snapshot(1), snapshot(2)])
        await until(lambda: rig.counts() == (3, 3))
        found = await c.lookup_snapshot(snapshot(1))
        assert [one.holder.endpoint for one in found] == ["b:1", "a:1"]
        assert found[0].holder.transports == ("tcp",)
        assert [one.holder.holder_id for one in await b.lookup_snapshot(snapshot(1))] == ["a"]
        rig.have["a"].clear()
        await a.withdraw_snapshots([snapshot(1)])
        assert [one.holder.holder_id for one in await c.lookup_snapshot(snapshot(1))] == ["b"]
        await b.close()
        await until(lambda: rig.counts()[1] == 0)


@in_loop
async def test_locations_that_fail_are_withdrawn_for_everybody() -> None:
    async with rig_with() as rig:
        rig.have["a"] = {snapshot(1), snapshot(2)}
        await rig.joined("a")
        b, c = await rig.joined("b"), await rig.joined("c")
        await until(lambda: rig.counts()[1] == 2)
        (location,) = await b.lookup_snapshot(snapshot(1))
        for _ in range(3):
            await b.report_failure(location)
        assert await b.lookup_snapshot(snapshot(1)) == ()
        assert await c.lookup_snapshot(snapshot(1)) == ()
        assert len(await c.lookup_snapshot(snapshot(2))) == 1
        a = rig.clients[0]
        beats = a.counters["resyncs"]
        await asyncio.sleep(4 * _HEARTBEAT)
        assert a.counters["resyncs"] == beats, (
            "a withdrawal by a peer must not make the holder announce everything again"
        )


@in_loop
async def test_an_older_incarnation_is_fenced_and_stays_quiet() -> None:
    async with rig_with() as rig:
        rig.have["a"] = {snapshot(1)}
        old = await rig.joined("a", epoch=1)
        new = await rig.joined("a", epoch=2)
        b = await rig.joined("b")
        await until(lambda: old.counters["fenced"] == 1)
        await old.publish_snapshots([snapshot(9)])
        assert await b.lookup_snapshot(snapshot(9)) == ()
        assert [one.holder.endpoint for one in await b.lookup_snapshot(snapshot(1))] == ["a:2"]
        late = rig.client("a", epoch=1)
        await until(lambda: late.counters["fenced"] == 1)
        assert (new.is_joined, late.is_joined, new.counters["fenced"]) == (True, False, 0)


@in_loop
async def test_what_the_directory_forgot_is_announced_again() -> None:
    async with rig_with() as rig:
        rig.have["a"] = {snapshot(number) for number in range(20)}
        await rig.joined("a")
        b = await rig.joined("b")
        await until(lambda: rig.counts() == (2, 20))
        rig.state.sweep(now=time.monotonic() + 100.0)
        assert rig.counts() == (0, 0)
        await until(lambda: rig.counts() == (2, 20) and b.is_joined)
        assert len(await b.lookup_snapshot(snapshot(3))) == 1
        assert rig.resyncs == ["a", "b"]


@in_loop
async def test_segments_nobody_could_be_told_of_are_announced_when_the_directory_is_back() -> None:
    """The same incarnation of it: it has forgotten nothing, it never knew."""
    async with rig_with() as rig:
        client = await rig.joined("a")
        assert rig.resyncs == ["a"]
        client.is_joined = False
        await client.publish_segments(
            "store", [SegmentInfo(name="h/1.seg", layout_id=_LAYOUT, keys=(key(1),), num_bytes=9)]
        )
        await until(lambda: rig.resyncs == ["a", "a"])
        client.is_joined = False
        await client.publish_snapshots([snapshot(1)])
        await until(lambda: client.counters["joins"] == 3)
        assert rig.resyncs == ["a", "a"]


@in_loop
async def test_withdrawal_that_did_not_arrive_is_said_when_the_directory_is_back() -> None:
    """The same incarnation of it: it would name a deleted segment for ever."""
    async with rig_with() as rig:
        a, b = await rig.joined("a"), await rig.joined("b")
        segment = SegmentInfo(name="h/1.seg", layout_id=_LAYOUT, keys=(key(1),), num_bytes=9)
        await a.publish_segments("store", [segment])
        assert len(await b.lookup_blocks("store", _LAYOUT, [key(1)])) == 1
        a.is_joined = False
        await a.withdraw_segments("store", ["h/1.seg"])
        async with asyncio.timeout(20):
            while await b.lookup_blocks("store", _LAYOUT, [key(1)]):
                await asyncio.sleep(0.01)


@in_loop
async def test_join_that_hangs_holds_up_no_announcement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen directory: write-back waits for its announcements."""
    monkeypatch.setattr("prefill_engine.kvd.directory_client._TELL_SECONDS", 120.0)
    rig = Rig(TlsConfig())
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        frozen.setblocking(False)
        rig.port = frozen.getsockname()[1]
        client = rig.client("a")
        async with asyncio.timeout(20):
            connection, _ = await asyncio.get_running_loop().sock_accept(frozen)
            await client.publish_segments("store", [])
            await client.publish_snapshots([snapshot(1)])
            await client.withdraw_snapshots([snapshot(1)])
            await client.withdraw_segments("store", ["s"])
        assert client.counters["skipped"] == 3
        await client.close()
        connection.close()


@in_loop
async def test_churn_leaves_exactly_what_is_held() -> None:
    async with rig_with() as rig:
        a = await rig.joined("a")

        async def churn(start: int) -> None:
            for number in range(start, start + 40):
                rig.have["a"].add(snapshot(number))
                await a.publish_snapshots([snapshot(number)])
                if number % 3:
                    rig.have["a"].discard(snapshot(number))
                    await a.withdraw_snapshots([snapshot(number)])
                if number % 20 == 7:
                    rig.state.sweep(now=time.monotonic() + 100.0)

        await asyncio.gather(churn(0), churn(100), churn(200))
        await until(lambda: rig.counts() == (1, len(rig.have["a"])))
        for number in (*range(40), *range(100, 140), *range(200, 240)):
            found = rig.state.lookup_snapshots([snapshot(number)], prefer_zone="", now=time.monotonic())
            assert bool(found) is (snapshot(number) in rig.have["a"]), number


@in_loop
async def test_without_a_directory_every_call_is_a_quick_nothing() -> None:
    rig = Rig(TlsConfig())
    rig.port = 1
    client = rig.client("a", seconds=0.05)
    try:
        await until(lambda: client.counters["failed"] > 0)
        assert await client.lookup_blocks("store", _LAYOUT, [key(1)]) == ()
        assert await client.lookup_snapshot(snapshot(1)) == ()
        await client.publish_snapshots([snapshot(1)])
        await client.withdraw_snapshots([snapshot(1)])
        await client.publish_segments("store", [])
        await client.withdraw_segments("store", ["s"])
        assert client.counters["skipped"] >= 5
        assert client.counters["calls"] == 0
    finally:
        await client.close()


@pytest.mark.parametrize("trust", ["same authority", "another authority", "plain"])
@in_loop
async def test_mutual_tls_decides_who_joins(trust: str, tmp_path: Path) -> None:
    ours = make_tls(tmp_path)
    theirs = {
        "same authority": make_tls(tmp_path, name="other"),
        "another authority": make_tls(tmp_path, authority="stranger"),
        "plain": TlsConfig(),
    }[trust]
    async with rig_with(ours) as rig:
        client = rig.client("a", tls=theirs)
        if trust == "same authority":
            await until(lambda: client.is_joined)
        else:
            await until(lambda: client.counters["failed"] >= 1)
            assert (client.is_joined, rig.counts()) == (False, (0, 0))


def test_tls_files_that_cannot_be_read_are_a_configuration_error(tmp_path: Path) -> None:
    broken = TlsConfig(certificate=str(tmp_path / "absent"), key="k", authority="a")
    with pytest.raises(ConfigError, match="absent"):
        Rig(broken).client("a")


WRONG = {
    "no holder id": ("Join", pb.JoinRequest(holder=pb.Holder(epoch=1, endpoint="a:1"))),
    "no endpoint": ("Join", pb.JoinRequest(holder=pb.Holder(holder_id="x", epoch=1))),
    "short snapshot key": ("PublishSnapshots", pb.PublishSnapshotsRequest(holder_id="a", epoch=1, keys=[b"x"])),
    "half a block key": ("LookupBlocks", pb.LookupBlocksRequest(store_id="s", keys=bytes(40))),
    "too many keys": ("LookupBlocks", pb.LookupBlocksRequest(store_id="s", keys=bytes(32 * 8193))),
    "an empty segment": ("PublishSegment", pb.PublishSegmentRequest(segments=[pb.Segment(name="s")])),
    "33 records": ("PublishSegment", pb.PublishSegmentRequest(segments=[pb.Segment(name="s", keys=bytes(32 * 33))])),
    "a segment without a name": ("PublishSegment", pb.PublishSegmentRequest(segments=[pb.Segment(keys=bytes(32))])),
}


@pytest.mark.parametrize("name", WRONG)
@in_loop
async def test_wrong_messages_are_refused(name: str) -> None:
    method, request = WRONG[name]
    async with rig_with() as rig, grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
        stub = directory_pb2_grpc.DirectoryStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stub, method)(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert rig.counts() == (0, 0)


@in_loop
async def test_health_says_serving() -> None:
    async with rig_with() as rig, grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", DIRECTORY_SERVICE):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_run_never_answers_more_than_was_asked() -> None:
    runs = [pb.BlockRun(segment="s", first_record=3, num_records=2**31)]
    found = runs_to_locations(runs, limit=2)
    assert found == (BlockLocation(segment="s", record=3), BlockLocation(segment="s", record=4))


@in_loop
async def test_local_directories_of_one_state_see_each_other() -> None:
    state = new_local_state()
    a, b = (
        LocalDirectory(state, Holder(holder_id=name, epoch=1, endpoint=f"{name}:1"), clock=lambda: 5.0) for name in "ab"
    )
    await a.publish_snapshots([snapshot(1)])
    (location,) = await b.lookup_snapshot(snapshot(1))
    assert location.holder.endpoint == "a:1"
    assert await a.lookup_snapshot(snapshot(1)) == ()
    segment = SegmentInfo(name="s", layout_id=_LAYOUT, keys=(key(1),), num_bytes=1)
    await a.publish_segments("store", [segment])
    assert await b.lookup_blocks("store", _LAYOUT, [key(1)]) == (BlockLocation(segment="s", record=0),)
    for _ in range(3):
        await b.report_failure(location)
    assert await b.lookup_snapshot(snapshot(1)) == ()
    await a.publish_snapshots([snapshot(2)])
    await a.close()
    assert await b.lookup_snapshot(snapshot(2)) == ()
