"""kvd and the directory service as child processes of ours, on loopback. Used by the demo and its tests.

The trap: a Unix socket's path has 108 bytes at most, and the pool must be memory: both stand in a short directory of their own
under /dev/shm, which the caller makes and removes.
"""

import sys
from pathlib import Path

import msgspec

from prefill_engine.local_process import LocalProcess
from prefill_plan.kvd_config import KvdConfig


class LocalDirectory(LocalProcess):
    """`prefill-engine directory serve`."""

    def __init__(self, *, run_dir: Path) -> None:
        command = [sys.executable, "-m", "prefill_engine", "directory", "serve", "--host", "127.0.0.1", "--port", "0"]
        super().__init__("the directory", command, log_path=run_dir / "directory.log", ready_event="listening")
        self.address = ""

    def wait_listening(self, *, timeout_seconds: float) -> None:
        """Waits until kvds can connect; sets address. Raises PeerError."""
        self.address = f"127.0.0.1:{self.wait_ready(timeout_seconds=timeout_seconds)['port']}"


class LocalKvd(LocalProcess):
    """kvd of one node, over a slow store (demo_kvd.py). Its metrics port must be open (0 in the configuration)."""

    def __init__(self, node: str, config: KvdConfig, *, run_dir: Path, bytes_per_second: float) -> None:
        """node: what the directory knows it by. bytes_per_second: what it reads from its store at most."""
        self.config = config
        self._config_path = run_dir / "kvd.json"
        self._metrics_port = 0
        command = ["env", "-u", "POD_IP", f"POD_NAME={node}", sys.executable]
        command += ["-m", "prefill_engine.demo_kvd", "--config", str(self._config_path)]
        command += ["--bytes-per-second", str(bytes_per_second)]
        super().__init__(f"kvd of {node}", command, log_path=run_dir / "kvd.log", ready_event="ready")

    def launch(self) -> None:
        """As LocalProcess."""
        self._config_path.write_bytes(msgspec.json.encode(self.config))
        super().launch()

    def wait_listening(self, *, timeout_seconds: float) -> None:
        """Waits until ranks can connect. Raises PeerError."""
        self._metrics_port = int(self.wait_ready(timeout_seconds=timeout_seconds)["metrics_port"])

    def figures(self) -> dict[str, float]:
        """Its metrics: name with labels, as Prometheus sees it -> value.

        Raises:
            PeerError: it does not answer.
        """
        return self.read_metrics(self._metrics_port)
