"""Who is at the other end of kvd's Unix socket: only processes of the ranks' user, of kvd's own, or root (kv.md 7.6).

gRPC shows no credentials, but its connections are file descriptors of this process, and the kernel knows each one's peer. The
trap: a call can't be told from another's, only a connection can; so foreign connections are shut, whatever they ask.
"""

import logging
import os
import socket
import stat
import struct
from collections.abc import Callable, Set
from contextlib import suppress

logger = logging.getLogger(__name__)

_UCRED = struct.Struct("3i")  # pid, uid, gid


def peer_uid(connection: socket.socket) -> int:
    """SO_PEERCRED of a connected Unix socket."""
    return int(_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1])


class PeerCheck:
    """path: of the listening socket. uid_of: the kernel's word, replaced in tests."""

    def __init__(self, path: str, *, allowed_uids: Set[int], uid_of: Callable[[socket.socket], int] = peer_uid) -> None:
        self._path = path
        self._uid_of = uid_of
        self._allowed = allowed_uids

    def shut_foreign(self) -> int:
        """Ends the connections of foreign users; returns how many there were."""
        num_foreign = 0
        for name in os.listdir("/proc/self/fd"):
            connection = self._open_connection(int(name))
            if connection is None:
                continue
            with connection:
                uid = self._uid_of(connection)
                if uid in self._allowed:
                    continue
                num_foreign += 1
                logger.warning(
                    "connection of a foreign user shut", extra={"uid": uid, "allowed": sorted(self._allowed)}
                )
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        return num_foreign

    def _open_connection(self, fd: int) -> socket.socket | None:
        """A copy of the descriptor if it is a connection that came in on our path."""
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                return None
            connection = socket.socket(fileno=os.dup(fd))
        except OSError:
            return None
        with suppress(OSError):
            is_ours = connection.family == socket.AF_UNIX and connection.getsockname() == self._path
            if is_ours and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return connection
        connection.close()
        return None
