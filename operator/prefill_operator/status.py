"""Status of a pool, computed anew from pods on every pass (k8s.md 3.3).

The trap: /scale. `status.replicas` never counts spares, or an autoscaler would keep them as capacity or spend them (3.4).
"""

from collections import Counter

import msgspec

from prefill_operator.api_status import (
    LoadStatus,
    PlanStatus,
    PoolStatus,
    RedundancyStatus,
    UnhealthyPE,
    UnhealthyPod,
    VEPoolStatus,
)
from prefill_operator.conditions import Findings, build_conditions
from prefill_operator.engine_load import load_status
from prefill_operator.failures import PodState
from prefill_operator.fleet import Fleet, PodView
from prefill_operator.ledger import Ledger
from prefill_operator.messages import format_time, troubled_views
from prefill_operator.names import selector_text
from prefill_operator.plan import PoolPlan

_MAX_UNHEALTHY = 32
_MAX_TEXT = 512


def build_status(findings: Findings, ledger: Ledger) -> PoolStatus | VEPoolStatus:
    """The whole status; from the one before come only transition times, the last complete revision, and a VE pool's load
    while nothing newer is known."""
    if isinstance(findings.observed.pool.status, VEPoolStatus):
        return _encoder_status(findings, findings.observed.pool.status)
    return _prefill_status(findings, findings.observed.pool.status, ledger)


def _prefill_status(findings: Findings, previous: PoolStatus, ledger: Ledger) -> PoolStatus:
    pool, fleet, counts = findings.observed.pool, findings.fleet, _count(findings.fleet)
    update = findings.plan.revision or previous.update_revision
    return PoolStatus(
        observed_generation=pool.generation,
        device=findings.plan.device,
        replicas=min(counts.live, findings.targets.replicas),
        selector=selector_text(pool.kind, pool.name),
        total_pes=counts.live,
        ready_pes=fleet.num_serving,
        updated_pes=counts.updated,
        loading_pes=counts.loading,
        draining_pes=counts.draining,
        gpus=counts.gpus,
        current_revision=_current_revision(findings, update),
        update_revision=update,
        redundancy=_redundancy(findings),
        plan=describe_plan(findings.plan, ledger) or previous.plan,
        conditions=build_conditions(findings, previous.conditions),
        unhealthy_pes=tuple(
            UnhealthyPE(**msgspec.structs.asdict(_unhealthy(view)), ep=view.pod.ep)
            for view in troubled_views(fleet)[:_MAX_UNHEALTHY]
        ),
        not_watched=_not_watched(findings),
    )


def _encoder_status(findings: Findings, previous: VEPoolStatus) -> VEPoolStatus:
    pool, fleet, counts = findings.observed.pool, findings.fleet, _count(findings.fleet)
    update = findings.plan.revision or previous.update_revision
    return VEPoolStatus(
        observed_generation=pool.generation,
        replicas=min(counts.live, findings.targets.replicas),
        selector=selector_text(pool.kind, pool.name),
        total_ves=counts.live,
        ready_ves=fleet.num_serving,
        updated_ves=counts.updated,
        loading_ves=counts.loading,
        draining_ves=counts.draining,
        gpus=counts.gpus,
        current_revision=_current_revision(findings, update),
        update_revision=update,
        redundancy=_redundancy(findings),
        load=_encoder_load(findings, previous),
        conditions=build_conditions(findings, previous.conditions),
        unhealthy_ves=tuple(_unhealthy(view) for view in troubled_views(fleet)[:_MAX_UNHEALTHY]),
        not_watched=_not_watched(findings),
    )


def _encoder_load(findings: Findings, previous: VEPoolStatus) -> LoadStatus | None:
    """None when no VE serves: nothing is waiting there, and nobody could be asked."""
    if not findings.fleet.num_serving:
        return None
    observed = findings.observed
    return load_status(previous.load, observed.load, now=format_time(observed.now))


def _redundancy(findings: Findings) -> RedundancyStatus:
    targets = findings.targets
    return RedundancyStatus(
        desired=targets.spares,
        ready=max(0, findings.fleet.num_serving - targets.replicas),
        expected_availability=f"{targets.availability:.6f}" if targets.availability is not None else None,
        restart_seconds=targets.restart_seconds,
    )


def _not_watched(findings: Findings) -> tuple[str, ...]:
    return () if findings.observed.nodes is not None else ("nodes",)


def describe_plan(plan: PoolPlan, ledger: Ledger) -> PlanStatus | None:
    """For status.plan and the CLI; None of an infeasible plan."""
    if not plan.feasible:
        return None
    memory = plan.memory
    escalated = ledger.escalated_at if plan.source == "Escalated" and ledger.escalated_at else None
    status = PlanStatus(
        ep=plan.ep,
        source=plan.source,
        hash=plan.hash,
        engram=plan.engram,
        degraded=plan.degraded,
        kv_tokens_per_gpu=plan.kv_tokens_per_gpu,
        host_memory_per_pe=_gigabytes(plan.host_bytes_per_pod) if plan.host_bytes_per_pod else None,
        escalated_at=format_time(escalated) if escalated else None,
    )
    if memory is None:
        return status
    return msgspec.structs.replace(
        status,
        memory_per_gpu=_gigabytes(memory.need_bytes),
        weights_per_gpu=_gigabytes(memory.weights.total),
        kv_per_gpu=_gigabytes(memory.kv_bytes),
        headroom_per_gpu=_gigabytes(memory.spare_bytes),
    )


class _Counts(msgspec.Struct, frozen=True):
    live: int
    updated: int
    loading: int
    draining: int
    gpus: int


def _count(fleet: Fleet) -> _Counts:
    live = fleet.live
    leaving = fleet.select(lambda view: view.state is PodState.TERMINATING and view.holds_resources)
    return _Counts(
        live=len(live),
        updated=sum(view.is_updated for view in live),
        loading=len(fleet.in_state(PodState.LOADING, PodState.PENDING)),
        draining=len(fleet.in_state(PodState.DRAINING)) + len(leaving),
        gpus=sum(view.pod.gpus for view in fleet.views if view.holds_resources),
    )


def _current_revision(findings: Findings, update: str) -> str:
    """The revision that was last rolled out completely; without a status to tell, the one that most pods run."""
    previous = findings.observed.pool.status.current_revision
    if findings.is_rolled_out:
        return update
    if previous:
        return previous
    counts = Counter(view.pod.revision for view in findings.fleet.live)
    return max(counts, key=lambda revision: (counts[revision], revision), default=update)


def _unhealthy(view: PodView) -> UnhealthyPod:
    return UnhealthyPod(
        name=view.pod.name,
        node=view.pod.node,
        phase=view.pod.phase,
        reason=view.state,
        message=view.verdict.message[:_MAX_TEXT],
        since=format_time(view.verdict.since),
    )


def _gigabytes(num_bytes: int) -> str:
    """A quantity with one decimal, e.g. 93.4G."""
    return f"{num_bytes / 1e9:.1f}G"
