"""kvd's segment store against its peers on the same bytes in the same run (C20): LMCache, NIXL POSIX, Mooncake, fio.

    python tests/bench/peers/compare.py --peers-python .venv-peers/bin/python [--runs N] [--directory DIR] [--results FILE]

What `make bench-peers` runs. Each contestant is a process that moves everything once per command; first it shows by a digest
that what arrives is what was written. In each run all of them do the same action one after the other, in rotating order; figures
are medians, ratios are medians of the ratio within a run. A peer that can't be run is named in the results with its last words.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prefill_engine.kv.record import RecordCodec, RecordShape
from prefill_engine.kv.segment_file import HEADER_BYTES
from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_engine.kv.segments import RecordWrite
from prefill_plan.block_keys import BlockKey
from prefill_plan.config import RecordFormat
from prefill_plan.kv_layout import block_layout
from prefill_plan.kvd_config import KvdStoreConfig
from prefill_plan.model_spec import released_model_spec

SHAPE = RecordShape.of_layout(block_layout(released_model_spec(), RecordFormat.FP4))
NUM_BLOCKS, BLOCKS_PER_SEGMENT, THREADS, QUEUE_DEPTH = 757, 24, 4, 16
NUM_BYTES = NUM_BLOCKS * SHAPE.record_bytes
HERE = Path(__file__).parent
START_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Action:
    """What is timed. ours: the actions of kvd's store that stand in it. peers: the action of the others."""

    title: str
    ours: tuple[str, ...]
    peers: str
    num_bytes: int
    has_fio: bool = False


ACTIONS = (
    Action(title="read 757 blocks, page cache", ours=("read", "read_one_thread"), peers="read", num_bytes=NUM_BYTES),
    Action(
        title="read 757 blocks, O_DIRECT", ours=("read_direct",), peers="read_direct", num_bytes=NUM_BYTES, has_fio=True
    ),
    Action(title="write 24 blocks", ours=("write",), peers="write", num_bytes=BLOCKS_PER_SEGMENT * SHAPE.record_bytes),
)
NAMES = {
    "read": "kvd, 4 threads, verified",
    "read_one_thread": "kvd, 1 thread, verified",
    "read_direct": "kvd, 4 threads, verified",
    "write": "kvd, synced before it is found",
}
PEERS = {
    "nixl_posix": "NIXL 1.5.1 POSIX (io_uring), not verified",
    "lmcache_disk": "LMCache 0.5.6 local disk, 4 threads, not verified",
    "mooncake_store": "Mooncake 0.3.13 store (memory, TCP), not verified",
}
PEER_WRITE_NOTE = ", not synced"


class Contestant:
    """One process. failure: why it does not take part; ""."""

    def __init__(self, python: str, script: str, directory: Path) -> None:
        self.name = script
        self.failure = ""
        self.actions: list[str] = []
        self._log = directory / f"{script}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, str(HERE / f"{script}.py"), str(directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def start(self) -> None:
        answer = self._answer()
        self.actions = answer.get("actions", [])

    def check(self, action: str, digest: str) -> None:
        """Leaves the contest with wrong bytes."""
        found = self._ask(f"check {action}").get("sha256")
        if not self.failure and found != digest:
            self.failure = f"{action}: what arrived is not what was written"

    def time(self, action: str) -> tuple[float, float] | None:
        """Wall and CPU seconds."""
        answer = self._ask(f"run {action}")
        return None if self.failure else (answer["seconds"], answer["cpu_seconds"])

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, command: str) -> dict:
        if self.failure:
            return {}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        return self._answer()

    def _answer(self) -> dict:
        """The next JSON line; other lines are a library's chatter."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        words = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in words if re.match(r"[\w.]*(Error|Exception)\b", line)]
        self.failure = (errors or words or ["it ended without a word"])[-1]
        return {}


@dataclass
class Row:
    """Seconds and CPU seconds per run of one contestant in one action."""

    label: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


def write_segments(directory: Path) -> None:
    """The bytes of the contest, as kvd's store has them, and the manifest."""
    codec, records = RecordCodec(SHAPE), []
    for index in range(NUM_BLOCKS):
        payload = random.Random(index).randbytes(SHAPE.payload_bytes)
        key = BlockKey(index.to_bytes(32, "big"))
        header = codec.encode_header(key=key, payload=payload, block_index=index, provenance=0)
        records.append(RecordWrite(key=key, record=memoryview(header + payload)))
    root = directory / "segments"
    store = FileSegmentStore(root, geometry=SHAPE, config=KvdStoreConfig())
    places = []
    for start in range(0, NUM_BLOCKS, BLOCKS_PER_SEGMENT):
        segment = store.publish(records[start : start + BLOCKS_PER_SEGMENT])
        path = str(root / segment.name)
        places += [(path, HEADER_BYTES + record * SHAPE.record_bytes) for record in range(len(segment.keys))]
    store.close()
    manifest = {
        "places": places,
        "record_bytes": SHAPE.record_bytes,
        "new_records": BLOCKS_PER_SEGMENT,
        "threads": THREADS,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))


def digest_of(directory: Path) -> str:
    """Of all records as they stand on the disk."""
    digest = hashlib.sha256()
    for path, offset in json.loads((directory / "manifest.json").read_text())["places"]:
        with open(path, "rb") as file:
            digest.update(os.pread(file.fileno(), SHAPE.record_bytes, offset))
    return digest.hexdigest()


