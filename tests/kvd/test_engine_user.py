"""kvd as root beside ranks of another user, with no more rights than its pod grants (a 3FS mount, k8s.md 4.9)."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefill_engine.kvd.owner import EngineUser
from prefill_plan.errors import ConfigError
from prefill_testing.kvd_process import KvdProcess

ENGINE, OTHER = 10001, 10002
# What render_sidecar grants to a kvd that is root and not privileged, less what mounting needs.
AS_IN_THE_POD = ("setpriv", "--inh-caps=-all", "--bounding-set=-all,+chown")
# The interpreter may lie where only root can read, so the user changes after the imports.
IMPORTS = """
import os, socket, sys
from prefill_testing.kvd_process import RankClient
from prefill_testing.kvd_fakes import chain
"""
USE_POOL = """
rank, keys = RankClient(sys.argv[1], owner=1), chain("k", 6)
print(rank.save(keys).stored_blocks, rank.read(rank.open(keys), keys))
"""
CONNECT = """
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(20)
connection.connect(sys.argv[1])
while connection.recv(1 << 16):
    pass
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")


def as_user(uid: int, script: str, socket: str) -> subprocess.CompletedProcess[str]:
    program = (
        f"{IMPORTS}\nos.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})\n{script}"
    )
    command = [sys.executable, "-c", program, socket]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def kvd() -> Iterator[KvdProcess]:
    """In a directory like /dev/shm: everybody's, and sticky."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder).chmod(0o1777)
        process = KvdProcess(Path(folder), wrapper=AS_IN_THE_POD, engine_uid=ENGINE)
        yield process
        process.kill()


@needs_root
def test_rank_of_the_engines_user_uses_roots_pool_and_socket_also_after_a_kill(kvd: KvdProcess) -> None:
    for name in ("kvd.sock", "pool"):
        found = (kvd.folder / name).stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (ENGINE, 0o600)
    for _ in range(2):
        done = as_user(ENGINE, USE_POOL, kvd.socket)
        assert done.stdout == "6 6\n", done.stderr[-2000:]
        kvd.kill()
        kvd.start()
    assert '"reattached": true' in kvd.log.read_text()


@needs_root
def test_others_are_kept_out(kvd: KvdProcess) -> None:
    assert "PermissionError" in as_user(OTHER, CONNECT, kvd.socket).stderr
    os.chmod(kvd.socket, 0o666)
    done = as_user(OTHER, CONNECT, kvd.socket)
    assert done.returncode == 0 or "ConnectionResetError" in done.stderr, done.stderr
    assert f'"uid": {OTHER}' in kvd.log.read_text()


@pytest.mark.parametrize(
    ("engine_uid", "own_uid", "allowed"), [(-1, 500, {0, 500}), (500, 500, {0, 500}), (ENGINE, 0, {0, ENGINE})]
)
def test_who_is_let_in(engine_uid: int, own_uid: int, allowed: set[int]) -> None:
    assert EngineUser(engine_uid, own_uid=own_uid).allowed_uids == allowed


def test_only_root_can_serve_another_user() -> None:
    with pytest.raises(ConfigError, match="engine_uid = 10001, but kvd runs as user 500"):
        EngineUser(ENGINE, own_uid=500)
