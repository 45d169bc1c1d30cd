"""Contestant: Mooncake Store, a store in memory behind a master, over its TCP engine; blocks come by batch_get_into.

The master is another process; its CPU time is not counted. It verifies nothing.
"""

import ctypes
import socket
import subprocess
import sys
from pathlib import Path

from contest import DIRECTORY, Manifest, digest_of, make_targets, serve
from mooncake.store import MooncakeDistributedStore

_BUFFER_BYTES = 64 << 20
_SEGMENT_BYTES = 512 << 20


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def main() -> None:
    manifest = Manifest()
    memory, offsets = make_targets(manifest)
    address, size = ctypes.addressof(ctypes.c_char.from_buffer(memory)), manifest.record_bytes
    port = free_port()
    with (DIRECTORY / "mooncake-master.log").open("wb") as log:
        master = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "mooncake_master"),
                f"--rpc_port={port}",
                f"--metrics_port={free_port()}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        compete(manifest, memory, offsets, address=address, size=size, master=f"127.0.0.1:{port}")
    finally:
        master.terminate()
        master.wait(20)


def compete(manifest: Manifest, memory: object, offsets: list[int], *, address: int, size: int, master: str) -> None:
    store = MooncakeDistributedStore()
    result = store.setup("127.0.0.1", "P2PHANDSHAKE", _SEGMENT_BYTES, _BUFFER_BYTES, "tcp", "", master)
    if result:
        raise SystemExit(f"mooncake setup: {result}")
    view = memoryview(memory)
    if store.register_buffer(address, len(view)):
        raise SystemExit("mooncake refused the buffer")
    keys = [f"block-{index}" for index in range(len(manifest.places))]
    for key, record in zip(keys, manifest.records(), strict=True):
        if store.put(key, record):
            raise SystemExit(f"mooncake put {key} failed")
    pointers, sizes = [address + offset for offset in offsets], [size] * len(offsets)
    number = 0

    def read() -> None:
        answers = store.batch_get_into(keys, pointers, sizes)
        if any(answer != size for answer in answers):
            raise SystemExit(f"mooncake get: {next(answer for answer in answers if answer != size)}")

    def write() -> None:
        nonlocal number
        number += 1
        new = [f"new-{number}-{index}" for index in range(manifest.new_records)]
        if any(store.batch_put_from(new, pointers[: len(new)], sizes[: len(new)])):
            raise SystemExit("mooncake put failed")
        store.remove_by_regex(f"new-{number - 1}-.*")

    def arrived(name: str) -> str:
        view[:] = bytes(len(view))
        read()
        return digest_of(view[offset : offset + size] for offset in offsets)

    serve({"read": read, "write": write}, arrived=arrived)


if __name__ == "__main__":
    main()
