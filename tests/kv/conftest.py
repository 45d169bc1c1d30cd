"""The fake 3FS library, compiled once per session, and a directory on a real disk."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefill_testing.segment_media import Medium, open_medium

SOURCE = Path(__file__).parent / "fake_hf3fs" / "fake_hf3fs.c"


@pytest.fixture(scope="session")
def fake_hf3fs_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library. Without a C compiler its tests are skipped; in CI that is a failure."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler: the fake of 3FS's USRBIO can't be built, and CI must not skip its tests")
        pytest.skip("no C compiler to build the fake of 3FS's USRBIO with")
    path = tmp_path_factory.mktemp("fake_hf3fs") / "libhf3fs_api_shared.so"
    command = [
        compiler,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-O1",
        "-shared",
        "-fPIC",
        "-pthread",
        str(SOURCE),
        "-o",
        str(path),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return path


class FakeHf3fs:
    """Controls of the fake: faults, pauses and counts (fake_hf3fs.c)."""

    def __init__(self, path: Path, mount: Path) -> None:
        self.path, self.mount = str(path), str(mount)
        self._library = ctypes.CDLL(str(path))
        self._library.fake_count.restype = ctypes.c_long
        self._library.fake_fault.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
        self._library.fake_reset(os.fsencode(mount))

    def count(self, name: str) -> int:
        return int(self._library.fake_count(name.encode()))

    def fault(self, kind: str, *, at: int = 1, times: int = 1, value: int = 0) -> None:
        """The at-th IO executed from now on, and `times` in all."""
        self._library.fake_fault(kind.encode(), at, times, value)

    def pause(self, paused: bool) -> None:
        self._library.fake_pause(paused)

    def restart(self) -> None:
        """The FUSE process is started again: rings made before it are dead."""
        self._library.fake_restart()

    def reorder(self) -> None:
        self._library.fake_reorder(True)

    def refuse_files(self) -> None:
        """Nothing lies on 3FS any more."""
        self._library.fake_not_hf3fs(True)

    def finish_lost(self) -> None:
        """Lost IOs are executed after all."""
        self._library.fake_finish_lost()


@pytest.fixture
def hf3fs(fake_hf3fs_path: Path, tmp_path: Path) -> FakeHf3fs:
    mount = tmp_path / "3fs"
    (mount / "3fs-virt" / "iovs").mkdir(parents=True)
    return FakeHf3fs(fake_hf3fs_path, mount)


@pytest.fixture
def disk_path(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk, for O_DIRECT; tmp_path unless that is in memory."""
    if _file_system(tmp_path) != "tmpfs":
        yield tmp_path
        return
    for base in (Path(__file__).parent, Path("/var/tmp")):
        if _file_system(base) not in ("tmpfs", "overlay") and os.access(base, os.W_OK):
            with tempfile.TemporaryDirectory(dir=base) as path:
                yield Path(path)
            return
    pytest.skip("no writable directory on a disk: O_DIRECT can't be tried")


@pytest.fixture(params=["file", "direct", "usrbio"])
def medium(request: pytest.FixtureRequest) -> Iterator[Medium]:
    """Each medium in turn."""
    yield from open_medium(request)


def _file_system(path: Path) -> str:
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1]
    return ""
