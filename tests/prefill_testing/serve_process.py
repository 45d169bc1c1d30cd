"""`prefill-engine serve` as a real process with fake ranks: started, waited for, signalled, its exit read."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from prefill_testing.engine_rig import TINY_MODEL

_START = "import sys; from prefill_engine.__main__ import main; sys.exit(main())"
_WAIT_SECONDS = 40.0


@dataclass(slots=True)
class ServeProcess:
    """A running engine. Use as a context manager; it is killed at the end if it still runs."""

    process: "subprocess.Popen[str]"
    folder: Path

    def __enter__(self) -> "ServeProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def ready(self) -> dict[str, object]:
        """Ports and pids, once it is ready."""
        path = self.folder / "ready.json"
        deadline = time.monotonic() + _WAIT_SECONDS
        while not path.exists():
            assert self.process.poll() is None, self.stderr()
            assert time.monotonic() < deadline, "not ready"
            time.sleep(0.02)
        return json.loads(path.read_text())

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(timeout=_WAIT_SECONDS)

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def termination(self) -> dict[str, object]:
        return json.loads((self.folder / "termination").read_bytes())


def start_serve(folder: Path, *arguments: str, fault: str = "", drain_seconds: float = 5.0) -> ServeProcess:
    """Starts an engine on free ports with a fake rank and the tiny model."""
    (folder / "termination").touch()
    command = [
        *(sys.executable, "-c", _START, "serve", "--model", str(TINY_MODEL)),
        *("--set", "server.port=0", "--set", "server.metrics_port=0", "--set", "server.probe_port=0"),
        *("--set", "replay.keep_tokens=24", "--set", f"server.drain_seconds={drain_seconds}"),
        *("--rank-entry", "prefill_testing.fake_rank:fake_rank_main", "--fault", fault),
        *("--ready-file", str(folder / "ready.json"), "--termination-log", str(folder / "termination")),
        *arguments,
    ]
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, "PLAN_HASH": "plan-7"}
        )
    return ServeProcess(process, folder)


def is_alive(pid: int) -> bool:
    """False also for a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
