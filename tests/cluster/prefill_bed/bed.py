"""The bed of one test session: builds what is missing once, and keeps one cluster up as long as the cases want the same kind."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import msgspec

from prefill_bed.cluster import ROOT, SCRIPTS, BedError, Cluster, Profile, end_stale, run_script
from prefill_bed.engine_pod import tiny_checkpoint
from prefill_bed.fake_kubelet import Control, Rule
from prefill_bed.waiting import until

FAKE_POD_RANGE = "10.99.0.0/16"
"""Addresses of pods that do not exist; this machine answers them, so that a fake engine can (fake_engine.py)."""

IMAGES = ("engine-light", "operator")


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeNodes:
    """Fake kubelets of a cluster without real nodes."""

    count: int = 4
    gpus: int = 8
    heartbeat: float = 2.0
    product: str = "NVIDIA-H200"


class Child:
    """A process of ours: output in a file, ended by its id."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        self._file: IO[bytes] = log.open("ab")
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
        )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        if self.running:
            self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGKILL, *, seconds: float = 30) -> int:
        """Sends the signal and waits for the end; the exit code."""
        self.send(number)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._file.close()

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)

    def resident_bytes(self) -> int:
        return resident_bytes(self.process.pid)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class FakeKubeletProcess:
    """The fake kubelets and their control file."""

    def __init__(self, cluster: Cluster, fake: FakeNodes) -> None:
        self._cluster, self._fake = cluster, fake
        self._path = cluster.directory / "fake-control.json"
        self._control = Control()
        self._write()
        run = subprocess.run(
            ["ip", "route", "replace", "local", FAKE_POD_RANGE, "dev", "lo"],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise BedError(f"cannot answer for {FAKE_POD_RANGE}: {run.stderr}")
        options = {"kubeconfig": cluster.kubeconfig, "control": self._path, "nodes": fake.count, "gpus": fake.gpus}
        options |= {"heartbeat": fake.heartbeat, "product": fake.product}
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        self._child = Child(
            [sys.executable, "-m", "prefill_bed.fake_kubelet", *arguments],
            cluster.directory / "log" / "fake-kubelet.log",
            {"PYTHONPATH": f"{SCRIPTS.parent}:{ROOT / 'engine'}"},
        )
        until("fake nodes to be ready", self._all_ready, seconds=60)

    def _all_ready(self) -> None:
        assert self._child.running, self._child.tail()
        ready = len(self._cluster.ready_nodes())
        assert ready >= self._fake.count, f"{ready} of {self._fake.count} ready"

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(self._control))
        partial.replace(self._path)

    def control(self, **fields: Any) -> None:
        """Changes fields of Control; the others keep their values."""
        self._control = msgspec.structs.replace(self._control, **fields)
        self._write()
        until("the fake kubelets to read their control file", self._obeyed, seconds=30, interval=0.05)

    def _obeyed(self) -> None:
        seen = self._path.with_suffix(".seen")
        assert seen.exists(), "never read"
        assert seen.read_bytes() == self._path.read_bytes(), "not read again yet"

    def rules(self, *rules: Rule) -> None:
        self.control(rules=list(rules))

    def kill_nodes(self, *names: str) -> None:
        """Exactly these nodes are dead from now on; none: all live."""
        self.control(dead=list(names))

    def reset(self) -> None:
        self._control = Control()
        self.control()

    def end(self) -> None:
        self._child.end()
        subprocess.run(["ip", "route", "del", "local", FAKE_POD_RANGE, "dev", "lo"], capture_output=True, check=False)


class Bed:
    """`use` gives a running cluster of the wanted kind."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._cluster: Cluster | None = None
        self._fakes: FakeKubeletProcess | None = None
        self._wanted: tuple[Profile, FakeNodes | None] | None = None

    @property
    def directory(self) -> Path:
        return self._cache / "test"

    @cached_property
    def binaries(self) -> Path:
        """$CLUSTER_BIN, else built on first use: 8 min when cold."""
        return Path(os.environ.get("CLUSTER_BIN") or run_script(SCRIPTS / "build.sh").strip())

    @property
    def cluster(self) -> Cluster:
        assert self._cluster is not None, "no cluster is up"
        return self._cluster

    @property
    def fakes(self) -> FakeKubeletProcess:
        assert self._fakes is not None, "this cluster has no fake kubelets"
        return self._fakes

    @cached_property
    def images(self) -> tuple[str, ...]:
        """Archives of the images built from this checkout."""
        run_script(SCRIPTS / "packages.sh")
        return tuple(run_script(ROOT / "images" / "build.sh", *IMAGES).split())

    @cached_property
    def helm_binary(self) -> Path:
        return Path(run_script(SCRIPTS / "helm.sh").strip()) / "helm4"

    @cached_property
    def checkpoint(self) -> Path:
        return tiny_checkpoint(self._cache)

    def use(self, profile: Profile, fake: FakeNodes | None = None) -> Cluster:
        if self._wanted != (profile, fake):
            self.end()
            end_stale(self.directory, self.binaries)
            cluster = Cluster(profile, self.binaries, self.directory)
            self._cluster = cluster
            cluster.start()
            self._fakes = FakeKubeletProcess(cluster, fake) if fake else None
            self._wanted = (profile, fake)
        return self.cluster

    def end(self) -> None:
        if self._fakes is not None:
            self._fakes.end()
        if self._cluster is not None:
            self._cluster.stop()
        self._fakes = self._cluster = self._wanted = None


def compact(value: Any) -> str:
    """JSON on one line, for messages."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