def fio_seconds(directory: Path) -> tuple[float, float]:
    """What as many bytes would take at fio's rate, and its CPU time for them: io_uring, O_DIRECT, QD16, random blocks, 1 s."""
    paths = dict.fromkeys(path for path, _ in json.loads((directory / "manifest.json").read_text())["places"])
    command = ["fio", "--name=r", "--ioengine=io_uring", "--direct=1", "--rw=randread", f"--iodepth={QUEUE_DEPTH}"]
    command += [f"--bs={SHAPE.record_bytes}", f"--filename={':'.join(paths)}", "--runtime=1", "--time_based"]
    command += ["--readonly", "--output-format=json"]
    job = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["jobs"][0]
    seconds = NUM_BYTES / float(job["read"]["bw_bytes"])
    return seconds, seconds * (float(job["usr_cpu"]) + float(job["sys_cpu"])) / 100


def measure(
    action: Action, ours: Contestant, peers: list[Contestant], *, runs: int, directory: Path
) -> dict[tuple[str, str], Row]:
    """Rows by contestant and action; the first run is a warm-up."""
    entries: list[tuple[tuple[str, str], str, Callable[[], tuple[float, float] | None]]] = []
    for name in action.ours:
        entries.append((("ours", name), NAMES[name], lambda name=name: ours.time(name)))
    for peer in peers:
        if action.peers in peer.actions:
            label = PEERS[peer.name] + (PEER_WRITE_NOTE if action.peers == "write" else "")
            entries.append(((peer.name, action.peers), label, lambda peer=peer: peer.time(action.peers)))
    if action.has_fio and shutil.which("fio"):
        entries.append(
            (("fio", "read_direct"), "fio io_uring QD16, random, not verified", lambda: fio_seconds(directory))
        )
    rows = {key: Row(label) for key, label, _ in entries}
    for run in range(runs + 1):
        turn = run % len(entries)
        for key, _, call in entries[turn:] + entries[:turn]:
            taken = call()
            if run and taken is not None:
                rows[key].seconds.append(taken[0])
                rows[key].cpu_seconds.append(taken[1])
    return rows


def table(action: Action, rows: dict[tuple[str, str], Row], *, runs: int) -> list[str]:
    """Markdown lines. Ratio: time of the peer / time of ours in the same run, so above 1 ours is faster."""
    lines = [
        "",
        f"## {action.title}",
        "",
        "| who | GB/s | CPU s per GB | ratio to kvd (p20, p80) |",
        "|---|---|---|---|",
    ]
    base = rows["ours", action.ours[0]]
    for row in rows.values():
        if len(row.seconds) < runs:
            lines.append(f"| {row.label} | failed after {len(row.seconds)} runs | | |")
            continue
        rate = action.num_bytes / statistics.median(row.seconds) / 1e9
        cpu = statistics.median(row.cpu_seconds) / action.num_bytes * 1e9
        if row is base:
            ratio = "1"
        else:
            ratios = sorted(theirs / our for theirs, our in zip(row.seconds, base.seconds, strict=True))
            deciles = statistics.quantiles(ratios, n=10)
            ratio = f"{statistics.median(ratios):.2f} ({deciles[1]:.2f}, {deciles[7]:.2f})"
        lines.append(f"| {row.label} | {rate:.2f} | {cpu:.2f} | {ratio} |")
    return lines


def heading(runs: int) -> list[str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "engine/prefill_engine/kv"], capture_output=True, text=True, check=False
    ).stdout
    model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line).split(": ")[1]
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line).split()[1]
    fio = shutil.which("fio")
    version = (
        subprocess.run([fio, "--version"], capture_output=True, text=True, check=False).stdout.strip() if fio else ""
    )
    return [
        "# kvd's store and its peers on the same bytes in one run (C20)",
        "",
        f"`make bench-peers`, {time.strftime('%Y-%m-%d')}, commit {commit.strip()}{' with changes in kv/' if dirty else ''}; "
        f"{os.cpu_count()} x {model}, {int(memory) >> 20} GiB, load {os.getloadavg()[0]:.1f} at the start, "
        f"Linux {platform.release()}, Python {platform.python_version()}, {version or 'no fio'}.",
        "",
        f"{NUM_BLOCKS} records of {SHAPE.record_bytes} B ({NUM_BYTES / 1e6:.1f} MB), {runs} runs, rotating order. Ratio: time of "
        f"the other / time of kvd's first row in the same run, so above 1 kvd is faster. CPU: user and system time of the "
        f"contestant's process.",
        "",
        "Goals of C20, for reads: LMCache >= 1.5; NIXL POSIX, which verifies nothing, >= 1.0 with our verification on, 0.75 the "
        "floor; Mooncake holds its blocks in memory and is here for comparison only.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", required=True, help="interpreter of the peers' environment")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--directory", type=Path, default=None, help="on a real disk; default: a temporary one")
    parser.add_argument("--results", type=Path, default=None, help="Markdown file to write")
    args = parser.parse_args()
    lines = heading(args.runs)
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        write_segments(directory)
        digest = digest_of(directory)
        ours = Contestant(sys.executable, "ours", directory)
        peers = [Contestant(args.peers_python, script, directory) for script in PEERS]
        everybody = [ours, *peers]
        for one in everybody:
            one.start()
            for action in [action for action in one.actions if action != "write"]:
                one.check(action, digest)
        if ours.failure:
            raise SystemExit(f"ours: {ours.failure}")
        for action in ACTIONS:
            rows = measure(action, ours, peers, runs=args.runs, directory=directory)
            lines += table(action, rows, runs=args.runs)
        for one in everybody:
            one.stop()
        failed = [f"* {PEERS[peer.name]}: {peer.failure}" for peer in peers if peer.failure]
        lines += ["", "## Not run", "", *failed] if failed else []
    text = "\n".join(lines) + "\n"
    print(text)
    if args.results is not None:
        args.results.write_text(text)


if __name__ == "__main__":
    main()
