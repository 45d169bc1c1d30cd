"""A peer's kvd reduced to what its neighbours see: a process that serves snapshots from shared memory, and may tell a directory.

    python -m prefill_testing.kv_peer '<JSON of PeerArgs>'

Prints {"endpoint": ...} when it listens. Killed, stopped and restarted by the tests; both sides derive keys and payloads from a
seed, so every byte pulled can be checked. With pull_from it is a reader instead, see PeerArgs.
"""

import asyncio
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

import msgspec

from prefill_engine.kv.directory import Holder
from prefill_engine.kv.snapshot_record import SnapshotCodec
from prefill_engine.kv.transport.choose import build_transport
from prefill_engine.kv.transport.contract import Source
from prefill_engine.kv.transport.nixl import StagingSize
from prefill_engine.kvd.directory_client import RemoteDirectory
from prefill_plan.block_keys import BlockKey, snapshot_key
from prefill_plan.config import TlsConfig
from prefill_plan.kvd_config import DirectoryConfig, TransportConfig

SNAPSHOT_PAYLOAD = 1_415_040
"""kv.md 1.4: of the released model."""
LAYOUT = bytes(range(32))
CODEC = SnapshotCodec(LAYOUT, SNAPSHOT_PAYLOAD)
RECORD_BYTES = CODEC.record_bytes
BLOB_KEY = bytes(32)
BLOB_BYTE = 0x5A
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class PeerArgs:
    """rewrite: keeps writing new generations into the slots while peers pull. blob_bytes: of one big thing under BLOB_KEY.
    respawn: forks a new serving process whenever the last one died, printing its pid. directory: address, "" = none.
    window_bytes: nixl: things are shown as copies, in two windows. pull_from: endpoint; this process pulls the big thing from
    there within pull_seconds, prints {"begun": true} when bytes are there, and its end with a count of the bytes that are
    neither 0 nor the thing's."""

    transport: TransportConfig
    num_records: int = 2
    rewrite: bool = False
    blob_bytes: int = 0
    respawn: bool = False
    directory: str = ""
    holder_id: str = "peer"
    epoch: int = 1
    window_bytes: int = 0
    pull_from: str = ""
    pull_seconds: float = 2.0


def key_of(number: int) -> bytes:
    return snapshot_key(BlockKey(sha256(b"peer" + number.to_bytes(4, "big")).digest()))


def record_of(number: int, *, generation: int = 1) -> bytes:
    """A complete snapshot record; equal in every process."""
    payload = Random(f"{number}:{generation}").randbytes(SNAPSHOT_PAYLOAD)
    header = CODEC.encode_header(
        key=key_of(number), position=1280, first_valid=1146, exact=True, generation=generation, payload=payload
    )
    return (header + payload).ljust(RECORD_BYTES, b"\0")


@dataclass
class SnapshotFile:
    """Records in a shared-memory file, as kvd's pool has them."""

    num_records: int
    blob_bytes: int
    fd: int = -1
    view: memoryview = field(init=False)

    def __post_init__(self) -> None:
        size = self.num_records * RECORD_BYTES + self.blob_bytes
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(size)
            self.fd = os.dup(file.fileno())
        self.view = memoryview(mmap.mmap(self.fd, size))
        self.view[self.num_records * RECORD_BYTES :] = bytes([BLOB_BYTE]) * self.blob_bytes
        for number in range(self.num_records):
            self.slot(number)[:] = record_of(number)

    def slot(self, number: int) -> memoryview:
        return self.view[number * RECORD_BYTES : (number + 1) * RECORD_BYTES]

    def find(self, key: bytes) -> Source | None:
        start = self.num_records * RECORD_BYTES
        if key == BLOB_KEY:
            return Source(view=self.view[start:], fd=self.fd, offset=start, release=_release)
        for number in range(self.num_records):
            if key_of(number) == key:
                return Source(view=self.slot(number), fd=self.fd, offset=number * RECORD_BYTES, release=_release)
        return None

    def rewrite_forever(self) -> None:
        """What a pull must never be believed: slots that change under it."""
        versions = [[record_of(number, generation=one) for one in (1, 2, 3)] for number in range(self.num_records)]
        turn = 0
        while True:
            turn += 1
            for number in range(self.num_records):
                self.slot(number)[:] = versions[number][turn % 3]


def _release() -> None:
    """The slots of this peer live as long as it does."""


def say(line: dict[str, object]) -> None:
    """In one write: two processes share the pipe."""
    os.write(1, json.dumps(line).encode() + b"\n")


def run(args: PeerArgs) -> None:
    if args.pull_from:
        asyncio.run(read(args))
        return
    file = SnapshotFile(args.num_records, args.blob_bytes)
    while args.respawn:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            break
        say({"pid": pid})
        os.waitpid(pid, 0)
    asyncio.run(serve(args, file))


async def serve(args: PeerArgs, file: SnapshotFile) -> None:
    staging = (
        StagingSize(num_bytes=2 * args.window_bytes, window_bytes=args.window_bytes) if args.window_bytes else None
    )
    transport = build_transport(args.transport, pod_ip="127.0.0.1", staging=staging)
    endpoint = await transport.listen(file.find)
    directory = None
    if args.directory:
        directory = RemoteDirectory(
            DirectoryConfig(address=args.directory),
            Holder(holder_id=args.holder_id, epoch=args.epoch, endpoint=endpoint),
            snapshot_keys=lambda: [key_of(number) for number in range(args.num_records)],
            on_resync=lambda: None,
            tls=TlsConfig(),
        )
    if args.rewrite:
        threading.Thread(target=file.rewrite_forever, daemon=True).start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    say({"endpoint": endpoint, "kind": transport.kind})
    await stop.wait()
    if directory is not None:
        await directory.close()
    await transport.close()


async def read(args: PeerArgs) -> None:
    transport = build_transport(args.transport)
    await transport.listen(lambda _key: None)
    target = bytearray(args.blob_bytes)
    pull = transport.pull(args.pull_from, BLOB_KEY, memoryview(target), deadline_seconds=args.pull_seconds)
    pulling = asyncio.create_task(pull)
    while BLOB_BYTE not in (target[0], target[1 << 20], target[-1]) and not pulling.done():
        await asyncio.sleep(0.001)
    say({"begun": True})
    outcome = await pulling
    await transport.close_peer(args.pull_from)
    is_settled = outcome.settled()
    strange = len(target) - target.count(BLOB_BYTE) - target.count(0)
    say({"state": str(outcome.state), "reason": outcome.reason, "settled": is_settled, "strange": strange})
    await transport.close()


class PeerProcess:
    """A running peer. Use as a context manager; it is killed at the end."""

    def __init__(self, args: PeerArgs) -> None:
        text = msgspec.json.encode(args).decode()
        command = [sys.executable, "-m", "prefill_testing.kv_peer", text]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._endpoint = ""

    @property
    def endpoint(self) -> str:
        """Waits until it listens."""
        if not self._endpoint:
            self._endpoint = str(self.read_line()["endpoint"])
        return self._endpoint

    def read_line(self) -> dict[str, object]:
        """The next of its lines; libraries may say something in between."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError(f"peer ended with {self.process.wait()}")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=PeerArgs))
