"""Contestant: NIXL's POSIX plugin with io_uring on the same segments. Files are open and registered, and descriptor lists are
prepared, before anything is timed. It verifies nothing, and its writes are not synced."""

import ctypes
import os

import numpy as np
from contest import DIRECTORY, Manifest, digest_of, make_targets, serve
from nixl_cu12._api import nixl_agent, nixl_agent_config

_BACKENDS = ["POSIX"]


class Files:
    """One prepared list of records in files and in memory."""

    def __init__(self, agent: nixl_agent, manifest: Manifest, address: int, offsets: list[int], *, flags: int) -> None:
        self.agent = agent
        size = manifest.record_bytes
        fds = {path: os.open(path, os.O_RDONLY | flags) for path in dict.fromkeys(path for path, _ in manifest.places)}
        agent.register_memory([(0, os.fstat(fd).st_size, fd, "") for fd in fds.values()], "FILE", backends=_BACKENDS)
        self.prepare(
            [(address + offset, size, 0) for offset in offsets],
            [(offset, size, fds[path]) for path, offset in manifest.places],
        )

    def prepare(self, memory: list[tuple[int, int, int]], files: list[tuple[int, int, int]]) -> None:
        local, remote = np.array(memory, np.uint64), np.array(files, np.uint64)
        self.local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM", backends=_BACKENDS)
        self.remote = self.agent.prep_xfer_dlist("kvd", remote, "FILE", backends=_BACKENDS)
        self.indices = list(range(len(memory)))

    def read(self) -> None:
        move(self.agent, "READ", self.local, self.remote, self.indices)


def move(agent: nixl_agent, operation: str, local: object, remote: object, indices: list[int]) -> None:
    handle = agent.make_prepped_xfer(operation, local, indices, remote, indices, backends=_BACKENDS)
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    handle.release()
    if state != "DONE":
        raise SystemExit(f"NIXL {operation}: {state}")


def main() -> None:
    manifest = Manifest()
    memory, offsets = make_targets(manifest)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    agent = nixl_agent("kvd", nixl_agent_config(backends=[]))
    agent.create_backend("POSIX", {"use_uring": "true"})
    agent.register_memory([(address, len(memory), 0, "")], "DRAM", backends=_BACKENDS)
    buffered = Files(agent, manifest, address, offsets, flags=0)
    direct = Files(agent, manifest, address, offsets, flags=os.O_DIRECT)
    size, view = manifest.record_bytes, memoryview(memory)
    number = 0

    def write() -> None:
        """A new file of so many records, opened and registered in the time."""
        nonlocal number
        number += 1
        fd = os.open(DIRECTORY / f"nixl-{number}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
        agent.register_memory([(0, manifest.new_records * size, fd, "")], "FILE", backends=_BACKENDS)
        indices = list(range(manifest.new_records))
        local = np.array([(address + offsets[index], size, 0) for index in indices], np.uint64)
        remote = np.array([(index * size, size, fd) for index in indices], np.uint64)
        move(
            agent,
            "WRITE",
            agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM", backends=_BACKENDS),
            agent.prep_xfer_dlist("kvd", remote, "FILE", backends=_BACKENDS),
            indices,
        )

    def arrived(name: str) -> str:
        memory[:] = bytes(len(memory))
        (direct if name == "read_direct" else buffered).read()
        return digest_of(view[offset : offset + size] for offset in offsets)

    serve({"read": buffered.read, "read_direct": direct.read, "write": write}, arrived=arrived)


if __name__ == "__main__":
    main()
