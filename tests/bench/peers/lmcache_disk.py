"""Contestant: LMCache's LocalDiskBackend, one file per block, as its storage manager uses it (batched_get_blocking, 4 threads).

It verifies nothing, and its writes are neither synced nor renamed into place. Its own allocator gives the memory.
"""

import asyncio
import os
import threading
from collections.abc import Callable

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from contest import DIRECTORY, Manifest, digest_of, serve
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend


class Disk:
    """One backend on a directory of its own."""

    def __init__(self, manifest: Manifest, loop: asyncio.AbstractEventLoop, name: str, *, direct: bool) -> None:
        self.shape = torch.Size((2, 1, manifest.record_bytes // 4, 1))  # KV_2LTD of bfloat16
        num_bytes = (len(manifest.places) + 4 * manifest.new_records) * manifest.record_bytes
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            local_disk=f"file://{DIRECTORY / name}/",
            max_local_disk_size=64.0,
            extra_config={"use_odirect": direct, "disk_io_threads": manifest.threads},
        )
        (DIRECTORY / name).mkdir()
        self.memory = LocalCPUBackend(config, memory_allocator=MixedMemoryAllocator(num_bytes), dst_device="cpu")
        self.backend = LocalDiskBackend(config, loop, self.memory, dst_device="cpu")
        self.record_bytes = manifest.record_bytes
        self.next_key = 0
        self.keys = self.put(list(manifest.records()))

    def key(self, number: int) -> CacheEngineKey:
        return CacheEngineKey("m", 1, 0, number, torch.bfloat16)

    def put(self, records: list[bytes]) -> list[CacheEngineKey]:
        """Returns when every file is written."""
        written = threading.Semaphore(0)
        keys, objects = [], []
        for record in records:
            memory = self.memory.allocate(self.shape, torch.bfloat16, MemoryFormat.KV_2LTD)
            assert memory is not None, "LMCache's allocator is full"
            memory.byte_array.cast("B")[:] = record
            keys.append(self.key(self.next_key))
            objects.append(memory)
            self.next_key += 1
        done: Callable[[CacheEngineKey], None] = lambda _key: written.release()  # noqa: E731
        self.backend.batched_submit_put_task(keys, objects, on_complete_callback=done)
        for memory in objects:
            memory.ref_count_down()
        for _ in keys:
            written.acquire()
        return keys

    def read(self) -> None:
        for memory in self.load():
            memory.ref_count_down()

    def load(self) -> list:
        found = self.backend.batched_get_blocking(self.keys)
        if any(memory is None for memory in found):
            raise SystemExit("LMCache lost a block")
        return found

    def digest(self) -> str:
        found = self.load()
        digest = digest_of(memory.byte_array for memory in found)
        for memory in found:
            memory.ref_count_down()
        return digest


def main() -> None:
    manifest = Manifest()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    disks = {
        name: Disk(manifest, loop, f"lmcache-{name}", direct=name == "read_direct") for name in ("read", "read_direct")
    }
    new = [record for record, _ in zip(manifest.records(), range(manifest.new_records), strict=False)]
    actions = {name: disk.read for name, disk in disks.items()}
    serve(actions | {"write": lambda: disks["read"].put(new)}, arrived=lambda name: disks[name].digest())


if __name__ == "__main__":
    main()
