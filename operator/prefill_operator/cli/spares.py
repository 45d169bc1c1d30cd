"""`prefill-operator spares`: how many spares an availability takes, what fewer would give, and how often one runs short."""

import argparse
import math

from prefill_operator.shortages import shortages_per_year
from prefill_operator.spares import FailureRates, availability, failure_rates, spares_for
from prefill_plan.errors import ConfigError

_MORE_ROWS = 2
_CAPPED_ROWS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, required=True, metavar="N", help="PEs that must serve")
    parser.add_argument("--target", type=float, default=0.999, metavar="SHARE", help="of time (default: 0.999)")
    parser.add_argument("--ep", type=int, choices=(2, 4, 8), default=4, help="GPUs per PE (default: 4)")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--spread-required", action="store_true", help="one PE per node, as placement SpreadRequired")
    parser.add_argument(
        "--pe-mtbf-seconds", type=float, default=604_800.0, metavar="S", help="between failures of a PE (default: 7 d)"
    )
    parser.add_argument(
        "--restart-seconds", type=float, default=900.0, metavar="S", help="from failure to Ready (default: 900)"
    )
    parser.add_argument(
        "--node-mtbf-seconds", type=float, metavar="S", help="between failures of a node (default: never)"
    )
    parser.add_argument(
        "--node-recovery-seconds",
        type=float,
        default=1200.0,
        metavar="S",
        help="restart time with a spare node, repair time without one (default: 1200)",
    )
    parser.add_argument(
        "--absent", type=int, default=0, metavar="N", help="PEs absent by plan at any time, e.g. 1 for steady rollouts"
    )


def cmd_spares(args: argparse.Namespace) -> int:
    """Exit 1: the target is out of reach."""
    _check(args)
    rates = failure_rates(
        pe_mtbf=args.pe_mtbf_seconds,
        restart=args.restart_seconds,
        node_mtbf=args.node_mtbf_seconds,
        node_recovery=args.node_recovery_seconds,
    )
    per_node = 1 if args.spread_required else max(1, args.gpus_per_node // args.ep)
    found = spares_for(args.replicas, target=args.target, pes_per_node=per_node, rates=rates, extra=args.absent)
    nodes = (
        "nodes never fail" if args.node_mtbf_seconds is None else f"a node is down {rates.node_down:.3%} of the time"
    )
    print(
        f"{args.replicas} PEs of {args.ep} GPUs, {per_node} per node; a PE is down {rates.pe_down:.3%} of the time, {nodes}"
    )
    print(f"{'spares':>6}  {'GPUs':>5}  {'availability':>12}  {'shortages a year':>16}")
    last = args.absent + _CAPPED_ROWS if found.capped else found.spares + _MORE_ROWS
    for spares in range(args.absent, last + 1):
        print(_row(args, spares, per_node=per_node, rates=rates, is_answer=spares == found.spares and not found.capped))
    if found.capped:
        print(f"target {args.target:g} is not reached with up to {found.spares} spares")
        return 1
    return 0


def _row(args: argparse.Namespace, spares: int, *, per_node: int, rates: FailureRates, is_answer: bool) -> str:
    share = availability(args.replicas, spares, pes_per_node=per_node, rates=rates, extra=args.absent)
    # PEs absent by plan are spares that are not there.
    short = shortages_per_year(
        args.replicas,
        spares - args.absent,
        pes_per_node=per_node,
        rates=rates,
        pe_mtbf=args.pe_mtbf_seconds,
        node_mtbf=args.node_mtbf_seconds,
    )
    mark = f"  <- reaches {args.target:g}" if is_answer else ""
    return f"{spares:>6}  {spares * args.ep:>5}  {share:>12.6f}  {short:>16.1f}{mark}"


def _check(args: argparse.Namespace) -> None:
    positive = {
        "--pe-mtbf-seconds": args.pe_mtbf_seconds,
        "--restart-seconds": args.restart_seconds,
        "--node-recovery-seconds": args.node_recovery_seconds,
        "--gpus-per-node": args.gpus_per_node,
    }
    if args.node_mtbf_seconds is not None:
        positive["--node-mtbf-seconds"] = args.node_mtbf_seconds
    for option, value in positive.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{option} {value:g}: must be above 0 and finite")
    if args.gpus_per_node < args.ep:
        raise ConfigError(f"--gpus-per-node {args.gpus_per_node}: one PE needs {args.ep} GPUs of one node (--ep)")
    if not 0.5 <= args.target < 1:
        raise ConfigError(f"--target {args.target:g}: must be from 0.5 to below 1")
    if not 1 <= args.replicas <= 1024:
        raise ConfigError(f"--replicas {args.replicas}: must be from 1 to 1024")
    if not 0 <= args.absent <= 64:
        raise ConfigError(f"--absent {args.absent}: must be from 0 to 64")
