"""Differences of two op sets in lockstep -> one verdict per op of the run's correctness table. Pure."""

from collections.abc import Collection, Iterable

from gpu_run.sections import RELATIVE_L2

from prefill_testing.lockstep_ops import Difference

_UNEQUAL_SHARE = 1e-3
"""Of integer outputs and records: a value that rounds the other way moves a few."""


def judge(differences: Iterable[Difference], *, prefix: str, exact: Collection[str] = ()) -> dict[str, str]:
    """`prefix op` -> "ok", or the last output that differs. exact: ops that only copy, so that every bit counts."""
    verdicts: dict[str, str] = {}
    for difference in differences:
        name = f"{prefix} {difference.op}"
        if difference.op in exact:
            wrong = difference.unequal > 0
        elif difference.relative:
            wrong = not difference.relative <= RELATIVE_L2  # NaN is wrong
        else:
            wrong = difference.unequal > _UNEQUAL_SHARE
        if wrong:
            verdicts[name] = f"{difference.output}: {difference.unequal:.2e} unequal, L2 {difference.relative:.2e}"
        else:
            verdicts.setdefault(name, "ok")
    return verdicts
