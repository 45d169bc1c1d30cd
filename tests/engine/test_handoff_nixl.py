"""A rank's hand-overs over nixl, on a fake of its library: what decode peers read of a ticket that ends meanwhile, and a push
whose engine vanishes in mid-write."""

import asyncio
import ctypes
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from prefill_engine.client_ticket import PeerPlace, ticket_from_proto
from prefill_engine.front.load import LoadBoard
from prefill_engine.front.telemetry import Telemetry
from prefill_engine.handoff_pieces import PIECE_BYTES, ComponentKey
from prefill_engine.handoff_sink import DecodeSink
from prefill_engine.kv.transport import nixl_agent
from prefill_engine.kv.transport.contract import PullOutcome, PullState
from prefill_engine.kv.transport.nixl import NixlTransport, StagingSize
from prefill_engine.kv.transport.tcp import TcpTransport
from prefill_engine.messages import Expose, PushReport
from prefill_engine.metrics import Metrics
from prefill_engine.peer_pull import pull_component
from prefill_engine.rank.courier import Courier
from prefill_engine.rank.data_port import open_data_transport
from prefill_engine.rank.read_server import Component, ReadServer
from prefill_engine.rpc import common_pb2
from prefill_engine.rpc.convert import format_message
from prefill_engine.sink_grants import SinkState
from prefill_engine.takeover import DecodeSide, take_over
from prefill_engine.takeover_way import TakeOverWay, _open_transport
from prefill_plan.config import HandoffConfig, TransportKind
from prefill_plan.errors import BlockCorrupt, CallFailed, ConfigError
from prefill_plan.kvd_config import TransportConfig
from prefill_plan.model_spec import load_model_spec
from prefill_testing.engine_rig import engine_rig, prefill_request, tiny_config
from prefill_testing.fake_nixl import FakeFabric, FakeLibrary
from prefill_testing.fake_rank import REGIONS, component_bytes, ready_message, tiny_served_model
from prefill_testing.fake_transport import FakeNetwork, FakeTransport
from prefill_testing.in_loop import in_loop
from prefill_testing.raw_peer import until
from prefill_testing.rpc_calls import next_of

