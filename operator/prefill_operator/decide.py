"""The decision of one reconcile pass: pure, level-based, no memory but what is on the objects (k8s.md 4.1).

observe.py gives an Observed, plan.py the plan; apply.py does the actions in order. A second pass on what the actions lead to
yields none. The trap: an answer may come from a stale cache, so whatever is decided twice must collide at the API server:
pod names are deterministic, deletes and drains carry the UID.
"""

import msgspec

from prefill_operator.avoidance import avoided_nodes, barred_nodes, is_avoidance_vain
from prefill_operator.children import plan_children
from prefill_operator.conditions import Findings
from prefill_operator.create_block import CreateBlock, active_refusals, find_block
from prefill_operator.escalation import NO_ESCALATION, Escalation, EscalationStep, judge_escalation
from prefill_operator.events import plan_events
from prefill_operator.failures import FailureContext, PodState, Remedy, is_crash_stalled
from prefill_operator.fleet import Fleet, PodView, build_fleet
from prefill_operator.gpu_faults import judge_gpu_faults
from prefill_operator.intent import Intent, read_intent
from prefill_operator.ledger import (
    Ledger,
    ledger_text,
    longest_load,
    parse_ledger,
    record_failure,
    record_pods,
    record_replacement,
)
from prefill_operator.model import (
    Action,
    CreatePod,
    Decision,
    DeletePod,
    Observed,
    OperatorTimes,
    SetPoolAnnotation,
    StartDrain,
)
from prefill_operator.names import EP_FLOOR_ANNOTATION, LEDGER_ANNOTATION, PodIdentity, pod_name
from prefill_operator.plan import PoolPlan
from prefill_operator.pool_api import PrefillPoolSpec
from prefill_operator.refusals import refusal_end
from prefill_operator.rollout import RolloutStep, Situation, plan_rollout
from prefill_operator.status import build_status
from prefill_operator.targets import plan_targets

_RETRY_SECONDS = 1.0


def decide(observed: Observed, plan: PoolPlan, times: OperatorTimes) -> Decision:
    """What to do about one pool now, and what to say about it. A paused pool gets a status and nothing else.

    Args:
        plan: plan_pool of the same pool, with the EP floor of its annotation.
    """
    intent = read_intent(observed.pool)
    ledger = _read_ledger(observed, intent, times)
    escalation = _judge_escalation(observed, plan, ledger)
    fleet = _judge_pods(observed, plan, ledger, escalation, intent, times)
    ledger = _record_remedies(ledger, fleet, plan, observed.now, times)
    if escalation.step is EscalationStep.RAISE:
        ledger = msgspec.structs.replace(ledger, escalated_at=int(observed.now))
    refusals = active_refusals(observed, plan, times)
    block = find_block(observed, plan, fleet, ledger=ledger, escalation=escalation, refusals=refusals, times=times)
    targets = plan_targets(intent, plan, fleet, ledger, times)
    situation = Situation(
        intent=intent,
        targets=targets,
        plan=plan,
        nodes=observed.nodes,
        now=observed.now,
        times=times,
        is_create_blocked=block is not None,
        is_revision_refused=bool(observed.config_refusal) or refusals.is_of_revision,
    )
    findings = Findings(
        observed=observed,
        intent=intent,
        plan=plan,
        fleet=fleet,
        targets=targets,
        step=plan_rollout(fleet, situation),
        children=plan_children(intent, plan, observed, refusals.writes),
        escalation=escalation,
        gpu_stall=judge_gpu_faults(fleet, ledger, situation),
        refusal=refusals.pod,
        write_refusals=refusals.writes,
        block=block,
    )
    status = build_status(findings, ledger)
    actions: tuple[Action, ...] = ()
    if not intent.paused:
        actions = (*_list_writes(findings, ledger, times), *plan_events(findings, status.conditions))
    return Decision(
        actions=actions,
        status=status,
        next_wakeup=_next_wakeup(findings, block, times),
        reasons=_log_reasons(findings.step, block, escalation),
    )


