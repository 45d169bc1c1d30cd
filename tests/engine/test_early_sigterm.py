"""SIGTERM before a command serves: it ends at once, also as process 1 of a container, where an unhandled signal is ignored."""

import subprocess
import sys

import pytest

# The signal comes while the verb's module is imported. Ignored at first, as the kernel does for process 1.
SCRIPT = """
import importlib, os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from {package}.__main__ import main
importlib.import_module = lambda _name: os.kill(os.getpid(), signal.SIGTERM)
sys.argv = ["command", "{verb}"]
main()
"""


@pytest.mark.parametrize(
    ("package", "verb"),
    [
        ("prefill_engine", "serve"),
        ("prefill_engine", "kv"),
        ("prefill_engine", "directory"),
        ("prefill_operator", "run"),
    ],
)
def test_sigterm_in_the_first_moment_ends_the_command(package: str, verb: str) -> None:
    script = SCRIPT.format(package=package, verb=verb)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
