"""Engine, kvd, peer and directory killed (-9) and frozen in every phase of a request: no wrong byte, nothing held at the end.

Real processes (prefill_testing/kill_rig.py). A few cases run with the other tests; all of them with `make test-kv-kills`.
"""

import errno
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefill_testing.fault_shim import compile_shim
from prefill_testing.kill_request import KillRequest
from prefill_testing.kill_rig import BASE_BLOCKS, PHASES, VICTIMS, KillRig
from prefill_testing.kvd_process import wait_until

# The ones that no test of a single part covers: an engine that dies while its blocks are being written, and peers in mid-pull.
QUICK = {
    ("engine", "saving", signal.SIGKILL),
    ("kvd", "loading", signal.SIGKILL),
    ("kvd", "saving", signal.SIGKILL),
    ("peer", "pull", signal.SIGKILL),
    ("directory", "open", signal.SIGKILL),
}
CASES = [
    pytest.param(
        *case,
        id=f"{case[0]}-{case[1]}-{case[2].name}",
        marks=[] if case in QUICK else [pytest.mark.kills],
    )
    for how in (signal.SIGKILL, signal.SIGSTOP)
    for phase in PHASES
    for victim in VICTIMS
    for case in [(victim, phase, how)]
]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillRig]:
    folder = tmp_path_factory.mktemp("kills")
    with KillRig(compile_shim(folder), folder, seed=5) as running:
        yield running
        running.wait_until_clean()


@pytest.mark.parametrize(("victim", "phase", "how"), CASES)
def test_loss_costs_the_hit_and_nothing_else(rig: KillRig, victim: str, phase: str, how: signal.Signals) -> None:
    tokens = rig.prepare()
    request = rig.reach(phase, tokens)
    if how is signal.SIGKILL:
        rig.kill(victim)
        rig.release(request)
        request.end()
        rig.restart(victim)
    else:
        freeze(rig, victim, request)

    if victim == "engine" and how is signal.SIGKILL:
        assert not request.is_answered
    else:
        rig.verifier.check(request)
    whole = request.is_whole and request.is_answered
    again = rig.finish(rig.near, tokens, hit_blocks=None if whole else BASE_BLOCKS)
    assert again.completed is not None
    if phase == "pull":
        # What waited for a frozen peer counts against it; a new one starts clean.
        rig.kill("peer")
        rig.restart("peer")
    rig.wait_until_clean()


def corrupt(rig: KillRig) -> None:
    """A byte of every record of the newest segments, anywhere in it."""
    for path in newest_segments(rig):
        with path.open("r+b") as file:
            for start in range(0, path.stat().st_size, 4096):
                at = start + rig.random.randrange(4096)
                file.seek(at)
                old = file.read(1)
                file.seek(at)
                file.write(bytes([old[0] ^ 1 << rig.random.randrange(8)]))


def cut(rig: KillRig) -> None:
    for path in newest_segments(rig):
        with path.open("r+b") as file:
            file.truncate(rig.random.randrange(path.stat().st_size // 2))


def newest_segments(rig: KillRig) -> list[Path]:
    """Those of the prompt that `prepare` has just sent."""
    paths = sorted(rig.store.rglob("*.seg"), key=lambda path: path.stat().st_mtime_ns)
    return paths[-3:]


FAULTS: dict[str, Callable[[KillRig], object]] = {
    "corrupt bytes": corrupt,
    "cut segments": cut,
    "gone segments": lambda rig: [path.unlink() for path in newest_segments(rig)],
    "EIO of reads": lambda rig: rig.near.faults.fail("read", errno.EIO),
    "ESTALE of every other read": lambda rig: rig.near.faults.fail("read", errno.ESTALE, every=2),
    "short reads": lambda rig: rig.near.faults.shorten("read", 700),
    "ENOSPC": lambda rig: rig.near.faults.fail("write", errno.ENOSPC),
    "EIO of writes": lambda rig: rig.near.faults.fail("write", errno.EIO),
    "short writes": lambda rig: rig.near.faults.shorten("write", 5000),
    "EIO of fsync": lambda rig: rig.near.faults.fail("fsync", errno.EIO),
}
NO_HIT = {"corrupt bytes", "cut segments", "gone segments", "EIO of reads"}
NOT_STORED = {"ENOSPC", "EIO of writes", "EIO of fsync"}


QUICK_FAULTS = {"corrupt bytes", "EIO of reads", "ENOSPC"}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[] if name in QUICK_FAULTS else [pytest.mark.kills]) for name in FAULTS]
)
def test_store_faults_are_misses(rig: KillRig, fault: str) -> None:
    """Through engine, kvd and file store (kv.md 8, bugs 4 and 8)."""
    tokens = rig.prepare()
    FAULTS[fault](rig)
    request = rig.finish(rig.near, tokens)
    rig.near.faults.clear()
    assert request.completed is not None
    assert request.completed.store is not None
    if fault in NO_HIT:
        assert request.completed.usage.cached_tokens < BASE_BLOCKS * 128
    assert (request.completed.store.blocks_failed > 0) is (fault in NOT_STORED)
    again = rig.finish(rig.far, tokens, hit_blocks=None if request.is_whole else BASE_BLOCKS)
    assert again.completed is not None
    rig.wait_until_clean()
    # A store that has failed is left alone for a while; a new kvd begins without that memory.
    rig.kill("kvd")
    rig.restart("kvd")


def freeze(rig: KillRig, victim: str, request: KillRequest) -> None:
    """Stops the victim, lets everything else go on, and wakes it up when the request needs no more of it, or only it."""
    rig.signal(victim, signal.SIGSTOP)
    if victim == "engine":
        # The other node is served meanwhile, by the same directory and store.
        rig.near.faults.clear()
        rig.signal("peer", signal.SIGCONT)
        rig.signal("directory", signal.SIGCONT)
        rig.finish(rig.far, request.tokens[: BASE_BLOCKS * 128 + 60])
    else:
        for other in {"kvd", "peer", "directory"} - {victim}:
            rig.signal(other, signal.SIGCONT)
        rig.near.faults.clear()
        request.go_on.set()
        # With kvd frozen, its report of stored blocks is what the end of the stream waits for.
        wait_until(lambda: request.is_answered or not request.is_alive(), "the answer without the frozen process")
    rig.signal(victim, signal.SIGCONT)
    request.end()
