"""Whose socket and pool are: kvd may run as root, for a 3FS mount, while the ranks do not (kv.md 7.6).

Used by kvd's process and its listeners. The trap: root in a pod has few capabilities, CHOWN among them but not DAC_OVERRIDE,
and /dev/shm is sticky; so a pool that was given away is taken back before it is opened again (fs.protected_regular).
"""

import os

from prefill_plan.errors import ConfigError


class EngineUser:
    """engine_uid: of KvdConfig. own_uid: of this process."""

    def __init__(self, engine_uid: int, *, own_uid: int | None = None) -> None:
        """Raises ConfigError: another user than ours, and we are not root."""
        self._own_uid = os.geteuid() if own_uid is None else own_uid
        self.uid = self._own_uid if engine_uid < 0 else engine_uid
        if self._is_foreign and self._own_uid != 0:
            raise ConfigError(
                f"engine_uid = {self.uid}, but kvd runs as user {self._own_uid}, who can't give socket and pool away: expected "
                "root, or one user for both"
            )

    @property
    def allowed_uids(self) -> frozenset[int]:
        """Who may hold a connection to the socket."""
        return frozenset({0, self._own_uid, self.uid})

    def give(self, path: str) -> None:
        """Raises ConfigError."""
        self._change_owner(path, self.uid)

    def take_back(self, path: str) -> None:
        """What a predecessor of ours gave away, so that we can open it. Raises ConfigError."""
        if os.path.lexists(path):
            self._change_owner(path, self._own_uid)

    @property
    def _is_foreign(self) -> bool:
        return self.uid != self._own_uid

    def _change_owner(self, path: str, uid: int) -> None:
        if not self._is_foreign:
            return
        try:
            os.chown(path, uid, -1, follow_symlinks=False)
        except OSError as error:
            raise ConfigError(
                f"{path} can't be given to user {uid}: {error.strerror}; expected the capability CHOWN"
            ) from error
