"""Faults of a kvd process's store, below its system calls: a preloaded library obeys the files of a folder (fault_shim.c)."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).parent / "fault_shim" / "fault_shim.c"


def compile_shim(folder: Path) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler is not None, "no C compiler to build the fault shim with"
    library = folder / "fault_shim.so"
    flags = ("-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC")
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library), "-ldl"], check=True)
    return library


class FaultShim:
    """The controls of one process. calls: read, write, fsync."""

    def __init__(self, library: Path, folder: Path, *, store: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.wrapper = ("env", f"LD_PRELOAD={library}", f"KVD_FAULTS={folder}", f"KVD_STORE={store}")
        """Runs a command with the shim."""

    def hold(self, call: str) -> Callable[[], bool]:
        """Lets this call wait; returns whether one does."""
        held = self._folder / f"held-{call}"
        held.unlink(missing_ok=True)
        self._set(f"hold-{call}", "")
        return held.exists

    def fail(self, call: str, error: int, *, every: int = 1) -> None:
        self._set(f"fail-{call}", f"{error} {every}")

    def shorten(self, call: str, num_bytes: int, *, every: int = 1) -> None:
        self._set(f"short-{call}", f"{num_bytes} {every}")

    def clear(self) -> None:
        """No faults any more; what waits goes on."""
        for path in self._folder.iterdir():
            path.unlink()

    def _set(self, name: str, text: str) -> None:
        temporary = self._folder / f"{name}.new"
        temporary.write_text(text)
        temporary.rename(self._folder / name)
