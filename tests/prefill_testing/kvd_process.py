"""kvd as a real process, and ranks that talk to it: in this process, or as one that can be killed and frozen.

`python -m prefill_testing.kvd_process SOCKET PHASE...`: ranks that go as far as their phase, say so, and stay there.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import grpc

from prefill_engine.kv.pool_memory import PoolGeometry, PoolMemory
from prefill_engine.kvd.service import PROTOCOL
from prefill_engine.rpc import kv_pb2 as pb
from prefill_engine.rpc import kv_pb2_grpc
from prefill_plan.block_keys import BlockKey, snapshot_key
from prefill_testing.kvd_fakes import GEOMETRY, chain, make_record, make_snapshot

DEADLINE_SECONDS = 30.0
NUM_BLOCKS = 40
NUM_SNAPSHOTS = 6
PHASES = ("attached", "reserved", "half-written", "committed", "opened")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:g} s: {what}"
        time.sleep(0.01)


def read_line(stream: IO[str], what: str) -> str:
    """The next line that a process prints; "" when it has ended."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: lines.put(stream.readline()), daemon=True).start()
    try:
        return lines.get(timeout=2 * DEADLINE_SECONDS)
    except queue.Empty:
        raise AssertionError(f"not within {2 * DEADLINE_SECONDS:g} s: {what}") from None


