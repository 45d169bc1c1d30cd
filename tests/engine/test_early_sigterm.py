"""SIGTERM before a command serves: it ends at once, also as process 1 of a container, where an unhandled signal is ignored."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMANDS = [
    ("prefill_engine", ["serve", "--set", "model.path=/nowhere"]),
    ("prefill_engine", ["kv", "serve"]),
    ("prefill_engine", ["directory", "serve"]),
    ("prefill_operator", ["run"]),
]


def catches_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(("package", "arguments"), COMMANDS, ids=lambda value: str(value))
def test_sigterm_in_the_first_moment_ends_the_command(package: str, arguments: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", package, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),  # as the kernel treats process 1
    )
    deadline = time.monotonic() + 60
    while not catches_sigterm(process.pid):
        assert process.poll() is None, "ended before it handled SIGTERM"
        assert time.monotonic() < deadline, "SIGTERM is not handled"
    process.terminate()

    output, _ = process.communicate(timeout=60)

    assert process.returncode == 0
    assert output == b"", "it was past its first moment"
