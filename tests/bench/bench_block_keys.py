"""Time of the block-key chain of the worked example (781 blocks); goal < 2 ms (issue: one prompt of 100,000 tokens).

    python tests/bench/bench_block_keys.py [--runs N]

Checks the keys against the definition first. One process, one core; nothing else is in the figure.
"""

import argparse
import hashlib
import platform
import random
import statistics
import time

from prefill_plan.block_keys import ImageDigest, block_keys

_GOAL_MS = 2.0
_PROMPT_TOKENS = 100_000


def chain_of(root: bytes, token_ids: bytes) -> list[bytes]:
    """The definition of kv.md 2.2 without images."""
    keys = [root]
    for start in range(0, len(token_ids) - 511, 512):
        keys.append(hashlib.sha256(keys[-1] + token_ids[start : start + 512]).digest())
    return keys[1:]


def time_runs(runs: int, *, images: list[ImageDigest]) -> list[float]:
    """Milliseconds per run; every run has another prompt, so no cache helps."""
    root = bytes(32)
    milliseconds = []
    for run in range(runs):
        token_ids = random.Random(run).randbytes(4 * _PROMPT_TOKENS)
        started = time.perf_counter_ns()
        keys = block_keys(root, token_ids, images=images)
        milliseconds.append((time.perf_counter_ns() - started) / 1e6)
        if not images and list(keys) != chain_of(root, token_ids):
            raise SystemExit(f"run {run}: keys differ from the definition")
    return milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    runs = parser.parse_args().runs
    screenshot = ImageDigest(start=97_000, length=968, content_key=bytes(32))
    blocks = _PROMPT_TOKENS // 128
    print(f"block keys, {blocks} blocks, {runs} runs, Python {platform.python_version()}, {platform.machine()}")
    for name, images in (("text", []), ("one screenshot", [screenshot])):
        milliseconds = time_runs(runs, images=images)
        deciles = statistics.quantiles(milliseconds, n=10)
        median = statistics.median(milliseconds)
        verdict = "meets" if median < _GOAL_MS else "misses"
        print(
            f"{name:15s} median {median:.3f} ms, p20 {deciles[1]:.3f}, p80 {deciles[7]:.3f}: "
            f"{verdict} the goal of {_GOAL_MS:g} ms"
        )


if __name__ == "__main__":
    main()
