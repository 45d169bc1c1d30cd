"""An engine as a child process of ours: `prefill-engine serve` on this machine's CPU. Used by the demo and end-to-end tests.

The trap: an engine is several processes; see local_process.py.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from prefill_engine.local_process import LocalProcess


class LocalEngine:
    """One engine process at a time. Use as a context manager: leaving it kills what still runs."""

    def __init__(
        self,
        model: Path,
        *,
        run_dir: Path,
        store: Path | None,
        overrides: Sequence[str],
        name: str = "the engine",
        temp_dir: Path | None = None,
    ) -> None:
        """run_dir gets the log; store: directory of the file store, None where overrides name a kvd; overrides are `--set`
        values. temp_dir: a short path for its sockets, which stay there when it is killed."""
        self.log_path = run_dir / "engine.log"
        self.endpoint = ""
        self._metrics_port = 0
        # As if outside a pod, also in one: it listens on loopback.
        command = ["env", "-u", "POD_IP", *([f"TMPDIR={temp_dir}"] if temp_dir is not None else []), sys.executable]
        command += ["-m", "prefill_engine", "serve", "--model", str(model)]
        command += ["--termination-log", str(run_dir / "termination.json")]
        settings = ["device=cpu", "ops=ref", "server.host=127.0.0.1", "server.port=0"]
        if store is not None:
            settings += ["store.kind=file", f"store.path={store}"]
        for setting in (*settings, *overrides):
            command += ["--set", setting]
        self._process = LocalProcess(name, command, log_path=self.log_path, ready_event="ready")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, *, timeout_seconds: float) -> None:
        """launch and wait_ready."""
        self.launch()
        self.wait_ready(timeout_seconds=timeout_seconds)

    def launch(self) -> None:
        """Starts the engine and returns at once."""
        self._process.launch()

    def wait_ready(self, *, timeout_seconds: float) -> None:
        """Waits until it takes requests; sets endpoint.

        Raises:
            PeerError: it ended, or was not ready in time; the message has the end of its log.
        """
        ready = self._process.wait_ready(timeout_seconds=timeout_seconds)
        self.endpoint = f"{ready['host']}:{ready['port']}"
        self._metrics_port = int(ready["metrics_port"])

    def stop(self, *, timeout_seconds: float) -> int:
        """SIGTERM, then waits for the drain; the exit code.

        Raises:
            PeerError: it did not end in time.
        """
        self._process.ask_to_end()
        return self._process.wait_ended(timeout_seconds=timeout_seconds)

    def kill(self) -> None:
        """SIGKILL to the whole group, as a machine that loses power; nothing happens if no engine runs."""
        self._process.kill()

    def figures(self) -> dict[str, float]:
        """Its metrics, as LocalProcess.read_metrics; what its rank counts comes there a moment later."""
        return self._process.read_metrics(self._metrics_port)

    def log_tail(self) -> str:
        """The last lines of the engine's log, indented."""
        return self._process.log_tail()