class KvdProcess:
    """`prefill-engine kv serve`. folder: for socket, pool and store. wrapper: a command that executes it. settings: KvdConfig
    overrides."""

    def __init__(
        self,
        folder: Path,
        *,
        geometry: PoolGeometry = GEOMETRY,
        start: bool = True,
        pod: str = "pod-1",
        wrapper: Sequence[str] = (),
        **settings: object,
    ) -> None:
        self.folder = folder
        self._pod = pod
        self._wrapper = wrapper
        snapshot_bytes = NUM_SNAPSHOTS * geometry.snapshot_record_bytes
        config: dict[str, object] = {
            "socket": f"{folder}/kvd.sock",
            "pool_path": f"{folder}/pool",
            "pool_bytes": 4096 * 65 + NUM_BLOCKS * geometry.record_bytes + snapshot_bytes,
            "snapshot_bytes": snapshot_bytes,
            "lease_grace_seconds": 0.3,
            "transport": {"host": "127.0.0.1"},
            "store": {"kind": "file", "path": f"{folder}/store"},
        }
        self.config = {**config, **settings}
        self.socket = str(self.config["socket"])
        self.facts: dict[str, Any] = {}
        if start:
            self.start()

    def start(self, *, expect_ready: bool = True) -> None:
        config = self.folder / "kvd.json"
        config.write_text(json.dumps(self.config))
        self.log = self.folder / "kvd.log"
        environ = {**os.environ, "POD_NAME": self._pod, "OMP_NUM_THREADS": "1"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*self._wrapper, sys.executable, "-m", "prefill_engine", "kv", "serve", "--config", str(config)],
                stdout=subprocess.PIPE if expect_ready else subprocess.DEVNULL,
                stderr=log,
                text=True,
                env=environ,
            )
        if expect_ready:
            assert self.process.stdout is not None
            with self.process.stdout as stdout:
                line = read_line(stdout, "a kvd that is ready")
            assert line, self.log.read_text()[-3000:]
            self.facts = json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_SECONDS)

    def exit_code(self) -> int:
        """Of one that ends by itself."""
        try:
            return self.process.wait(DEADLINE_SECONDS)
        finally:
            self.kill()

    def metric(self, name: str) -> float:
        """Value of a line that starts with `kv_` + name, labels included."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.facts['metrics_port']}/metrics") as answer:
            text = answer.read().decode()
        for line in text.splitlines():
            if line.startswith(f"kv_{name} "):
                return float(line.split()[-1])
        return 0.0

    def num_leases(self) -> float:
        return self.metric('leases{state="live"}') + self.metric('leases{state="grace"}')

    def num_usable_blocks(self) -> float:
        """Slots that are free or hold a findable block."""
        return self._num_blocks("free", "valid")

    def num_blocks(self) -> float:
        num = self._num_blocks("free", "filling", "valid", "quarantined")
        assert num, "kvd counts no block slot"
        return num

    def _num_blocks(self, *states: str) -> float:
        return sum(self.metric(f'slots{{kind="block",state="{state}"}}') for state in states)


class RankClient:
    """A rank's end of the protocol."""

    def __init__(
        self,
        socket: str,
        *,
        owner: int = 1,
        held: Sequence[int] = (),
        pool: PoolMemory | None = None,
        geometry: PoolGeometry = GEOMETRY,
    ) -> None:
        """pool: the mapping from before a restart of kvd, used again if it is the same file."""
        self.owner = owner
        self.channel = grpc.insecure_channel(f"unix:{socket}", options=[("grpc.use_local_subchannel_pool", 1)])
        grpc.channel_ready_future(self.channel).result(DEADLINE_SECONDS)
        self.stub: Any = kv_pb2_grpc.KvdStub(self.channel)
        self._requests: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self._stream = self.stub.Session(self._send())
        hello = pb.SessionHello(
            protocol=PROTOCOL,
            engine_id="engine",
            owner_epoch=owner,
            geometry=pb.BlockGeometry(
                layout_digest=geometry.layout_digest,
                header_bytes=geometry.header_bytes,
                payload_bytes=geometry.payload_bytes,
                record_bytes=geometry.record_bytes,
                group_bytes=geometry.group_bytes,
            ),
            snapshot_bytes=geometry.snapshot_payload_bytes,
            held_leases=held,
        )
        self._requests.put(pb.SessionRequest(hello=hello))
        self.welcome = next(self._stream).welcome
        if pool is not None and pool.nonce == self.welcome.nonce:
            self.pool = pool
        else:
            self.pool = PoolMemory.attach(self.welcome.pool_path, nonce=self.welcome.nonce)
        self.pool.set_echo(self.welcome.echo_index, owner)
        self._requests.put(pb.SessionRequest(attached=pb.SessionAttached()))
        assert next(self._stream).HasField("ready")
        self.notices: list[pb.SessionNotice] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def open(self, keys: Sequence[BlockKey], **fields: Any) -> pb.OpenResponse:
        return self.stub.Open(
            pb.OpenRequest(owner_epoch=self.owner, keys=b"".join(keys), **fields), timeout=DEADLINE_SECONDS
        )

    def row(self, answer: pb.OpenResponse) -> Any:
        record = self.pool.lease(answer.lease_row)
        assert record.lease_id == answer.lease_id
        return record

    def reserve(self, num_blocks: int, num_snapshots: int = 0) -> pb.ReserveSlotsResponse:
        return self.stub.Reserve(
            pb.ReserveSlotsRequest(owner_epoch=self.owner, num_blocks=num_blocks, num_snapshots=num_snapshots)
        )

    def write(
        self, reserved: pb.ReserveSlotsResponse, keys: Sequence[BlockKey], snapshots: Sequence[BlockKey] = ()
    ) -> pb.CommitRequest:
        """Fills the slots; returns the commit to send."""
        for index, (slot, key) in enumerate(zip(reserved.slots, keys, strict=True)):
            self.pool.record(slot)[:] = make_record(key, index=index)
        for slot, key in zip(reserved.snapshot_slots, snapshots, strict=True):
            self.pool.snapshot(slot)[:] = make_snapshot(key)
        return pb.CommitRequest(
            reservation_id=reserved.reservation_id,
            blocks=[pb.CommitBlock(key=key, slot=slot) for slot, key in zip(reserved.slots, keys, strict=True)],
            snapshots=[
                pb.CommitSnapshot(key=snapshot_key(key), slot=slot)
                for slot, key in zip(reserved.snapshot_slots, snapshots, strict=True)
            ],
        )

    def save(self, keys: Sequence[BlockKey], snapshots: Sequence[BlockKey] = ()) -> pb.CommitResponse:
        reserved = self.reserve(len(keys), len(snapshots))
        return self.stub.Commit(self.write(reserved, keys, snapshots), timeout=DEADLINE_SECONDS)

    def read(self, answer: pb.OpenResponse, keys: Sequence[BlockKey]) -> int:
        """Waits until everything of a lease is decided, and compares the ready blocks byte by byte; returns how many."""
        num_groups = len(GEOMETRY.group_bytes)

        def num_ready() -> int:
            return min(self.row(answer).ready[:num_groups])

        wait_until(lambda: num_ready() >= self.row(answer).limit_blocks, "blocks of a lease")
        ready = min(num_ready(), self.row(answer).limit_blocks)
        for slot, key in zip(answer.slots[:ready], keys[:ready], strict=True):
            found = bytes(self.pool.payload(slot))
            assert self.row(answer).lease_id == answer.lease_id
            assert found == make_record(key)[GEOMETRY.header_bytes :], f"wrong bytes in slot {slot}"
        return ready

    def close_leases(self, *leases: int) -> pb.CloseResponse:
        return self.stub.Close(pb.CloseRequest(lease_ids=leases))

    def say(self, request: pb.SessionRequest) -> None:
        """On the session."""
        self._requests.put(request)

    def leave(self) -> None:
        """Ends the session as a process's end does; the mapping too."""
        self._requests.put(None)
        self.channel.close()
        self.pool.close()

    def _send(self) -> Iterator[pb.SessionRequest]:
        while True:
            try:
                request = self._requests.get(timeout=1.0)
            except queue.Empty:
                yield pb.SessionRequest(beat=pb.SessionBeat())
                continue
            if request is None:
                return
            yield request

    def _listen(self) -> None:
        try:
            for message in self._stream:
                self.notices.append(message.notice)
        except grpc.RpcError:
            return


def go_to(phase: str, socket: str, owner: int) -> RankClient:
    """A rank that stays in this phase; its keys are named after it."""
    keys = chain(f"{phase}-", 6)
    rank = RankClient(socket, owner=owner)
    if phase in ("committed", "opened"):
        rank.save(keys, keys[-1:])
        if phase == "opened":
            rank.read(rank.open(keys, want_snapshot=True), keys)
    elif phase != "attached":
        reserved = rank.reserve(len(keys), 1)
        if phase == "half-written":
            rank.write(reserved, keys, keys[-1:])
            for slot in reserved.slots:
                rank.pool.payload(slot)[-100:] = bytes(100)
    return rank


def start_ranks(socket: str, *phases: str) -> subprocess.Popen[str]:
    """A process with one rank in each of these phases."""
    command = [sys.executable, "-m", "prefill_testing.kvd_process", socket, *phases]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert read_line(process.stdout, "ranks in their phases") == "there\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


if __name__ == "__main__":
    ranks = [go_to(phase, sys.argv[1], 100 + index) for index, phase in enumerate(sys.argv[2:])]
    print("there", flush=True)
    signal.pause()
