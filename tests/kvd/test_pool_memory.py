import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prefill_engine.kv.lease_record import LeaseState, SnapshotState
from prefill_engine.kv.pool_memory import NUM_LEASES, RECORDS_OFFSET, PoolGeometry, PoolMemory
from prefill_plan.errors import ConfigError
from prefill_testing.blocks import tiny_layout

LAYOUT = tiny_layout()
GEOMETRY = PoolGeometry(
    layout_digest=LAYOUT.digest(),
    header_bytes=LAYOUT.header_bytes,
    payload_bytes=LAYOUT.payload_bytes,
    record_bytes=LAYOUT.record_bytes,
    group_bytes=tuple(source.group_bytes for source in LAYOUT.sources),
    snapshot_payload_bytes=5000,
)
POOL_BYTES = 2 << 20
SNAPSHOT_BYTES = 4 * GEOMETRY.snapshot_record_bytes + 4095


def create(path: Path, *, epoch: int = 1, pool_bytes: int = POOL_BYTES) -> PoolMemory:
    return PoolMemory.create(str(path), pool_bytes=pool_bytes, epoch=epoch)


def test_attached_pool_shows_the_same_bytes_and_geometry(tmp_path: Path) -> None:
    pool = create(tmp_path / "pool")
    pool.prefault(2)
    pool.lay_out(GEOMETRY, SNAPSHOT_BYTES)
    rank = PoolMemory.attach(pool.path, nonce=pool.nonce)

    rank.record(3)[:] = b"\x07" * GEOMETRY.record_bytes
    rank.set_echo(5, 0xFFFF_FFFF_FFFF_FFFF)

    assert (rank.geometry, rank.num_blocks, rank.num_snapshots) == (GEOMETRY, pool.num_blocks, 4)
    assert bytes(pool.record(3)) == b"\x07" * GEOMETRY.record_bytes
    assert pool.echo(5) == 0xFFFF_FFFF_FFFF_FFFF
    assert os.pread(pool.fd, 1, pool.record_offset(3)) == b"\x07"
    rank.close()
    pool.close()


def test_regions_do_not_overlap_and_stay_in_the_file(tmp_path: Path) -> None:
    pool = create(tmp_path / "pool")
    pool.lay_out(GEOMETRY, SNAPSHOT_BYTES)
    blocks = [(pool.record_offset(slot), GEOMETRY.record_bytes) for slot in range(pool.num_blocks)]
    snapshots = [(pool.snapshot_offset(slot), GEOMETRY.snapshot_record_bytes) for slot in range(pool.num_snapshots)]
    end = RECORDS_OFFSET
    for start, length in blocks + snapshots:
        assert start >= end
        assert start % 4096 == 0
        end = start + length
    assert end == pool.num_bytes
    pool.close()


def test_groups_make_up_the_payload(tmp_path: Path) -> None:
    pool = create(tmp_path / "pool")
    pool.lay_out(GEOMETRY, SNAPSHOT_BYTES)
    pool.payload(1)[:] = os.urandom(GEOMETRY.payload_bytes)
    groups = [bytes(pool.group(1, group)) for group in range(len(GEOMETRY.group_bytes))]
    assert b"".join(groups) == bytes(pool.payload(1)) == bytes(pool.record(1)[GEOMETRY.header_bytes :])
    pool.close()


