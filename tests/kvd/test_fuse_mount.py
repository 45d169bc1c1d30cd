"""FuseMount with a stand-in for 3FS's client: a script that "mounts" by making a file."""

import asyncio
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from prefill_engine.kvd.build import StoreMaker
from prefill_engine.kvd.fuse_mount import FuseMount, is_mount_point
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import KvdStoreConfig, KvdStoreKind
from prefill_testing.kvd_fakes import GEOMETRY


def write_client(tmp_path: Path, script: str) -> Path:
    client = tmp_path / "client"
    client.write_text(f"#!/bin/sh\n{script}\n")
    client.chmod(0o755)
    return client


def make_mount(tmp_path: Path, script: str, on_remount: Callable[[], None] = lambda: None) -> FuseMount:
    config = tmp_path / "fuse.toml"
    config.write_text(f'mountpoint = "{tmp_path}/mnt"\n')
    return FuseMount(
        config,
        on_remount=on_remount,
        binary=str(write_client(tmp_path, script)),
        is_mounted=lambda path: Path(f"{path}/mounted").exists(),
    )


def test_client_that_dies_is_started_again_and_said_so(tmp_path: Path) -> None:
    async def main() -> None:
        remounted = asyncio.Event()
        script = (
            f'echo $$ > {tmp_path}/pid; echo "$@" >> {tmp_path}/calls; touch {tmp_path}/mnt/mounted; exec sleep 600'
        )
        mount = make_mount(tmp_path, script, remounted.set)
        await mount.start(seconds=30)
        assert (tmp_path / "calls").read_text() == f"--launcher_cfg {tmp_path}/fuse.toml\n"
        (tmp_path / "mnt/mounted").unlink()
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        await asyncio.wait_for(remounted.wait(), 30)
        assert len((tmp_path / "calls").read_text().splitlines()) == 2
        (tmp_path / "mnt/mounted").unlink()
        await mount.stop()

    asyncio.run(main())


@pytest.mark.parametrize("script", ["exit 3", "exec sleep 600"], ids=["ends", "never-mounts"])
def test_mount_that_does_not_stand_in_time_is_an_error(tmp_path: Path, script: str) -> None:
    async def main() -> None:
        mount = make_mount(tmp_path, script)
        with pytest.raises(ConfigError, match=r"was not mounted within 0.3 s"):
            await mount.start(seconds=0.3)
        await mount.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "has no mountpoint"), ("mountpoint = ", "is not TOML"), (None, "can't be read")],
    ids=["empty", "not-toml", "absent"],
)
def test_wrong_client_configuration_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    config = tmp_path / "fuse.toml"
    if text is not None:
        config.write_text(text)
    with pytest.raises(ConfigError, match=message):
        FuseMount(config, on_remount=lambda: None, binary="/bin/true")


def test_absent_client_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hf3fs_fuse_main is not on the PATH"):
        FuseMount(tmp_path / "fuse.toml", on_remount=lambda: None)


def test_mounts_are_known_without_a_call_into_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls into the mount of a dead client fail, into that of a hanging one they never return."""
    table = tmp_path / "mountinfo"
    table.write_text(
        "36 35 98:0 / /mnt/3fs rw,noatime shared:1 - fuse.hf3fs hf3fs rw\n37 35 0:9 / /a\\040b rw - x x rw\n"
    )

    def refuse(path: object, *_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", refuse)
        patch.setattr(os, "stat", refuse)
        found = [is_mount_point(path, table=str(table)) for path in ("/mnt/3fs", "/mnt/3fs/", "/a b", "/mnt", "/3fs")]
    assert found == [True, True, True, False, False]
    assert is_mount_point("/proc")
    assert not is_mount_point(str(tmp_path))


def test_store_is_not_opened_below_a_mount_that_does_not_stand(tmp_path: Path) -> None:
    config = KvdStoreConfig(kind=KvdStoreKind.FILE, path=str(tmp_path / "3fs" / "kv"))
    maker = StoreMaker(config, awaits_mount=True)
    with pytest.raises(ConfigError, match="not mounted at its place"):
        maker.check()
    maker.mount = str(tmp_path / "3fs")
    with pytest.raises(ConfigError, match="not mounted at"):
        maker.open(GEOMETRY)
    assert not (tmp_path / "3fs").exists()
    maker.mount = "/proc"
    maker.check()
