"""An engine as a child process of ours: `prefill-engine serve` on this machine's CPU. Used by the demo and end-to-end tests.

The trap: an engine is several processes. The child leads a process group of its own, and ending it ends the whole group.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from prefill_plan.errors import PeerError

_POLL_SECONDS = 0.02
_LOG_TAIL_LINES = 20


class LocalEngine:
    """One engine process at a time. Use as a context manager: leaving it kills what still runs."""

    def __init__(self, model: Path, *, run_dir: Path, store: Path, overrides: Sequence[str]) -> None:
        """run_dir gets log and ready file; store is the directory of the file store; overrides are `--set` values."""
        self.log_path = run_dir / "engine.log"
        self.endpoint = ""
        self.pid = 0
        self._ready_file = run_dir / "ready.json"
        self._command = [
            sys.executable,
            "-m",
            "prefill_engine",
            "serve",
            "--model",
            str(model),
            "--ready-file",
            str(self._ready_file),
            "--termination-log",
            str(run_dir / "termination.json"),
        ]
        settings = (
            "device=cpu",
            "ops=ref",
            "server.host=127.0.0.1",
            "server.port=0",
            "store.kind=file",
            f"store.path={store}",
            *overrides,
        )
        for setting in settings:
            self._command += ["--set", setting]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def start(self, *, timeout_seconds: float) -> None:
        """Starts the engine and waits until it is ready; sets endpoint and pid.

        Raises:
            PeerError: it ended, or was not ready in time; the message has the end of its log.
        """
        self.kill()
        self._ready_file.unlink(missing_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + timeout_seconds
        while not self._ready_file.exists():
            exit_code = self._process.poll()
            if exit_code is not None:
                raise PeerError(f"the engine ended with exit code {exit_code} before it was ready\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise PeerError(f"the engine was not ready after {timeout_seconds:.0f} s\n{self.log_tail()}")
            time.sleep(_POLL_SECONDS)
        ready = json.loads(self._ready_file.read_bytes())
        self.endpoint = f"{ready['host']}:{ready['port']}"
        self.pid = self._process.pid

    def stop(self, *, timeout_seconds: float) -> int:
        """SIGTERM, then waits for the drain; the exit code.

        Raises:
            PeerError: it did not end in time.
        """
        assert self._process is not None, "start() comes first"
        self._process.terminate()
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise PeerError(
                f"the engine did not end {timeout_seconds:.0f} s after SIGTERM\n{self.log_tail()}"
            ) from error

    def kill(self) -> None:
        """SIGKILL to the whole group, as a machine that loses power; nothing happens if no engine runs."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def log_tail(self) -> str:
        """The last lines of the engine's log, indented."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join(f"  | {line}" for line in lines)
