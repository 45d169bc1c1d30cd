"""Every op call of the golden tiny model beside `ref`, on this device and on the same inputs.

What the op cases leave out (chunks, pages, candidates, pooled pairs, Engram hashes) meets real batches here.
"""

from gpu_run.sections import RELATIVE_L2, Bench

from prefill_testing.lockstep_ops import LockstepOps
from prefill_testing.tiny_comparison import run_observed
from prefill_testing.tiny_model import random_tokens

_UNEQUAL_SHARE = 1e-3
"""Of integer outputs and records: a value that rounds the other way moves a few."""


def check_tiny_model(bench: Bench) -> None:
    """Two chunks of one prompt; one verdict per op into the results' correctness."""
    ops = LockstepOps(bench.ref, bench.ops)
    run_observed(ops, bench.device, random_tokens(3, 300), chunk=160)
    verdicts: dict[str, str] = {}
    for difference in ops.differences:
        name = f"tiny model {difference.op}"
        wrong = difference.relative > RELATIVE_L2 if difference.relative else difference.unequal > _UNEQUAL_SHARE
        if wrong or difference.relative != difference.relative:
            verdicts[name] = f"{difference.output}: {difference.unequal:.2e} unequal, L2 {difference.relative:.2e}"
        else:
            verdicts.setdefault(name, "ok")
    bench.log.results.setdefault("correctness", {}).update(verdicts)
    bench.log.say(f"tiny model: {len(verdicts)} ops, {sum(v != 'ok' for v in verdicts.values())} differ from ref")
