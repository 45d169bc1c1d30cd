"""USRBIO at its start: what is missing or does not fit is refused with a reason; and its own fsync."""

import errno
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
