"""A rank frozen (SIGSTOP) with a slot half filled while kvd dies and returns: it disturbs nobody, and its slots come back."""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from prefill_engine.kv.pool_file import read_header
from prefill_engine.kv.pool_memory import PoolGeometry, PoolMemory
from prefill_testing.kvd_process import KvdProcess, RankClient, end, read_line, wait_until
from prefill_testing.kvd_rig import LONG, kvd_config, run_whole
from prefill_testing.rank_harness import RankHarness, make_submit, tiny_engine_config, tiny_tokens
from prefill_testing.slow_writer import SEED

GRACE = 0.2


def geometry_of(kvd: KvdProcess) -> PoolGeometry:
    """As the first rank has laid the pool out."""
    path = Path(str(kvd.config["pool_path"]))
    with path.open("rb") as file:
        nonce = read_header(file.fileno())[5]
    pool = PoolMemory.attach(str(path), nonce=nonce)
    try:
        assert pool.geometry is not None
        return pool.geometry
    finally:
        pool.close()


@pytest.mark.parametrize("is_awake", [False, True], ids=["still-frozen", "awake-and-not-done"])
def test_rank_frozen_in_mid_write_over_a_restart_of_kvd_writes_into_its_own_slots_only(
    is_awake: bool,
) -> None:
    """Another rank then takes every slot there is."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvd"))
        kvd = KvdProcess(Path(directory), pool_bytes=3 << 20, snapshot_bytes=1 << 19, lease_grace_seconds=GRACE)
        stack.callback(kvd.kill)
        writer = stack.enter_context(slow_writer(kvd.socket))
        assert writer.stdout is not None
        assert writer.stdin is not None
        assert read_line(writer.stdout, "a half-written record") == "half\n"
        writer.send_signal(signal.SIGSTOP)
        kvd.kill()
        kvd.start()
        if is_awake:
            writer.send_signal(signal.SIGCONT)
            wait_until(lambda: kvd.metric('leases{state="live"}') == 1, "the reservation that it declares")
        else:
            wait_until(lambda: kvd.metric('leases{state="grace"}') == 1, "the frozen rank's reservation")
        time.sleep(3 * GRACE)  # what kvd may take for granted after the grace is what is tested
        other = RankClient(kvd.socket, owner=2, geometry=geometry_of(kvd))
        taken = other.reserve(1024, 64)  # the most of one call; more than there are
        assert len(taken.slots) > 100
        for slot in taken.slots:
            other.pool.record(slot)[:] = own_bytes(slot, len(other.pool.record(slot)))

        writer.send_signal(signal.SIGCONT)
        writer.stdin.write("go on\n")
        writer.stdin.flush()
        assert read_line(writer.stdout, "the end of the write").startswith("stored ")

        for slot in taken.slots:
            assert bytes(other.pool.record(slot)) == own_bytes(slot, len(other.pool.record(slot))), slot
        other.close_leases(taken.reservation_id)
        wait_until(lambda: kvd.num_leases() == 0, "the reservation of the woken rank to end")
        other.leave()
        # What is found now, if anything, is right.
        tokens, configs = tiny_tokens(LONG, seed=SEED), (kvd_config(kvd.socket), tiny_engine_config())
        ranks = [RankHarness(config) for config in configs]
        found, cold = (run_whole(rank, make_submit(tokens)) for rank in ranks)
        assert found == cold
        for rank in ranks:
            rank.close()
        end(writer)
        wait_until(lambda: kvd.metric("sessions") == 0 and kvd.num_leases() == 0, "every session's end")


def own_bytes(slot: int, num_bytes: int) -> bytes:
    return slot.to_bytes(4, "big") * (num_bytes // 4)


@contextmanager
def slow_writer(socket: str) -> "Iterator[subprocess.Popen[str]]":
    process = subprocess.Popen(
        [sys.executable, "-m", "prefill_testing.slow_writer", socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        end(process)
