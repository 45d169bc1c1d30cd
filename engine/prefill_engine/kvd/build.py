"""Chooses kvd's store, transport and directory by its configuration: the one place that names implementations.

Called by kvd's process. Openers block and run on threads.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from prefill_engine.kv.directory import Directory, Holder
from prefill_engine.kv.pool_memory import PoolGeometry
from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_engine.kv.segments import SegmentStore
from prefill_engine.kv.transport.choose import build_transport
from prefill_engine.kv.usrbio import UsrbioClient, open_usrbio_store
from prefill_engine.kvd.directory_client import RemoteDirectory
from prefill_engine.kvd.directory_local import LocalDirectory, new_local_state
from prefill_engine.kvd.fuse_mount import is_mount_point
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import KvdConfig, KvdStoreConfig, KvdStoreKind

__all__ = ["StoreMaker", "build_directory", "build_transport"]


class StoreMaker:
    """Opens the configured store, for one geometry at a time. Owner of the USRBIO client, of which a process has one."""

    def __init__(
        self,
        config: KvdStoreConfig,
        *,
        awaits_mount: bool = False,
        make_client: Callable[[KvdStoreConfig], UsrbioClient] = UsrbioClient,
    ) -> None:
        """awaits_mount: the store lies on a mount of kvd's own, `mount` once that is known. Before it stands nothing is opened:
        what is below is this node's disk. Raises ConfigError if the configuration names no place."""
        self.mount: str | None = None
        self._config = config
        self._awaits_mount = awaits_mount
        self._make_client = make_client
        self._client: UsrbioClient | None = None
        self._making = threading.Lock()
        if config.kind is not KvdStoreKind.MEMORY and not config.path:
            raise ConfigError(f"store.path is empty; store.kind={config.kind} needs a directory")

    @property
    def is_configured(self) -> bool:
        return self._config.kind is not KvdStoreKind.MEMORY

    def open(self, geometry: PoolGeometry) -> SegmentStore:
        """Blocks. Raises ConfigError."""
        self._check_mount()
        root = Path(self._config.path)
        if self._config.kind is KvdStoreKind.USRBIO:
            client = self._obtain_client()
            return open_usrbio_store(root, geometry=geometry, config=self._config, client=client)
        return FileSegmentStore(root, geometry=geometry, config=self._config)

    def check(self) -> None:
        """What can be said of the medium before a rank has told the geometry. Blocks. Raises ConfigError."""
        self._check_mount()
        path = self._config.path
        probe = f"{path}/.kvd-probe-{os.getpid()}"
        try:
            os.makedirs(path, exist_ok=True)
            os.listdir(path)
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640))
            os.unlink(probe)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return  # a full store still serves what it has
            raise ConfigError(
                f"store.path {path} can't be used: {error.strerror}; expected a directory that this process can read and write"
            ) from error
        if self._config.kind is KvdStoreKind.USRBIO:
            self._obtain_client()

    def _obtain_client(self) -> UsrbioClient:
        """Checks and openings come from several threads."""
        with self._making:
            client = self._client
            if client is None:
                client = self._client = self._make_client(self._config)
            return client

    def _check_mount(self) -> None:
        if self._awaits_mount and (self.mount is None or not is_mount_point(self.mount)):
            raise ConfigError(f"store.path {self._config.path}: 3FS is not mounted at {self.mount or 'its place'} yet")

    @property
    def has_rings(self) -> bool:
        """Whether what it opens dies with the mount that it was opened on."""
        return self._config.kind is KvdStoreKind.USRBIO

    def forget_mount(self) -> Callable[[], None]:
        """3FS was mounted anew, or may have been: rings of the old mount are dead. What it returns ends them, and blocks; their
        stores must be closed by then."""
        client, self._client = self._client, None
        return (lambda: None) if client is None else client.close_rings


def build_directory(
    config: KvdConfig,
    holder: Holder,
    *,
    snapshot_keys: Callable[[], Iterable[bytes]],
    on_resync: Callable[[], None],
) -> Directory:
    """The directory service's client; without an address one of our own, which knows what this kvd announces."""
    if not config.directory.address:
        return LocalDirectory(new_local_state(), holder, clock=time.monotonic)
    return RemoteDirectory(
        config.directory,
        holder,
        snapshot_keys=snapshot_keys,
        on_resync=on_resync,
        tls=config.transport.tls,
    )