def _read_ledger(observed: Observed, intent: Intent, times: OperatorTimes) -> Ledger:
    """The annotation and what pods show beyond it."""
    known = parse_ledger(observed.pool.annotations.get(LEDGER_ANNOTATION))
    own = [pod for pod in observed.pods if not pod.foreign]
    max_load = longest_load(intent.lifecycle.load_timeout_seconds)
    return record_pods(known, own, max_load_seconds=max_load, times=times)


def _judge_escalation(observed: Observed, plan: PoolPlan, ledger: Ledger) -> Escalation:
    spec = observed.pool.spec
    if not isinstance(spec, PrefillPoolSpec):
        return NO_ESCALATION
    return judge_escalation(spec, plan, ledger, pods=observed.pods, nodes=observed.nodes, now=observed.now)


def _judge_pods(
    observed: Observed, plan: PoolPlan, ledger: Ledger, escalation: Escalation, intent: Intent, times: OperatorTimes
) -> Fleet:
    barred = barred_nodes(observed.pods, observed.nodes)
    vain = frozenset(
        pod.name
        for pod in observed.pods
        if is_avoidance_vain(pod, observed.nodes, barred=barred, product=intent.gpu_product)
    )
    ready_at = [
        pod.ready_changed_at or 0.0
        for pod in observed.pods
        if pod.ready and not pod.foreign and pod.revision == plan.revision
    ]
    context = FailureContext(
        now=observed.now,
        times=times,
        nodes={node.name: node for node in observed.nodes} if observed.nodes is not None else None,
        ledger=ledger,
        escalation=escalation,
        node_lost_seconds=float(intent.lifecycle.node_lost_grace_seconds),
        is_crash_stalled=is_crash_stalled(
            ledger, revision=plan.revision, last_ready_at=max(ready_at, default=0.0), times=times
        ),
        vain_avoiders=vain,
    )
    return build_fleet(observed.pods, plan, context, min_ready_seconds=float(intent.rollout.min_ready_seconds))


def _record_remedies(ledger: Ledger, fleet: Fleet, plan: PoolPlan, now: float, times: OperatorTimes) -> Ledger:
    """What the remedies of this pass must leave behind, because their pods will be gone."""
    newest, last_ready = fleet.newest_at, fleet.last_ready_at

    def failed(ledger: Ledger, view: PodView, *, is_free: bool) -> Ledger:
        return record_failure(
            ledger, view.pod, now=now, newest_at=newest, last_ready_at=last_ready, is_free=is_free, times=times
        )

    for view in fleet.views:
        if view.state is PodState.FAILED:
            ledger = failed(ledger, view, is_free=False)
        elif view.verdict.avoids_node and view.verdict.remedy is not Remedy.NONE:
            ledger = record_replacement(ledger, view.pod, cause=view.state, now=now)
            if view.verdict.remedy is Remedy.REPLACE_NOW and view.pod.revision == plan.revision:
                ledger = failed(ledger, view, is_free=True)
        elif view.state is PodState.UNSCHEDULABLE and view.verdict.remedy is Remedy.REPLACE_NOW:
            ledger = msgspec.structs.replace(ledger, forgotten_at=int(now))
    return msgspec.structs.replace(ledger, last_incarnation=max(ledger.last_incarnation, fleet.last_incarnation))


def _list_writes(findings: Findings, ledger: Ledger, times: OperatorTimes) -> tuple[Action, ...]:
    """In the order in which they must happen: memory, config, creates, drains, deletes, leftovers."""
    actions: list[Action] = []
    text = ledger_text(ledger)
    if _must_remember(findings, text):
        actions.append(SetPoolAnnotation(key=LEDGER_ANNOTATION, value=text))
    if findings.escalation.step is EscalationStep.RAISE and findings.escalation.floor is not None:
        return (*actions, SetPoolAnnotation(key=EP_FLOOR_ANNOTATION, value=findings.escalation.floor.text()))
    actions += findings.children.ensures
    actions += _list_creates(findings, ledger, times)
    actions += _list_removals(findings, times)
    actions += findings.children.deletes
    return tuple(actions)


