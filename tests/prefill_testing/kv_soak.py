"""The soak: random requests with shared prefixes on two nodes, while processes die and the store fails. Every answer is verified.

    python -m prefill_testing.kv_soak --minutes 10 --seed 1     (make soak-kv)

Prints its seed at once and a table of counts at the end; exit code 1 on a wrong byte, an unexplained failure or a leak. Prompts
branch off a few trunks, so that requests share blocks; trunks are replaced, and pools are small, so that everything turns over.
"""

import argparse
import errno
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from prefill_plan.kv_layout import BLOCK_TOKENS
from prefill_testing.fault_shim import compile_shim
from prefill_testing.kill_request import KillRequest
from prefill_testing.kill_rig import ENGINE, KillRig, Node

NUM_TRUNKS = 5
TRUNK_TOKENS, MAX_TOKENS = 1100, 1900
ENGINE_SETTINGS = (*ENGINE, "kv.pool_tokens=6144", "max_context_tokens=2048")
POOL = {"pool_bytes": 2 << 20, "snapshot_bytes": 1 << 18}
_ERRORS = {"read": (errno.EIO, errno.ESTALE), "write": (errno.ENOSPC, errno.EIO), "fsync": (errno.EIO,)}
_STEPS = {
    "request": 30,
    "kill": 6,
    "freeze": 5,
    "fail": 4,
    "short": 3,
    "corrupt": 6,
    "cut": 2,
    "unlink": 2,
    "new trunk": 3,
}
_FREEZE_SECONDS = 3.0
"""Less than what makes a silent rank count as wedged."""


@dataclass(slots=True)
class Trunk:
    """asked: prompts that were answered. replays: (prompt, hit) of those whose blocks after the hit descend from a replay."""

    tokens: list[int]
    asked: list[list[int]] = field(default_factory=list)
    replays: list[tuple[list[int], int]] = field(default_factory=list)

    def exact_blocks(self, tokens: Sequence[int]) -> int | None:
        """Leading blocks of a prompt that no replay has touched; None = all."""
        limits = [
            hit // BLOCK_TOKENS for other, hit in self.replays if _shared_blocks(other, tokens) > hit // BLOCK_TOKENS
        ]
        return min(limits, default=None)

    def replayed_hits(self, tokens: Sequence[int]) -> set[int]:
        """Where the prompt may find the snapshot of a replay."""
        return {hit for other, hit in self.replays if _shared_blocks(other, tokens) >= hit // BLOCK_TOKENS}


def _shared_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length) // BLOCK_TOKENS


