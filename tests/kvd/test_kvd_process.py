"""kvd as a process: its start, its socket, its end. What kills do is in test_kvd_kills.py."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import msgspec
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefill_engine.kvd.process import KvdOptions, run_kvd
from prefill_engine.rpc import kv_pb2 as pb
from prefill_engine.settings import HostIdentity
from prefill_plan.errors import ExitCode
from prefill_plan.kvd_config import KvdConfig
from prefill_testing.kvd_fakes import GEOMETRY, chain
from prefill_testing.kvd_process import DEADLINE_SECONDS, KvdProcess, RankClient, wait_until

KEYS = chain("k", 6)


@pytest.fixture
def kvd(tmp_path: Path) -> Iterator[KvdProcess]:
    process = KvdProcess(tmp_path)
    yield process
    process.kill()


def test_saved_blocks_are_served_and_survive_a_clean_restart_in_the_store(kvd: KvdProcess) -> None:
    rank = RankClient(kvd.socket)
    result = rank.save(KEYS, KEYS[-1:])
    assert (result.stored_blocks, result.held_snapshots, result.failure) == (6, 1, "")
    answer = rank.open(KEYS, want_snapshot=True)
    assert (answer.found_blocks, answer.snapshot) == (6, pb.OpenResponse.HELD)
    assert rank.read(answer, KEYS) == 6
    assert rank.close_leases(answer.lease_id, 4711).unknown == 1
    wait_until(lambda: rank.notices and rank.notices[-1].store_ok, "a notice")
    assert rank.notices[-1].transport == "tcp"
    assert kvd.metric('transport_info{kind="tcp",rdma="false"}') == 1
    rank.leave()
    assert kvd.stop() == 0

    (kvd.folder / "pool").unlink()
    kvd.start()
    rank = RankClient(kvd.socket, owner=2)
    found = []

    def is_announced() -> bool:
        found[:] = [rank.open(KEYS)]
        return found[0].found_blocks == 6

    wait_until(is_announced, "segments of the store in the directory")
    assert rank.read(found[0], KEYS) == 6
    rank.leave()


TOO_MANY = [
    ("Reserve", {"owner_epoch": 1, "num_snapshots": 2**32 - 1}, "num_snapshots = 4294967295, expected at most 64"),
    ("Reserve", {"owner_epoch": 1, "num_blocks": 2**32 - 1}, "num_blocks = 4294967295, expected at most 1024"),
    ("Open", {"owner_epoch": 1, "keys": bytes(32 * 65_537)}, "keys = 65537, expected at most 65536"),
    ("Open", {"owner_epoch": 1, "keys": bytes(33)}, "33 bytes of keys, 0 resident blocks: expected 32 bytes a key"),
    ("Open", {"owner_epoch": 1, "limit": Duration(seconds=-1)}, "limit = -1 s, expected 0"),
    ("Commit", {"blocks": [pb.CommitBlock(key=KEYS[0])] * 1025}, "blocks = 1025, expected at most 1024"),
    ("Commit", {"snapshots": [pb.CommitSnapshot(key=bytes(33))] * 65}, "snapshots = 65, expected at most 64"),
    ("Close", {"lease_ids": range(65_537)}, "lease_ids = 65537, expected at most 65536"),
    ("Close", {"reservation_ids": range(65_537)}, "reservation_ids = 65537, expected at most 65536"),
]


def test_call_that_asks_for_too_much_is_refused_with_value_and_limit_and_costs_nobody_anything(kvd: KvdProcess) -> None:
    rank = RankClient(kvd.socket)
    rank.save(KEYS, KEYS[-1:])
    types = {
        "Reserve": pb.ReserveSlotsRequest,
        "Open": pb.OpenRequest,
        "Commit": pb.CommitRequest,
        "Close": pb.CloseRequest,
    }
    for call, fields, text in TOO_MANY:
        with pytest.raises(grpc.RpcError) as caught:
            getattr(rank.stub, call)(types[call](**fields), timeout=DEADLINE_SECONDS)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, call
        assert text in caught.value.details()
    answer = rank.open(KEYS, want_snapshot=True)
    assert (answer.found_blocks, answer.snapshot) == (6, pb.OpenResponse.HELD), "nothing was evicted"
    rank.leave()


def test_commit_of_foreign_slots_names_a_few_of_them(kvd: KvdProcess) -> None:
    rank = RankClient(kvd.socket)
    reserved = rank.reserve(1)
    blocks = [pb.CommitBlock(key=KEYS[0], slot=slot) for slot in range(100, 1100)]
    with pytest.raises(grpc.RpcError, match=r"slots \[100, 101, .*107\] \(1000 in all\) are not of reservation"):
        rank.stub.Commit(
            pb.CommitRequest(reservation_id=reserved.reservation_id, blocks=blocks), timeout=DEADLINE_SECONDS
        )
    assert rank.close_leases(reserved.reservation_id).unknown == 0, "it holds its slots as before"
    rank.leave()


def test_session_that_abandons_too_many_calls_is_ended(kvd: KvdProcess) -> None:
    rank = RankClient(kvd.socket)
    rank.say(pb.SessionRequest(abandon=pb.SessionAbandon(call_ids=range(65_537))))
    wait_until(lambda: kvd.metric("sessions") == 0, "the end of the session")
    rank.leave()


def test_second_kvd_on_the_same_pool_or_socket_is_refused(kvd: KvdProcess, tmp_path: Path) -> None:
    for name in ("pool_path", "socket"):
        directory = tmp_path / name
        directory.mkdir()
        other = KvdProcess(directory, start=False, **{name: kvd.config[name]})
        other.start(expect_ready=False)
        assert other.exit_code() == 10
        assert f"another {'running ' if name == 'pool_path' else ''}kvd" in other.log.read_text()
    assert RankClient(kvd.socket).save(KEYS).stored_blocks == 6


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"store": {"kind": "file"}}, "store.path is empty"),
        ({"store": {"read_threads": 0}}, "store.read_threads = 0, expected 1 to 256"),
        ({"snapshot_bytes": 1 << 20}, "snapshot_bytes = 1048576, expected less than pool_bytes = 1048576"),
        ({"transport": {"kind": "tcp", "require_rdma": True}}, "never uses RDMA"),
        ({"required": True, "startup_timeout_seconds": 0.1, "fuse_config": "/no.toml"}, "hf3fs_fuse_main is not on"),
        (
            {"required": True, "startup_timeout_seconds": 0.1, "store": {"kind": "file", "path": "/proc/x"}},
            "store.path /proc/x can't be used",
        ),
        ({"socket": "/nowhere/kvd.sock"}, "there is no directory /nowhere"),
        ({"pool_path": "/dev/shm/kvd-test-too-big", "pool_bytes": 1 << 50}, "make /dev/shm larger"),
    ],
    ids=["store-path", "range", "snapshots", "rdma", "fuse", "required-store", "socket", "shm"],
)
def test_wrong_configuration_ends_with_exit_code_10(tmp_path: Path, setting: dict[str, object], text: str) -> None:
    sizes = {"pool_bytes": 1 << 20, "snapshot_bytes": 1 << 18}
    tree = {"socket": f"{tmp_path}/kvd.sock", "pool_path": f"{tmp_path}/pool", **sizes, **setting}
    identity = HostIdentity(engine_id="pod-1", pod_ip="", zone="", plan_hash="")
    ending = run_kvd(
        msgspec.convert(tree, KvdConfig), identity, KvdOptions(drain_seconds=1.0, announce=lambda _line: None)
    )
    assert ending.exit_code == ExitCode.CONFIG
    assert text in ending.detail
    assert not Path("/dev/shm/kvd-test-too-big").exists()


def test_wrong_setting_is_named_on_the_command_line(tmp_path: Path) -> None:
    kvd = KvdProcess(tmp_path, start=False, pool_bytes="much")
    kvd.start(expect_ready=False)
    assert kvd.exit_code() == 10
    assert kvd.log.read_text() == f"prefill-engine kv: {tmp_path}/kvd.json: pool_bytes: Expected int, got str\n"


def test_optional_store_that_is_away_does_not_stop_kvd(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no directory")
    kvd = KvdProcess(tmp_path, startup_timeout_seconds=0.2)
    health = health_pb2_grpc.HealthStub(grpc.insecure_channel(f"127.0.0.1:{kvd.facts['probe_port']}"))
    serving = health_pb2.HealthCheckResponse.SERVING
    assert health.Check(health_pb2.HealthCheckRequest(service="")).status == serving
    wait_until(lambda: health.Check(health_pb2.HealthCheckRequest(service="kvd")).status == serving, "started")
    rank = RankClient(kvd.socket)
    result = rank.save(KEYS)
    assert (result.stored_blocks, result.failure) == (0, "the store is away")
    assert rank.read(rank.open(KEYS), KEYS) == 6
    (tmp_path / "store").unlink()
    wait_until(lambda: rank.notices and rank.notices[-1].store_ok, "the store to come back")
    assert rank.save(chain("n", 2)).stored_blocks == 2
    rank.leave()
    assert kvd.stop() == 0


def open_to_others(kvd: KvdProcess) -> None:
    """File modes let everybody in, so that only kvd itself can keep them out."""
    os.chmod(kvd.socket, 0o666)
    for path in (kvd.folder, *kvd.folder.parents):
        if path == Path(tempfile.gettempdir()):
            break
        path.chmod(0o755)


def test_socket_is_closed_to_other_users(kvd: KvdProcess) -> None:
    assert stat.S_IMODE(os.stat(kvd.socket).st_mode) == 0o600
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    open_to_others(kvd)
    program = (
        "import os, sys, grpc\n"
        "from prefill_engine.rpc import kv_pb2, kv_pb2_grpc\n"
        "os.setuid(65534)\n"
        "stub = kv_pb2_grpc.KvdStub(grpc.insecure_channel('unix:' + sys.argv[1]))\n"
        "try:\n"
        "    list(stub.Session(iter([kv_pb2.SessionRequest(hello=kv_pb2.SessionHello(protocol=1, owner_epoch=5))])))\n"
        "except grpc.RpcError as error:\n"
        "    print(error.code().name, error.details())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, kvd.socket], capture_output=True, text=True, check=False, timeout=60
    )
    assert "PERMISSION_DENIED" in done.stdout or "UNAVAILABLE" in done.stdout, done
    wait_until(lambda: '"uid": 65534' in kvd.log.read_text(), "a line in the log")
    assert RankClient(kvd.socket).save(KEYS).stored_blocks == 6


def test_silent_connection_of_another_user_is_shut(kvd: KvdProcess) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    open_to_others(kvd)
    program = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "while s.recv(4096): pass\n"
        "print('shut')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, kvd.socket], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "shut\n", done


def test_log_lines_are_json_without_keys(kvd: KvdProcess) -> None:
    rank = RankClient(kvd.socket)
    rank.save(KEYS)
    rank.leave()
    assert kvd.stop() == 0
    text = kvd.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["service"] for line in lines} == {"kvd"}
    assert {"rank attached", "kvd ready", "draining ended"} <= {line["message"] for line in lines}
    assert KEYS[0].hex() not in text


def test_geometry_of_another_model_is_refused_while_leases_live(kvd: KvdProcess) -> None:
    rank = RankClient(kvd.socket)
    rank.save(KEYS)
    rank.open(KEYS)
    with pytest.raises(grpc.RpcError) as caught:
        RankClient(
            kvd.socket,
            owner=2,
            geometry=type(GEOMETRY)(
                layout_digest=bytes(32),
                header_bytes=GEOMETRY.header_bytes,
                payload_bytes=GEOMETRY.payload_bytes,
                record_bytes=GEOMETRY.record_bytes,
                group_bytes=GEOMETRY.group_bytes,
                snapshot_payload_bytes=GEOMETRY.snapshot_payload_bytes,
            ),
        )
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert rank.read(rank.open(KEYS), KEYS) == 6
    rank.leave()
