"""A child process of ours that says in lines on its standard output how far it is. Used by LocalEngine, local_kv and local_ve.

The traps: a child may have children, so it leads a process group of its own and ending it ends the group; Ctrl-C reaches the
terminal's foreground group only, so whoever starts children must end them, and must not be interrupted while it does.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from prefill_plan.errors import PeerError

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS = 0.02
_METRICS_SECONDS = 5.0
_LOG_TAIL_LINES = 20


class LocalProcess:
    """One process at a time. name: "the engine", for messages. ready_event: of the line that means ready. log_path: gets what it
    writes to standard error, of all its lives."""

    def __init__(self, name: str, command: Sequence[str], *, log_path: Path, ready_event: str) -> None:
        self.name = name
        self.log_path = log_path
        self.pid = 0
        self._command = list(command)
        self._ready_event = ready_event
        self._out_path = log_path.with_suffix(".out")
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Starts it and returns at once."""
        self.kill()
        with held_signals(), self.log_path.open("ab") as log, self._out_path.open("wb") as out:
            self._process = subprocess.Popen(self._command, stdout=out, stderr=log, start_new_session=True)
            self.pid = self._process.pid

    def wait_ready(self, *, timeout_seconds: float) -> dict[str, Any]:
        """What its ready line says.

        Raises:
            PeerError: it ended, or was not ready in time; the message has the end of its log.
        """
        return self.wait_event(self._ready_event, timeout_seconds=timeout_seconds)

    def wait_event(self, name: str, *, timeout_seconds: float) -> dict[str, Any]:
        """As wait_ready, for another line than the ready one."""
        assert self._process is not None, "launch() comes first"
        deadline = time.monotonic() + timeout_seconds
        while True:
            exit_code = self._process.poll()
            for line in self._out_path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n") and (facts := json.loads(line)).get("event") == name:
                    return dict(facts)
            if exit_code is not None:
                raise PeerError(f"{self.name} ended with exit code {exit_code} before it was {name}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise PeerError(f"{self.name} was not {name} after {timeout_seconds:.0f} s\n{self.log_tail()}")
            time.sleep(_POLL_SECONDS)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ask_to_end(self) -> None:
        """SIGTERM; nothing happens if it does not run."""
        if self._process is not None:
            self._process.terminate()

    def wait_ended(self, *, timeout_seconds: float) -> int:
        """Its exit code.

        Raises:
            PeerError: it did not end in time.
        """
        assert self._process is not None, "launch() comes first"
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise PeerError(
                f"{self.name} did not end {timeout_seconds:.0f} s after SIGTERM\n{self.log_tail()}"
            ) from error

    def kill(self) -> None:
        """SIGKILL to the whole group, as a machine that loses power; nothing happens if it does not run."""
        if self._process is None:
            return
        with held_signals():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def read_metrics(self, port: int) -> dict[str, float]:
        """What it exports at this port of loopback: name with labels, as Prometheus sees it -> value.

        Raises:
            PeerError: it does not answer.
        """
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_METRICS_SECONDS) as answer:
                text = answer.read().decode()
        except OSError as error:
            raise PeerError(f"{self.name} does not answer at its metrics port: {error}\n{self.log_tail()}") from error
        rows = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in rows}

    def log_tail(self) -> str:
        """The last lines of its log, indented."""
        if not self.log_path.exists():
            return "  | (no log)"
        lines = self.log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join(f"  | {line}" for line in lines)


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Signals that would end us come after the block: a child between fork and our knowing of it would be left behind.

    Handlers are Python's and are not inherited by the child, as a mask would be. No effect outside the main thread, where
    no signal arrives.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        pending.append(number)

    previous = {each: signal.signal(each, note) for each in ENDING_SIGNALS}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)
        for number in pending:
            signal.raise_signal(number)