class Soak:
    """wrong: what must not have happened."""

    def __init__(self, rig: KillRig, *, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._random = random.Random(seed)
        self._rig = rig
        self._trunks = [self._new_trunk() for _ in range(NUM_TRUNKS)]

    def run(self, *, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            (name,) = self._random.choices(list(_STEPS), list(_STEPS.values()))
            self.counts[f"step {name}"] += 1
            self._step(name)
        self._check_clean()

    def _step(self, name: str) -> None:
        match name:
            case "request":
                self._requests(lambda: None)
            case "kill":
                self._requests(self._kill)
                self._check_clean()
            case "freeze":
                self._requests(self._freeze)
                self._check_clean()
            case "fail" | "short":
                node, call = self._random.choice(self._nodes), self._random.choice(list(_ERRORS))
                if name == "fail":
                    node.faults.fail(call, self._random.choice(_ERRORS[call]), every=self._random.randint(1, 3))
                else:
                    node.faults.shorten(call, self._random.randrange(1, 9000), every=self._random.randint(1, 3))
                self._requests(lambda: None)
                node.faults.clear()
            case "new trunk":
                self._trunks[self._random.randrange(NUM_TRUNKS)] = self._new_trunk()
            case _:
                self._damage(name)

    # --- requests
    def _requests(self, disturb: Callable[[], Node | None]) -> None:
        """One to three at once, each of another trunk, to either node; disturb: something in the middle of them, returns the
        node whose engine it killed."""
        sent = []
        for trunk in self._random.sample(self._trunks, self._random.randint(1, 3)):
            tokens = self._next_prompt(trunk)
            node = self._random.choice(self._nodes)
            request = KillRequest(node.engine.endpoint, tokens, hit_blocks=trunk.exact_blocks(tokens))
            sent.append((trunk, node, request))
        lost = disturb()
        for trunk, node, request in sent:
            request.end()
            self._judge(trunk, request, may_fail=lost is node)
        if lost is not None:
            lost.engine.start(timeout_seconds=180.0)

    def _next_prompt(self, trunk: Trunk) -> list[int]:
        """A prompt once more, one turn longer, or a new branch of the trunk."""
        if trunk.asked and self._random.random() < 0.6:
            tokens = self._random.choice(trunk.asked[-4:])
            more = self._random.randrange(1, 300) if self._random.random() < 0.7 else 0
        else:
            tokens = trunk.tokens[: self._random.randrange(100, TRUNK_TOKENS)]
            more = self._random.randrange(300)
        return [*tokens, *self._rig.prompt(more)][:MAX_TOKENS]

    def _judge(self, trunk: Trunk, request: KillRequest, *, may_fail: bool) -> None:
        if not request.is_answered or request.completed is None:
            if may_fail:
                self.counts["lost with their engine"] += 1
            else:
                self.wrong.append(f"no answer: {request.failure or request.events[-3:]}")
            # Whether what it left descends from a replay is not known.
            self._trunks[self._trunks.index(trunk)] = self._new_trunk()
            return
        usage = request.completed.usage
        try:
            is_replay = self._rig.verifier.check(request, replayed_hits=trunk.replayed_hits(request.tokens))
        except AssertionError as error:
            self.wrong.append(f"wrong bytes: {error}")
            return
        trunk.asked.append(request.tokens)
        if is_replay:
            trunk.replays.append((request.tokens, usage.cached_tokens))
        kind = "replayed" if is_replay else "exact hits" if usage.cached_tokens else "cold"
        self.counts[f"answers {kind}"] += 1
        self.counts["tokens from a cache"] += usage.cached_tokens
        self.counts["tokens computed"] += usage.computed_tokens

    # --- disturbances
    def _kill(self) -> Node | None:
        """Engine, kvd (its pool with it, now and then), or directory, at any moment of the requests."""
        node = self._random.choice(self._nodes)
        victim = self._random.choice(("engine", "kvd", "kvd and pool", "directory"))
        time.sleep(self._random.uniform(0.0, 0.6))
        self.counts[f"killed {victim}"] += 1
        match victim:
            case "engine":
                node.engine.kill()
                return node
            case "directory":
                self._rig.directory.kill()
                self._rig.directory.start()
            case _:
                self.counts += self._rig.store_counts(node)
                node.kvd.kill()
                if victim == "kvd and pool":
                    Path(str(node.kvd.config["pool_path"])).unlink()
                node.kvd.start()
        return None

    def _freeze(self) -> None:
        node = self._random.choice(self._nodes)
        victim = self._random.choice(("engine", "kvd", "directory"))
        send = {
            "engine": node.signal_engine,
            "kvd": node.kvd.process.send_signal,
            "directory": self._rig.directory.signal,
        }[victim]
        time.sleep(self._random.uniform(0.0, 0.4))
        self.counts[f"froze {victim}"] += 1
        send(signal.SIGSTOP)
        time.sleep(self._random.uniform(0.05, _FREEZE_SECONDS))
        send(signal.SIGCONT)

    def _damage(self, how: str) -> None:
        segments = sorted(self._rig.store.rglob("*.seg"))
        if not segments:
            return
        path = self._random.choice(segments)
        match how:
            case "unlink":
                path.unlink()
            case "cut":
                with path.open("r+b") as file:
                    file.truncate(self._random.randrange(path.stat().st_size))
            case _:
                with path.open("r+b") as file:
                    file.seek(self._random.randrange(path.stat().st_size))
                    old = file.read(1)
                    if old:
                        file.seek(-1, 1)
                        file.write(bytes([old[0] ^ 1 << self._random.randrange(8)]))

    # --- parts
    @property
    def _nodes(self) -> tuple[Node, Node]:
        return self._rig.near, self._rig.far

    def _new_trunk(self) -> Trunk:
        return Trunk(self._rig.prompt(TRUNK_TOKENS))

    def _check_clean(self) -> None:
        try:
            self._rig.wait_until_clean()
            self.counts["found clean"] += 1
        except AssertionError as error:
            self.wrong.append(f"leak: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes", flush=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kv-soak-") as name:
        folder = Path(name)
        rig = KillRig(compile_shim(folder), folder, seed=arguments.seed, engine=ENGINE_SETTINGS, kvd=POOL)
        with rig:
            soak = Soak(rig, seed=arguments.seed)
            soak.run(seconds=arguments.minutes * 60)
            counts = soak.counts + rig.store_counts(rig.near) + rig.store_counts(rig.far)
    for title in sorted(counts):
        print(f"{title:<34} {counts[title]:>9,}")
    print(f"{'WRONG':<34} {len(soak.wrong):>9,}")
    for text in soak.wrong:
        print(f"  {text}")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
