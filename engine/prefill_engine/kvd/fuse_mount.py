"""Starts and watches 3FS's FUSE client, `hf3fs_fuse_main`, for kvd (kv.md 3.5, 7.5).

Used by kvd's process. The trap: a dead client leaves a mount on which every call fails; it must be unmounted before the next
one starts, and handles of the old mount are worth nothing.
"""

import asyncio
import logging
import os
import shutil
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from prefill_plan.errors import ConfigError

logger = logging.getLogger(__name__)

FUSE_BINARY = "hf3fs_fuse_main"
_POLL_SECONDS = 0.1
_RESTART_SECONDS = (1.0, 30.0)
_STOP_SECONDS = 5.0


class FuseMount:
    """config: hf3fs_fuse_main_launcher.toml. on_remount: called when the mount stands again. is_mounted: replaced in tests."""

    def __init__(
        self,
        config: Path,
        *,
        on_remount: Callable[[], None],
        binary: str = FUSE_BINARY,
        is_mounted: Callable[[str], bool] | None = None,
    ) -> None:
        """Raises ConfigError: no such program, or no mount point in the configuration."""
        found = shutil.which(binary)
        if found is None:
            raise ConfigError(
                f"fuse_config is set, but {binary} is not on the PATH: expected an image with 3FS's client, or store.kind=file "
                f"on a mount that somebody else makes"
            )
        self._command = [found, "--launcher_cfg", str(config)]
        self.mount = _mount_point(config)
        self._on_remount = on_remount
        self._is_mounted = is_mounted or is_mount_point
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self, *, seconds: float) -> None:
        """Raises ConfigError if the mount does not stand in time; the client goes on being watched."""
        await self._launch()
        self._watcher = asyncio.create_task(self._watch())
        if not await self._await_mount(seconds):
            raise ConfigError(f"{self.mount} was not mounted within {seconds:g} s by {' '.join(self._command)}")

    async def stop(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()
        await self._unmount()

    async def _watch(self) -> None:
        pause, longest = _RESTART_SECONDS
        while True:
            assert self._process is not None
            code = await self._process.wait()
            logger.error("3FS client ended; it is started again", extra={"exit_code": code, "pause_seconds": pause})
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
            try:
                await self._launch()
                if await self._await_mount(longest):
                    self._on_remount()
                    pause = _RESTART_SECONDS[0]
            except (ConfigError, OSError) as error:
                logger.error("3FS client can't be started; tried again", extra={"detail": str(error)})

    async def _launch(self) -> None:
        await self._unmount()
        os.makedirs(self.mount, exist_ok=True)
        try:
            self._process = await asyncio.create_subprocess_exec(*self._command)
        except OSError as error:
            raise ConfigError(f"{self._command[0]} can't be started: {error.strerror}") from error
        logger.info("3FS client started", extra={"pid": self._process.pid, "mount": self.mount})

    async def _await_mount(self, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while loop.time() < deadline:
            if self._is_mounted(self.mount):
                return True
            assert self._process is not None
            if self._process.returncode is not None:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return False

    async def _unmount(self) -> None:
        """Lazily, for calls into a dead mount would fail; nothing to do is fine."""
        if self._is_mounted(self.mount):
            await _run(["umount", "-l", self.mount])


async def _run(command: Sequence[str]) -> None:
    with suppress(OSError):
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        await process.wait()


def is_mount_point(path: str, *, table: str = "/proc/self/mountinfo") -> bool:
    """By the kernel's table: os.path.ismount asks the mount itself, which says no when its client is dead (ENOTCONN) and never
    answers when that hangs."""
    parent, name = os.path.split(os.path.normpath(path))
    place = os.path.join(os.path.realpath(parent), name)
    for blank in "\\ \t\n":
        place = place.replace(blank, f"\\{ord(blank):03o}")
    with open(table) as lines:
        return any(line.split(" ", 5)[4] == place for line in lines)


def _mount_point(config: Path) -> str:
    try:
        mount = tomllib.loads(config.read_text()).get("mountpoint")
    except OSError as error:
        raise ConfigError(f"fuse_config {config} can't be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"fuse_config {config} is not TOML: {error}") from error
    if not isinstance(mount, str) or not mount:
        raise ConfigError(f"fuse_config {config} has no mountpoint")
    return mount
