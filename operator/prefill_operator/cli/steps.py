"""`prefill-operator steps`: the whole creation or rollout of a pool, as the planner would do it on a cluster that never fails."""

import argparse

from prefill_operator.api import Pool
from prefill_operator.cli.pool_file import add_pool_arguments, load_pools, plan_of
from prefill_operator.cli.targets import offline_sizes, offline_targets
from prefill_operator.plan import EP_STEPS
from prefill_operator.steps import StepTimes, creation_steps, format_steps, rollout_steps
from prefill_plan.errors import ConfigError, PlanError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pool_arguments(parser)
    parser.add_argument(
        "--create", action="store_true", help="from no pod to all (default: from an older revision to this one)"
    )
    parser.add_argument("--old-ep", type=int, choices=EP_STEPS, help="EP of the older revision (default: the same)")
    defaults = StepTimes()
    parser.add_argument(
        "--load-seconds",
        type=float,
        default=defaults.load_seconds,
        metavar="S",
        help=f"from created to Ready (default: {defaults.load_seconds:g})",
    )
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=defaults.drain_seconds,
        metavar="S",
        help=f"(default: {defaults.drain_seconds:g})",
    )


def cmd_steps(args: argparse.Namespace) -> int:
    for option, value in (("--load-seconds", args.load_seconds), ("--drain-seconds", args.drain_seconds)):
        if not 0 < value < 86_400:
            raise ConfigError(f"{option} {value:g}: must be above 0 and below a day")
    times = StepTimes(load_seconds=args.load_seconds, drain_seconds=args.drain_seconds)
    for index, pool in enumerate(load_pools(args)):
        smallest = offline_sizes(pool)[0]
        print(("\n" if index else "") + _story(smallest, times, is_creation=args.create, old_ep=args.old_ep))
    return 0


def _story(pool: Pool, times: StepTimes, *, is_creation: bool, old_ep: int | None) -> str:
    plan = plan_of(pool)
    if not plan.feasible:
        raise PlanError(f"{pool.kind} {pool.name}: {plan.reason}: {plan.message}")
    targets = offline_targets(pool, plan)
    size = f"{targets.replicas} + {targets.spares} spares of EP {plan.ep}"
    if is_creation:
        steps, what = creation_steps(pool, plan, times=times), f"creation of {size}"
    else:
        steps = rollout_steps(pool, plan, old_ep=old_ep, times=times)
        what = f"rollout of {size}" + (f", before EP {old_ep}" if old_ep else "")
    head = f"{pool.kind} {pool.namespace}/{pool.name}: {what}; revision {plan.revision}"
    if not steps:
        return f"{head}\nnothing to do"
    tail = f"{len(steps)} steps, the last after {steps[-1].at:.0f} s"
    if is_creation:
        tail += f"; its loads end {times.load_seconds:.0f} s later"
    else:
        tail += f"; never fewer than {min(step.ready for step in steps)} Ready, {targets.replicas} are needed"
    return "\n".join((head, format_steps(steps), tail))
