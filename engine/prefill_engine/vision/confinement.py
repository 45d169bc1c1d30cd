"""Limits a decode worker puts on itself before it sees the first image: memory, files, and by seccomp every call it needs not.

Called once by decode_worker, when all modules are imported and all descriptors open. No network, no file opened, no process
started: such calls fail with EPERM. The trap: a kernel or a machine without seccomp filters leaves the resource limits only;
`confine` returns what holds, and the pool logs it.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from collections.abc import Mapping
from types import MappingProxyType

SECCOMP = "seccomp"
RLIMITS = "rlimits"
_MAX_OPEN_FILES = 16
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_RETURN_ALLOW, _RETURN_ERRNO = 0x7FFF0000, 0x00050000
# linux/filter.h: load a word of seccomp_data; jump if equal; return a constant.
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_OFFSET, _ARCH_OFFSET = 0, 4

_ARCHITECTURES: Mapping[str, int] = MappingProxyType({"x86_64": 0xC000003E, "aarch64": 0xC00000B7})
"""platform.machine() -> its number in linux/audit.h."""
# What CPython, malloc and the decoders call once everything is loaded: memory, time, own descriptors, own signals. Numbers in the
# order of _ARCHITECTURES, -1 where one has it not (asm/unistd_64.h, asm-generic/unistd.h).
_CALLS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "read": (0, 63),
        "write": (1, 64),
        "close": (3, 57),
        "fstat": (5, 80),
        "poll": (7, -1),
        "lseek": (8, 62),
        "mmap": (9, 222),
        "mprotect": (10, 226),
        "munmap": (11, 215),
        "brk": (12, 214),
        "rt_sigaction": (13, 134),
        "rt_sigprocmask": (14, 135),
        "rt_sigreturn": (15, 139),
        "pread64": (17, 67),
        "pwrite64": (18, 68),
        "sched_yield": (24, 124),
        "mremap": (25, 216),
        "madvise": (28, 233),
        "setitimer": (38, 103),
        "getpid": (39, 172),
        "sendto": (44, 206),
        "recvfrom": (45, 207),
        "sendmsg": (46, 211),
        "recvmsg": (47, 212),
        "exit": (60, 93),
        "gettimeofday": (96, 169),
        "getrusage": (98, 165),
        "sigaltstack": (131, 132),
        "gettid": (186, 178),
        "futex": (202, 98),
        "restart_syscall": (219, 128),
        "clock_gettime": (228, 113),
        "clock_getres": (229, 114),
        "exit_group": (231, 94),
        "tgkill": (234, 131),
        "ppoll": (271, 73),
        "getrandom": (318, 278),
        "rseq": (334, 293),
    }
)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def confine(*, memory_bytes: int, file_bytes: int) -> tuple[str, ...]:
    """Limits this process for the rest of its life, which ends with that of the thread that started it.

    Args:
        memory_bytes: of its address space; allocations beyond raise MemoryError.
        file_bytes: how far it may write into its memory file.

    Returns:
        Names of what holds: RLIMITS always, SECCOMP where the machine has it.
    """
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return (RLIMITS, SECCOMP) if _filter_calls() else (RLIMITS,)


def build_filter(machine: str) -> bytes | None:
    """The program of a machine, as struct sock_filter instructions; None for a machine that we have no table of."""
    if machine not in _ARCHITECTURES:
        return None
    arch, column = _ARCHITECTURES[machine], list(_ARCHITECTURES).index(machine)
    calls = [numbers[column] for numbers in _CALLS.values() if numbers[column] >= 0]
    instructions = [
        (_LOAD, 0, 0, _ARCH_OFFSET),
        (_JUMP_IF_EQUAL, 0, len(calls) + 1, arch),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    # Jumps count from the next instruction; the refusal stands behind the last comparison, the permission behind that.
    instructions += [(_JUMP_IF_EQUAL, len(calls) - index, 0, call) for index, call in enumerate(calls)]
    instructions += [(_RETURN, 0, 0, _RETURN_ERRNO | errno.EPERM), (_RETURN, 0, 0, _RETURN_ALLOW)]
    return b"".join(struct.pack("HBBI", *each) for each in instructions)


def _filter_calls() -> bool:
    program = build_filter(platform.machine())
    # A filter holds for the thread that sets it: with a second thread it would promise too much.
    if program is None or len(os.listdir("/proc/self/task")) != 1:
        return False
    buffer = ctypes.create_string_buffer(program, len(program))
    described = _Program(len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(described), 0, 0) == 0)