def _must_remember(findings: Findings, text: str) -> bool:
    """Load times and numbers stand on the pods themselves, so they alone are no reason to write until a pod goes."""
    known = findings.observed.pool.annotations.get(LEDGER_ANNOTATION, "")
    if not text or text == known:
        return False
    if findings.step.deletes or findings.step.drains:
        return True
    # Both as text can hold them: a ledger cut to 4 KiB differs from itself uncut.
    after, before = parse_ledger(text), parse_ledger(known)
    volatile = {"loads": (), "last_incarnation": 0}
    return msgspec.structs.replace(after, **volatile) != msgspec.structs.replace(before, **volatile)


def _list_creates(findings: Findings, ledger: Ledger, times: OperatorTimes) -> list[Action]:
    observed, intent, plan, step = findings.observed, findings.intent, findings.plan, findings.step
    if not step.creates:
        return []
    avoid = avoided_nodes(
        findings.fleet,
        ledger,
        observed.nodes,
        barred=barred_nodes(observed.pods, observed.nodes),
        gpus=plan.gpus,
        product=intent.gpu_product,
        now=observed.now,
        times=times,
    )
    first = ledger.last_incarnation + 1
    return [
        CreatePod(
            name=pod_name(intent.kind, intent.name, PodIdentity(revision=plan.revision, incarnation=incarnation)),
            revision=plan.revision,
            incarnation=incarnation,
            avoid_nodes=avoid,
        )
        for incarnation in range(first, first + step.creates)
    ]


def _list_removals(findings: Findings, times: OperatorTimes) -> list[Action]:
    timeout = float(findings.intent.lifecycle.drain_timeout_seconds)
    notice = min(timeout, times.maintenance_notice_seconds)
    removals: list[Action] = [
        StartDrain(
            name=removal.view.pod.name,
            uid=removal.view.pod.uid,
            timeout_seconds=notice if removal.view.state is PodState.NODE_MAINTENANCE else timeout,
            reason=removal.reason,
        )
        for removal in findings.step.drains
    ]
    removals += [
        DeletePod(name=r.view.pod.name, uid=r.view.pod.uid, grace_seconds=r.grace_seconds, reason=r.reason)
        for r in findings.step.deletes
    ]
    return removals


def _next_wakeup(findings: Findings, block: CreateBlock | None, times: OperatorTimes) -> float | None:
    now = findings.observed.now
    due = [findings.fleet.wakeup, block.until if block else None, findings.gpu_stall.until]
    due += [refusal_end(refusal, times) for refusal in findings.write_refusals]
    if findings.intent.paused:
        # What is due is not done, so only what is still to come changes anything: what pods are called.
        return min((time for time in due if time is not None and time > now), default=None)
    if not findings.deadline_exceeded:
        due.append(findings.deadline)
    for view in findings.fleet.in_state(PodState.DRAINING):
        timeout = findings.intent.lifecycle.drain_timeout_seconds
        due.append((view.pod.draining_since or now) + timeout)
        if view.pod.drain_unreachable_since is not None:
            due.append(view.pod.drain_unreachable_since + times.unreachable_seconds)
    if findings.escalation.step is EscalationStep.RAISE:
        due.append(now + _RETRY_SECONDS)
    return min((max(time, now) for time in due if time is not None), default=None)


def _log_reasons(step: RolloutStep, block: CreateBlock | None, escalation: Escalation) -> tuple[str, ...]:
    reasons = [f"{removal.view.pod.name}: {removal.reason}" for removal in (*step.deletes, *step.drains)]
    if block is not None:
        reasons.append(f"no creates: {block.reason}")
    if step.blocked is not None:
        reasons.append(f"{step.blocked}: {step.blocked_message}")
    if escalation.step is not EscalationStep.NONE:
        reasons.append(f"{escalation.step}: {escalation.message}")
    return tuple(reasons)
