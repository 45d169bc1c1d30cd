"""How many pods a pool shall have: N, the spares, and what quota leaves of both."""

from dataclasses import dataclass

from prefill_operator.api_parts import Placement
from prefill_operator.fleet import Fleet
from prefill_operator.intent import Intent
from prefill_operator.ledger import Ledger, load_seconds
from prefill_operator.model import OperatorTimes
from prefill_operator.names import Reason
from prefill_operator.plan import PoolPlan
from prefill_operator.spares import expected_availability, percentile_90, plan_spares


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    replicas: int
    """N."""
    spares: int
    """S after all caps: what status shows as desired."""
    total: int
    """W = N + S, or less where quota does not allow N."""
    cap: Reason | None
    """Why there are fewer spares than wanted."""
    quota_message: str
    """Why not even N is allowed; "" otherwise."""
    availability: float | None
    restart_seconds: int | None
    """p90 of the measured loads."""
    per_node: int
    """PEs that share a failure domain."""


def plan_targets(intent: Intent, plan: PoolPlan, fleet: Fleet, ledger: Ledger, times: OperatorTimes) -> Targets:
    """N, S and W. Spares of a pool scaled to zero are none."""
    measured = percentile_90(load_seconds(ledger))
    per_node = _pes_per_node(intent, plan, fleet)
    wanted = plan_spares(
        intent.redundancy,
        replicas=intent.replicas,
        pes_per_node=per_node,
        measured_restart=measured,
        default_restart=times.default_restart_seconds,
    )
    limit, quota_message = _quota_limit(intent, plan)
    total = min(intent.replicas + wanted.spares, limit)
    spares = max(0, total - intent.replicas)
    availability = wanted.availability
    if spares < wanted.spares:
        availability = expected_availability(
            intent.redundancy,
            replicas=intent.replicas,
            spares=spares,
            pes_per_node=per_node,
            measured_restart=measured,
            default_restart=times.default_restart_seconds,
        )
    by_quota = Reason.CAPPED_BY_QUOTA if spares < wanted.spares else None
    return Targets(
        replicas=intent.replicas,
        spares=spares,
        total=total,
        cap=by_quota or (Reason.CAPPED_BY_MAX_SPARES if wanted.capped else None),
        quota_message=quota_message if total < intent.replicas else "",
        availability=availability,
        restart_seconds=round(measured) if measured is not None else None,
        per_node=per_node,
    )


def _pes_per_node(intent: Intent, plan: PoolPlan, fleet: Fleet) -> int:
    """The true placement where pods run, per revision so that a rollout does not count twice; else what Pack would give.

    Adding pods never lowers it, so the number of spares cannot oscillate.
    """
    if intent.scheduling.placement is Placement.SPREAD_REQUIRED:
        return 1
    counts: dict[tuple[str, str], int] = {}
    for view in fleet.active:
        if view.pod.node:
            key = (view.pod.node, view.pod.revision)
            counts[key] = counts.get(key, 0) + 1
    if counts:
        return max(counts.values())
    return max(1, intent.gpus_per_node // max(1, plan.ep))


def _quota_limit(intent: Intent, plan: PoolPlan) -> tuple[int, str]:
    """Most pods that quota allows at the planned size, and the sentence that says so."""
    limits = []
    if intent.max_pods is not None:
        limits.append((intent.max_pods, f"quota.max{intent.noun}s = {intent.max_pods}"))
    if intent.max_gpus is not None and plan.gpus:
        pods = intent.max_gpus // plan.gpus
        limits.append((pods, f"quota.maxGPUs = {intent.max_gpus}, {pods} {intent.noun}s of {plan.gpus} GPUs"))
    if not limits:
        return 1 << 30, ""
    limit, text = min(limits)
    return limit, f"{intent.replicas} {intent.noun}s wanted, {text}"
