"""The system calls that stores make, as values, so that a test can hand in ones that fail."""

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_AT_FDCWD = -100  # linux/fcntl.h
_RENAME_NOREPLACE = 1  # linux/fs.h


def rename_new(source: str, target: str) -> None:
    """Renames `source` unless `target` exists, in one step (renameat2, which Python does not offer).

    Raises:
        FileExistsError: the target exists.
        OSError: any other error; ENOSYS or EINVAL where the C library or the file system has no such call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        renameat2 = libc.renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source, None, target) from None
    if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), source, None, target)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOperations:
    """Each field behaves as the os function of its name; rename_new as above."""

    open: Callable[[str, int, int], int] = os.open
    writev: Callable[[int, Sequence[memoryview]], int] = os.writev
    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    fsync: Callable[[int], None] = os.fsync
    close: Callable[[int], None] = os.close
    stat: Callable[[str], os.stat_result] = os.stat
    mkdir: Callable[[str, int], None] = os.mkdir
    link: Callable[[str, str], None] = os.link
    rename: Callable[[str, str], None] = os.rename
    rename_new: Callable[[str, str], None] = rename_new
    rmdir: Callable[[str], None] = os.rmdir
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs
    unlink: Callable[[str], None] = os.unlink
    listdir: Callable[[str], list[str]] = os.listdir
