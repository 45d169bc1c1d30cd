"""Two kvd processes, a directory service and TCP between them: snapshots come from the peer, and its faults are replays."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from prefill_engine.kv.lease_record import SnapshotState
from prefill_engine.rpc import kv_pb2 as pb
from prefill_testing.kvd_fakes import chain, make_snapshot
from prefill_testing.kvd_process import NUM_BLOCKS, KvdProcess, RankClient, read_line, wait_until

KEYS = chain("k", 4)


@dataclass
class Cluster:
    """Both kvds share the store. `near` asks, `far` has."""

    near: KvdProcess
    far: KvdProcess
    near_rank: RankClient
    far_rank: RankClient

    def open_until_pulling(self, keys: list[bytes]) -> pb.OpenResponse:
        """The directory learns of a snapshot a moment after its commit."""
        found = []

        def is_known() -> bool:
            found[:] = [self.near_rank.open(keys, want_snapshot=True)]
            if found[0].snapshot != pb.OpenResponse.NONE:
                return True
            self.near_rank.close_leases(found[0].lease_id)
            return False

        wait_until(is_known, "the snapshot in the directory")
        return found[0]

    def snapshot_state(self, answer: pb.OpenResponse) -> SnapshotState:
        wait_until(lambda: self.near_rank.row(answer).snapshot_state is not SnapshotState.PULLING, "end of the pull")
        return self.near_rank.row(answer).snapshot_state


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    command = [sys.executable, "-m", "prefill_engine", "directory", "serve", "--host", "127.0.0.1", "--port", "0"]
    with (folder / "directory.log").open("w") as log:
        directory = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert directory.stdout is not None
    port = json.loads(read_line(directory.stdout, "a directory that is ready"))["port"]
    kvds = []
    for name in ("near", "far"):
        (folder / name).mkdir()
        kvds.append(
            KvdProcess(
                folder / name,
                pod=name,
                store={"kind": "file", "path": f"{folder}/store"},
                directory={"address": f"127.0.0.1:{port}", "deadline_seconds": 2.0},
                pull_deadline_seconds=0.5,
            )
        )
    near, far = kvds
    cluster = Cluster(near=near, far=far, near_rank=RankClient(near.socket), far_rank=RankClient(far.socket, owner=2))
    try:
        yield cluster
    finally:
        for kvd in kvds:
            kvd.kill()
        directory.kill()
        directory.wait()
        directory.stdout.close()


def test_blocks_and_snapshot_of_another_pod_are_served(cluster: Cluster) -> None:
    cluster.far_rank.save(KEYS, KEYS[-1:])
    answer = cluster.open_until_pulling(KEYS)
    assert cluster.near_rank.read(answer, KEYS) == 4
    assert cluster.snapshot_state(answer) is SnapshotState.READY
    assert bytes(cluster.near_rank.pool.snapshot(answer.snapshot_slot)) == make_snapshot(KEYS[-1])
    assert cluster.near.metric('swapin_bytes_total{src="peer"}') == len(make_snapshot(KEYS[-1]))
    wait_until(lambda: cluster.near.metric('transport_events_total{name="pull_done"}') == 1, "the pull in the metrics")
    wait_until(lambda: cluster.far.metric('transport_events_total{name="served"}') == 1, "the serving in the metrics")
    assert cluster.near.metric('directory_client_events_total{name="joins"}') == 1
    cluster.near_rank.close_leases(answer.lease_id)


def test_frozen_peer_costs_the_deadline_and_no_slot(cluster: Cluster) -> None:
    """kv.md 8, bug 1: late bytes never land in a slot that serves somebody else."""
    keys = chain("frozen", 4)
    cluster.far_rank.save(keys, keys[-1:])
    first = cluster.open_until_pulling(keys)
    cluster.snapshot_state(first)
    cluster.near_rank.close_leases(first.lease_id)
    other = chain("other", 3)
    cluster.far_rank.save(other, other[-1:])
    wait_until(lambda: cluster.near_rank.open(other[:1]).found_blocks == 1, "far's blocks")
    os.kill(cluster.far.process.pid, signal.SIGSTOP)
    try:
        answer = cluster.near_rank.open(other, want_snapshot=True)
        assert answer.snapshot == pb.OpenResponse.PULLING
        assert cluster.snapshot_state(answer) is SnapshotState.FAILED
        assert cluster.near_rank.read(answer, other) == 3, "blocks come from the store all the same"
        cluster.near_rank.close_leases(answer.lease_id)
    finally:
        os.kill(cluster.far.process.pid, signal.SIGCONT)
    wait_until(lambda: cluster.near.metric("quarantined_slots") == 0, "settled slots")


def test_killed_peer_is_a_replay(cluster: Cluster) -> None:
    keys = chain("killed", 4)
    cluster.far_rank.save(keys, keys[-1:])
    wait_until(lambda: cluster.near_rank.open(keys[:1]).found_blocks == 1, "far's blocks")
    cluster.far.kill()
    answer = cluster.near_rank.open(keys, want_snapshot=True)
    assert answer.snapshot == pb.OpenResponse.PULLING
    assert cluster.snapshot_state(answer) is SnapshotState.FAILED
    assert cluster.near_rank.read(answer, keys) == 4
    cluster.near_rank.leave()
    wait_until(lambda: cluster.near.num_leases() == 0, "leases")
    wait_until(lambda: cluster.near.num_usable_blocks() == NUM_BLOCKS, "slots")
