"""USRBIO at its start: what is missing or does not fit is refused with a reason; and its own fsync."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from prefill_engine.kv.usrbio import UsrbioClient, force_sync
from prefill_engine.kv.usrbio_library import UsrbioLibrary
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import KvdStoreConfig
from prefill_testing.usrbio_rig import Fake, config_of


def test_a_missing_library_says_what_to_do(tmp_path: Path) -> None:
    config = KvdStoreConfig(usrbio_library=str(tmp_path / "absent.so"))

    with pytest.raises(ConfigError, match=r"absent\.so can't be opened: .*without it use store\.kind=file"):
        UsrbioClient(config)


def test_another_library_is_refused_by_the_call_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"has no hf3fs_is_hf3fs: expected the USRBIO API"):
        UsrbioLibrary("libc.so.6")


@pytest.mark.parametrize(
    ("hard", "soft", "expected"),
    [(900, 400, (400, 600)), (900, 900, (600, 600)), (600, 400, (400, 600)), (500, 400, (400, 500))],
    ids=["hard", "both", "as_wanted", "lower"],
)
def test_the_limit_of_open_files_is_lowered_before_the_library_is_opened(
    fake_hf3fs_path: Path, hard: int, soft: int, expected: tuple[int, int]
) -> None:
    """UsrbIo.cc:545: its table of descriptors is made when it is opened, as long as the hard limit is then. A process of its own:
    a hard limit does not rise again."""
    script = f"""
import ctypes, json, logging, resource, sys
from prefill_engine.kv.usrbio_library import UsrbioLibrary
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
opened = []
def open_library(path, real=ctypes.CDLL):
    opened.append(resource.getrlimit(resource.RLIMIT_NOFILE))
    return real(path)
ctypes.CDLL = open_library
records = []
handler = logging.Handler()
handler.emit = lambda record: records.append([record.old_soft, record.old_hard, record.new_soft, record.new_hard])
logging.getLogger("prefill_engine.kv.usrbio_library").addHandler(handler)
UsrbioLibrary(sys.argv[1], max_open_files=600)
print(json.dumps([opened, records]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(fake_hf3fs_path)], check=True, capture_output=True, text=True
    )

    opened, records = json.loads(done.stdout)
    assert opened == [list(expected)]
    assert records == ([[soft, hard, *expected]] if hard > 600 else [])


def test_a_path_outside_every_mount_is_refused(hf3fs: Fake, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is on no 3FS mount"):
        UsrbioClient(config_of(hf3fs, path=str(tmp_path)))


def test_a_mount_of_another_file_system_is_refused(hf3fs: Fake) -> None:
    hf3fs.refuse_files()

    with pytest.raises(ConfigError, match="is no 3FS mount"):
        UsrbioClient(config_of(hf3fs))


def test_a_mount_without_registered_memory_is_refused(hf3fs: Fake, tmp_path: Path) -> None:
    """The fake knows one mount only; the real one fails so when FUSE sees another /dev/shm."""
    with pytest.raises(ConfigError, match=r"can't be set up: .*same /dev/shm"):
        UsrbioClient(config_of(hf3fs, usrbio_mount=str(tmp_path)))


def test_a_grace_period_that_a_read_may_outlive_is_refused(hf3fs: Fake) -> None:
    with pytest.raises(ConfigError, match=r"grace_seconds = 4, expected more than the 5 s"):
        UsrbioClient(config_of(hf3fs, grace_seconds=4.0))


def test_the_sync_of_3fs_is_its_own_ioctl_and_no_quiet_fsync(tmp_path: Path) -> None:
    """_IOR('h', 11, uint32_t), as any other file system answers it."""
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="Inappropriate") as caught:
        force_sync(file.fileno())

    assert caught.value.errno == errno.ENOTTY
