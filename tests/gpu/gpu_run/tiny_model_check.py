"""Every op call of the golden tiny model beside `ref`, on this device and on the same inputs.

What the op cases leave out (chunks, pages, candidates, pooled pairs, Engram hashes) meets real batches here.
"""

from gpu_run.lockstep_verdicts import judge
from gpu_run.sections import Bench

from prefill_testing.lockstep_ops import LockstepOps
from prefill_testing.tiny_comparison import run_observed
from prefill_testing.tiny_model import random_tokens


def check_tiny_model(bench: Bench) -> None:
    """Two chunks of one prompt; one verdict per op into the results' correctness."""
    ops = LockstepOps(bench.ref, bench.ops)
    run_observed(ops, bench.device, random_tokens(3, 300), chunk=160)
    verdicts = judge(ops.differences, prefix="tiny model")
    bench.log.results.setdefault("correctness", {}).update(verdicts)
    bench.log.say(f"tiny model: {len(verdicts)} ops, {sum(v != 'ok' for v in verdicts.values())} differ from ref")
