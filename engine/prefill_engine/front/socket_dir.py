"""The private directory of the lanes' ipc sockets, named after its owner's pid so that a dead owner's is swept later."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "prefill-lanes-"


def make_socket_dir(parent: Path | None = None) -> Path:
    """A fresh directory (0700) for this process; removes those whose process is gone (an engine that was killed)."""
    root = parent or Path(tempfile.gettempdir())
    for path in root.glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))


def _is_running(pid: int) -> bool:
    with contextlib.suppress(PermissionError):  # somebody else's: it runs
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
