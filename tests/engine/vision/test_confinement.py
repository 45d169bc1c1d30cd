"""What a confined process can't do any more, tried in a child; and the filter's numbers against the kernel's headers."""

import json
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from prefill_engine.vision.confinement import SECCOMP, build_filter

HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
GENERIC_HEADER = Path("/usr/include/asm-generic/unistd.h")
ATTEMPTS = {
    "internet socket": "socket.socket(socket.AF_INET)",
    "unix socket": "socket.socket(socket.AF_UNIX)",
    "resolve": "socket.socketpair()",
    "read a file": "open('/etc/hostname')",
    "write a file": "open('written', 'w')",
    "list files": "os.listdir('/')",
    "fork": "os.fork()",
    "start a program": "os.execv('/bin/true', ['true'])",
    "thread": "threading.Thread(target=int).start()",
    "signal another": "os.kill(os.getppid(), 0)",
    "unlimit itself": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "make memory files": "os.memfd_create('more')",
    "write far into its file": "os.pwrite(file, b'x', 1 << 21)",
    "much memory": "bytearray(1 << 30)",
}
PROGRAM = """
import json, os, resource, socket, sys, threading
from prefill_engine.vision.confinement import confine
attempts = {attempts!r}
file = os.memfd_create("own")
codes = {{name: compile(text, name, "eval") for name, text in attempts.items()}}
enforced = confine(memory_bytes=1 << 30, file_bytes=1 << 20)
outcomes = {{}}
for name, code in codes.items():
    try:
        eval(code)
        outcomes[name] = "done"
    except BaseException as error:
        outcomes[name] = type(error).__name__
os.pwrite(file, b"x" * 4096, 0)
outcomes["own file"] = len(os.pread(file, 4096, 0))
print(json.dumps([enforced, outcomes]))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.skipif(build_filter(platform.machine()) is None, reason="no filter for this machine")
def test_a_confined_process_can_only_compute_in_its_own_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(attempts=ATTEMPTS)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    enforced, outcomes = json.loads(done.stdout)
    assert SECCOMP in enforced
    assert outcomes.pop("own file") == 4096
    assert outcomes.pop("much memory") == "MemoryError"
    assert outcomes.pop("write far into its file") == "OSError"
    assert outcomes.pop("thread") == "RuntimeError"
    assert set(outcomes.values()) <= {"PermissionError", "ValueError"}
    assert not (tmp_path / "written").exists()


def allowed(machine: str) -> tuple[int, list[int]]:
    """Architecture and calls that a filter lets through, by running it on every number below 1,024."""
    program = build_filter(machine)
    assert program is not None
    instructions = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    arch = instructions[1][3]
    return arch, [number for number in range(1024) if run(instructions, arch, number) == 0x7FFF0000]


def run(instructions: list[tuple[int, int, int, int]], arch: int, number: int) -> int:
    """A BPF machine that knows the three instructions of the filter."""
    at, word = 0, 0
    while True:
        code, if_equal, if_not, value = instructions[at]
        at += 1
        match code:
            case 0x20:
                word = {0: number, 4: arch}[value]
            case 0x15:
                at += if_equal if word == value else if_not
            case 0x06:
                return value


def test_filter_refuses_other_architectures_and_numbers() -> None:
    program = build_filter("x86_64")
    assert program is not None
    instructions = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    refused = 0x00050001
    assert run(instructions, 0x40000003, 0) == refused
    assert run(instructions, 0xC000003E, 0x40000000) == refused
    assert run(instructions, 0xC000003E, 41) == refused
    assert run(instructions, 0xC000003E, 0) == 0x7FFF0000
    assert build_filter("riscv64") is None


FORBIDDEN = (
    "socket",
    "connect",
    "openat",
    "open",
    "execve",
    "clone",
    "clone3",
    "fork",
    "ptrace",
    "io_uring_setup",
    "bpf",
)


@pytest.mark.parametrize(("machine", "header"), [("x86_64", HEADER), ("aarch64", GENERIC_HEADER)])
def test_filter_numbers_are_the_kernels(machine: str, header: Path) -> None:
    if not header.exists():
        pytest.skip(f"no {header} here")
    text = header.read_text()
    names: dict[int, set[str]] = {}
    for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text):
        names.setdefault(int(number), set()).add(name)
    _, calls = allowed(machine)
    assert 34 <= len(calls) <= 40
    everything = {name for call in calls for name in names[call]}
    assert {
        "read",
        "write",
        "mmap",
        "futex",
        "pread64",
        "pwrite64",
        "recvfrom",
        "sendto",
        "setitimer",
        "exit_group",
    } <= everything
    assert everything & set(FORBIDDEN) == set()
