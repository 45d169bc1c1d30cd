"""A vision encoder as a child process of ours: `prefill-engine ve serve` on this machine's CPU. Used by the demo.

The trap: it names its memory in /dev/shm itself, and a killed one leaves it there; whoever kills it calls remove_orphans.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from prefill_engine.local_process import LocalProcess

_OVERRIDES = ("device=cpu", "ops=ref", "server.host=127.0.0.1", "server.port=0", "server.metrics_port=0")


class LocalVe(LocalProcess):
    """endpoint: once it listens, which is before it takes images."""

    def __init__(self, model: Path, *, run_dir: Path, overrides: Sequence[str]) -> None:
        """run_dir gets the log. overrides: `--set` values."""
        command = ["env", "-u", "POD_IP", sys.executable, "-m", "prefill_engine", "ve", "serve", "--model", str(model)]
        command += ["--termination-log", str(run_dir / "ve-termination.json")]
        command += [word for setting in (*_OVERRIDES, *overrides) for word in ("--set", setting)]
        super().__init__("the vision encoder", command, log_path=run_dir / "ve.log", ready_event="ready")
        self.endpoint = ""
        self._metrics_port = 0

    def wait_listening(self, *, timeout_seconds: float) -> None:
        """Waits until engines can connect. Raises PeerError."""
        facts = self.wait_event("listening", timeout_seconds=timeout_seconds)
        self.endpoint = f"127.0.0.1:{facts['port']}"
        self._metrics_port = int(facts["metrics_port"])

    def figures(self) -> dict[str, float]:
        """Its metrics, as LocalProcess.read_metrics."""
        return self.read_metrics(self._metrics_port)