def test_kvd_sees_which_rank_still_maps_the_pool(tmp_path: Path) -> None:
    """Frozen counts as alive: it would go on writing; only the end of the process counts."""
    pool = create(tmp_path / "pool")
    program = (
        "import sys; from prefill_engine.kv.pool_memory import PoolMemory; "
        "pool = PoolMemory.attach(sys.argv[1], nonce=bytes.fromhex(sys.argv[2])); pool.set_echo(3, 5); "
        "print('mapped', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, pool.path, pool.nonce.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"mapped\n"
        assert [pool.has_living_rank(index) for index in (2, 3, 4)] == [False, True, False]
        other = PoolMemory.attach(pool.path, nonce=pool.nonce)
        with pytest.raises(ConfigError, match="echo field 3"):
            other.set_echo(3, 6)
        other.close()
        rank.send_signal(signal.SIGSTOP)
        assert pool.has_living_rank(3)
        rank.kill()
    assert not pool.has_living_rank(3)
    assert pool.echo(3) == 5
    pool.close()


def test_lease_row_is_seen_by_a_rank(tmp_path: Path) -> None:
    pool = create(tmp_path / "pool")
    rank = PoolMemory.attach(pool.path, nonce=pool.nonce)
    written, read = pool.lease(NUM_LEASES - 1), rank.lease(NUM_LEASES - 1)

    written.lease_id, written.owner_epoch, written.progress_ns = 1 << 63, (1 << 64) - 1, 77
    written.state, written.snapshot_state = LeaseState.GRACE, SnapshotState.FAILED
    written.num_blocks, written.limit_blocks, written.snapshot_slot, written.error = 9, 8, 7, 6
    for group in range(4):
        written.set_ready(group, 10 + group)

    assert (read.lease_id, read.owner_epoch, read.progress_ns) == (1 << 63, (1 << 64) - 1, 77)
    assert (read.state, read.snapshot_state) == (LeaseState.GRACE, SnapshotState.FAILED)
    assert (read.num_blocks, read.limit_blocks, read.snapshot_slot, read.error) == (9, 8, 7, 6)
    assert read.ready == (10, 11, 12, 13)
    assert pool.lease(NUM_LEASES - 2).lease_id == 0
    written.clear()
    assert (read.lease_id, read.ready, read.state) == (0, (0, 0, 0, 0), LeaseState.FREE)


def test_restart_keeps_file_nonce_and_contents(tmp_path: Path) -> None:
    first = create(tmp_path / "pool", epoch=1)
    first.lay_out(GEOMETRY, SNAPSHOT_BYTES)
    first.payload(2)[:4] = b"kept"
    nonce = first.nonce
    first.close()

    second = create(tmp_path / "pool", epoch=2)

    assert second.is_reattached
    assert (second.epoch, second.nonce, second.geometry) == (2, nonce, GEOMETRY)
    assert bytes(second.payload(2)[:4]) == b"kept"
    second.close()


@pytest.mark.parametrize("scribble", [b"\x00" * 200, b"\xff" * 200], ids=["zeros", "ones"])
def test_restart_on_a_scribbled_geometry_starts_empty(tmp_path: Path, scribble: bytes) -> None:
    first = create(tmp_path / "pool")
    first.lay_out(GEOMETRY, SNAPSHOT_BYTES)
    os.pwrite(first.fd, scribble, 64)
    first.close()
    second = create(tmp_path / "pool")
    assert (second.geometry, second.num_blocks) == (None, 0)
    second.lay_out(GEOMETRY, SNAPSHOT_BYTES)
    second.close()


def test_other_size_makes_a_new_file_and_leaves_the_old_mapping_alone(tmp_path: Path) -> None:
    first = create(tmp_path / "pool")
    rank = PoolMemory.attach(first.path, nonce=first.nonce)
    first.close()

    second = create(tmp_path / "pool", pool_bytes=POOL_BYTES // 2)

    assert not second.is_reattached
    assert second.nonce != rank.nonce
    rank.set_echo(0, 5)  # a file cut in place would end this process with SIGBUS
    rank.lease(NUM_LEASES - 1).lease_id = 1
    assert second.echo(0) == 0
    second.close()


def test_file_of_a_kvd_that_died_before_its_header_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(bytes(POOL_BYTES))
    pool = create(path)
    assert not pool.is_reattached
    pool.close()


def test_second_kvd_on_the_same_pool_is_refused(tmp_path: Path) -> None:
    pool = create(tmp_path / "pool")
    program = (
        "import sys; from prefill_engine.kv.pool_memory import PoolMemory; "
        "PoolMemory.create(sys.argv[1], pool_bytes=1 << 21, epoch=2)"
    )
    other = subprocess.run([sys.executable, "-c", program, pool.path], capture_output=True, text=True, check=False)
    assert "held by another running kvd" in other.stderr
    assert pool.epoch == 1
    pool.close()


def test_pool_larger_than_the_file_system_is_refused_before_a_page_is_written(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"kvd-test-{os.getpid()}-{tmp_path.name}"
    stats = os.statvfs("/dev/shm")
    with pytest.raises(ConfigError, match=r"sizeLimit.* or pool_bytes smaller"):
        create(path, pool_bytes=stats.f_blocks * stats.f_frsize + (1 << 30))
    assert not path.exists()


def test_pool_too_small_for_a_block_and_a_snapshot_is_refused(tmp_path: Path) -> None:
    pool = create(tmp_path / "pool")
    with pytest.raises(ConfigError, match=r"holds [0-9]+ blocks .* and 0 snapshots"):
        pool.lay_out(GEOMETRY, GEOMETRY.snapshot_record_bytes - 1)
    with pytest.raises(ConfigError, match="holds 0 blocks"):
        pool.lay_out(GEOMETRY, POOL_BYTES)
    pool.close()
    with pytest.raises(ConfigError, match="expected at least"):
        create(tmp_path / "small", pool_bytes=RECORDS_OFFSET)


def test_attach_to_another_file_tells_the_shared_memory_problem(tmp_path: Path) -> None:
    pool = create(tmp_path / "pool")
    with pytest.raises(ConfigError, match="must mount the same /dev/shm"):
        PoolMemory.attach(str(tmp_path / "absent"), nonce=pool.nonce)
    with pytest.raises(ConfigError, match="is not the pool that kvd maps"):
        PoolMemory.attach(pool.path, nonce=bytes(16))
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(ConfigError, match="is not the pool"):
        PoolMemory.attach(str(tmp_path / "short"), nonce=pool.nonce)
    pool.close()


@pytest.mark.parametrize(
    "change",
    [
        {"layout_digest": b"x"},
        {"group_bytes": ()},
        {"group_bytes": (GEOMETRY.payload_bytes // 8,) * 8},
        {"payload_bytes": GEOMETRY.payload_bytes + 1},
        {"record_bytes": GEOMETRY.record_bytes + 4096},
        {"snapshot_payload_bytes": 0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_impossible_geometry_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    fields = {name: getattr(GEOMETRY, name) for name in PoolGeometry.__slots__}
    pool = create(tmp_path / "pool")
    with pytest.raises(ConfigError, match="pool geometry"):
        pool.lay_out(PoolGeometry(**{**fields, **change}), SNAPSHOT_BYTES)
    assert pool.geometry is None
    pool.close()