CONFIG = TransportConfig(kind=TransportKind.NIXL, host="127.0.0.1")
STAGING = StagingSize(num_bytes=8 * PIECE_BYTES, window_bytes=PIECE_BYTES)
ATTEMPT, KEY = b"a" * 16, b"k" * 32
LENGTH = 3 * PIECE_BYTES + 77
DATA = (bytes(range(1, 252)) * (LENGTH // 251 + 1))[:LENGTH]


@dataclass
class Rank:
    """memory: of the pool, whose bytes a hand-over refers to until it ends."""

    fabric: FakeFabric
    courier: Courier
    reads: ReadServer
    memory: bytearray

    @property
    def place(self) -> PeerPlace:
        return PeerPlace(kind="nixl", endpoint=f"127.0.0.1:{self.courier.port}", key=KEY, piece_bytes=PIECE_BYTES)

    def end_hand_over(self) -> None:
        """As settled, aborted or expired: its memory belongs to others at once."""
        self.reads.close(ATTEMPT)
        self.memory[:] = bytes(LENGTH)


def start_rank(fabric: FakeFabric, *, open_hand_over: bool = True) -> Rank:
    courier = Courier(
        lambda: NixlTransport(CONFIG, library=FakeLibrary(fabric), staging=STAGING),
        piece_seconds=30.0,
        report=lambda _report: None,
        wake=lambda: None,
    )
    rank = Rank(fabric, courier, ReadServer(courier), bytearray(DATA))
    courier.start(rank.reads.find)
    if open_hand_over:
        rank.reads.open(ATTEMPT, [Component(kind=1, pieces=[memoryview(rank.memory)])])
        rank.reads.expose(Expose(read_id=1, attempt_id=ATTEMPT, keys=(ComponentKey(kind=1, key=KEY),)))
    return rank


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = start_rank(FakeFabric())
    yield made
    made.fabric.land()
    made.courier.stop()


async def pull(rank: Rank, *, during: str = "") -> bytes:
    """As a decode peer. during: "ended" = the hand-over ends while READs are under way, "torn" = what they read changes."""
    near = NixlTransport(CONFIG, library=FakeLibrary(rank.fabric))
    try:
        rank.fabric.hold = bool(during)
        pulling = asyncio.create_task(
            pull_component(near, rank.place, num_bytes=LENGTH, name="BLOCK_KV", piece_seconds=30.0)
        )
        if during:
            await until(lambda: rank.fabric.under_way or pulling.done())
        if during == "ended":
            rank.end_hand_over()
        if during == "torn":
            window = next(iter(rank.fabric.under_way)).far[0]
            ctypes.memset(window + 5, 0, 1)
        rank.fabric.land()
        return await pulling
    finally:
        await near.close()


@in_loop
async def test_component_comes_out_of_windows_and_the_pool_is_never_registered(rank: Rank) -> None:
    assert await pull(rank) == DATA
    assert rank.fabric.registered("owner") == [8 * PIECE_BYTES]
    assert rank.reads.counters()["data_served"] == 5
    assert rank.courier.kind == "nixl-ucx-tcp"


@in_loop
async def test_hand_over_that_ends_under_a_read_waits_for_nobody_and_is_discarded(rank: Rank) -> None:
    """The READ lands what was copied before, whatever the pool holds now; the next piece is absent."""
    with pytest.raises(CallFailed, match="absent") as error:
        await pull(rank, during="ended")
    assert error.value.reason == "TICKET_GONE"


@in_loop
async def test_torn_window_is_found_by_the_checksums(rank: Rank) -> None:
    with pytest.raises(BlockCorrupt, match=r"piece \d of 4"):
        await pull(rank, during="torn")


@in_loop
async def test_rank_of_a_later_epoch_knows_no_key_of_the_former(rank: Rank) -> None:
    later = start_rank(rank.fabric, open_hand_over=False)
    try:
        with pytest.raises(CallFailed, match="absent"):
            await pull(later)
    finally:
        later.courier.stop()


@in_loop
async def test_sink_gets_its_memory_back_from_an_engine_that_vanished_in_mid_write() -> None:
    fabric = FakeFabric()
    served = tiny_served_model(tiny_config())
    kv_format = format_message(served.format)
    engine = NixlTransport(CONFIG, library=FakeLibrary(fabric), staging=STAGING)
    sink_side = NixlTransport(CONFIG, library=FakeLibrary(fabric))
    attempt = common_pb2.AttemptKey(request_id="r", attempt=1, attempt_id=ATTEMPT)
    async with DecodeSink(sink_side, kv_format, engine_id="d") as sink:
        free = sink.grants.free_bytes
        target = await sink.reserve(attempt, kv_tokens=300, ttl_seconds=600.0)
        assert target is not None
        region = next(part.region for part in target.regions if part.kind == 1)
        reservation = sink.grants.find(target.grant_id)
        assert (region.peer.kind, reservation is not None) == ("nixl", True)
        assert reservation is not None
        room = reservation.rooms[1]
        fabric.hold = True
        piece = room.pieces[0]
        data = memoryview(bytes([7]) * (piece.end - piece.start))
        push = engine.push(region.peer.endpoint, piece.key, data, deadline_seconds=30.0)
        pushing = asyncio.create_task(push)
        await until(lambda: fabric.under_way)
        sink.grants.abandon(target.grant_id, writes_drained=False, now=time.monotonic())
        pushing.cancel()  # its connection ends, its WRITE does not
        await asyncio.gather(pushing, return_exceptions=True)
        await until(lambda: reservation.state is SinkState.QUARANTINED)
        assert sink.grants.free_bytes < free
        await until(lambda: reservation.state is SinkState.FREED)
        assert (fabric.land(), sink.grants.free_bytes, set(room.memory)) == (0, free, {0})
    await engine.close()


class Busy(FakeTransport):
    """The source has no window free."""

    async def pull(self, endpoint: str, key: bytes, target: memoryview, *, deadline_seconds: float) -> PullOutcome:
        return PullOutcome(state=PullState.BUSY, reason="refused: no_window", seconds=0.0, settled=lambda: True)


@in_loop
async def test_what_a_busy_source_does_not_show_is_read_by_grpc_and_counted() -> None:
    """And agents that have different devices below them understand each other."""
    async with engine_rig(tiny_config(), data_port=7001, data_transport="nixl") as rig:
        call = rig.stub.Prefill(prefill_request())
        ticket = ticket_from_proto((await next_of(call, "ticket")).ticket)
        side = DecodeSide(transport=Busy(FakeNetwork(), kind="nixl-ucx-rdma"), required=True)
        taken = await take_over(ticket, endpoint=f"127.0.0.1:{rig.port}", side=side)
        call.cancel()
    assert (taken.transport, taken.num_fallbacks) == ("nixl", len(REGIONS))
    assert taken.components == {region.kind: component_bytes(region.kind) for region in REGIONS}


@pytest.mark.parametrize(
    ("handoff", "message"),
    [
        (HandoffConfig(transport=TransportKind.NIXL), "handoff.transport nixl.*nixl_cu12.*pip install --no-deps nixl"),
        (HandoffConfig(transport=TransportKind.NIXL, staging_bytes=PIECE_BYTES - 1), "staging_bytes 1048575.*1048576"),
        (HandoffConfig(transport=TransportKind.NIXL, require_rdma=True), "require_rdma True.*no RDMA device"),
        (HandoffConfig(require_rdma=True), "handoff.transport tcp, require_rdma True.*never uses RDMA"),
    ],
    ids=["not-installed", "no-window", "no-device", "tcp"],
)
def test_data_port_that_can_not_be_had_is_an_error_and_never_another_transport(
    handoff: HandoffConfig, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_agent, "LIBRARIES", ("nixl_cu12_that_is_not_there",))
    with pytest.raises(ConfigError, match=message):
        open_data_transport(tiny_config(handoff=handoff), dp_rank=0, device_root=tmp_path)


def test_error_of_the_data_port_reaches_whoever_starts_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "LIBRARIES", ("nixl_cu12_that_is_not_there",))
    config = tiny_config(handoff=HandoffConfig(transport=TransportKind.NIXL))
    reported: list[PushReport] = []
    courier = Courier(
        lambda: open_data_transport(config, dp_rank=0),
        piece_seconds=1.0,
        report=reported.append,
        wake=threading.Event().set,
    )
    with pytest.raises(ConfigError, match="pip install"):
        courier.start(lambda _key: None)
    courier.stop()


@pytest.mark.parametrize(
    ("transport", "mode", "offered", "expected"),
    [
        ("auto", "pull", ("nixl", "stream"), "grpc"),
        ("auto", "push", ("nixl", "stream"), "error"),
        ("auto", "pull", ("tcp", "stream"), "tcp"),
        ("auto", "push", ("tcp", "stream"), "tcp"),
        ("nixl", "pull", ("nixl", "stream"), "error"),
        ("tcp", "pull", ("nixl", "stream"), "tcp"),
        ("grpc", "pull", ("nixl", "stream"), "grpc"),
    ],
)
@in_loop
async def test_decode_peer_without_nixl_falls_back_only_where_it_may(
    monkeypatch: pytest.MonkeyPatch, transport: str, mode: str, offered: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setattr(nixl_agent, "LIBRARIES", ("nixl_cu12_that_is_not_there",))
    kv_format = format_message(tiny_served_model(tiny_config()).format)
    way = TakeOverWay(mode=mode, transport=transport, model=None, store=None, kv_format=kv_format, offered=offered)
    if expected == "error":
        with pytest.raises(ConfigError, match="pip install"):
            await _open_transport(way, "127.0.0.1")
        return
    opened = await _open_transport(way, "127.0.0.1")
    assert (opened.kind if opened is not None else "grpc") == expected


def test_tcp_is_what_nothing_says() -> None:
    transport = open_data_transport(tiny_config(), dp_rank=0)
    assert (type(transport), transport.kind) == (TcpTransport, "tcp")


@pytest.mark.parametrize(
    ("kind", "rdma"), [("tcp", "false"), ("nixl-ucx-rdma", "true"), ("nixl+tls-ucx-any", "unproven")]
)
def test_metric_says_what_the_data_port_moves_bytes_by(kind: str, rdma: str) -> None:
    registry = CollectorRegistry()
    board = LoadBoard(num_ranks=1, chunk_rows=100, epoch=1, started=0.0)
    config = tiny_config()
    ready = ready_message(0, load_model_spec(Path(config.model.path)), config, data_port=7)
    Telemetry(Metrics(registry), board, started=0.0).rank_ready(replace(ready, data_transport_kind=kind))
    labels = {"rank": "0", "kind": kind, "rdma": rdma}
    assert registry.get_sample_value("kv_handoff_transport_info", labels) == 1
