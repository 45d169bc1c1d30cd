"""The loop of a contestant of bench_peers.py: reads commands, runs them, answers seconds and CPU seconds as JSON lines.

Runs in the peers' own environment, so it imports nothing of ours. argv[1]: the directory with `manifest.json`, which says where
the records stand. "check" reads everything once and answers the digest of what has arrived, in order.
"""

import hashlib
import json
import mmap
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

DIRECTORY = Path(sys.argv[1])


class Manifest:
    """places: path and offset of each record, in chain order. new_records: that a write has. threads: of parallel readers."""

    def __init__(self) -> None:
        data = json.loads((DIRECTORY / "manifest.json").read_text())
        self.places: list[tuple[str, int]] = [(path, offset) for path, offset in data["places"]]
        self.record_bytes: int = data["record_bytes"]
        self.new_records: int = data["new_records"]
        self.threads: int = data["threads"]

    def records(self) -> Iterable[bytes]:
        """What must arrive."""
        for path, offset in self.places:
            with open(path, "rb", buffering=0) as file:
                yield os.pread(file.fileno(), self.record_bytes, offset)


def make_targets(manifest: Manifest) -> tuple[mmap.mmap, list[int]]:
    """Prefaulted memory for all records, and the offset of each in it: scattered, as slots of a pool are."""
    memory = mmap.mmap(-1, len(manifest.places) * manifest.record_bytes)
    memory[:] = bytes(len(memory))
    slots = list(range(len(manifest.places)))
    random.Random(5).shuffle(slots)
    return memory, [slot * manifest.record_bytes for slot in slots]


def digest_of(records: Iterable[bytes | memoryview]) -> str:
    """Of all records, in order."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(record)
    return digest.hexdigest()


def serve(actions: dict[str, Callable[[], None]], *, arrived: Callable[[str], str]) -> None:
    """actions: by command; each moves everything once. arrived: digest of what the named action brings, nothing timed."""
    print(json.dumps({"actions": sorted(actions)}), flush=True)
    for line in sys.stdin:
        verb, _, name = line.strip().partition(" ")
        if verb == "check":
            answer: dict[str, object] = {"sha256": arrived(name)}
        else:
            before, started = _cpu_seconds(), time.perf_counter()
            actions[name]()
            answer = {"seconds": time.perf_counter() - started, "cpu_seconds": _cpu_seconds() - before}
        print(json.dumps(answer), flush=True)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
