"""Which objects beside pods a pool has, by kind and name; rendering is elsewhere (k8s.md 4.2).

The trap: nothing is applied that is already as it should be, or a pool at rest would write on every pass; and an object that
holds a name of ours but belongs to somebody else is never touched.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from prefill_operator.api_parts import Actuator
from prefill_operator.intent import Intent
from prefill_operator.model import ChildKind, DeleteObject, EnsureObject, Observed, ObservedChild, WriteRefusal
from prefill_operator.names import config_map_name, object_base
from prefill_operator.plan import PoolPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStep:
    ensures: tuple[EnsureObject, ...] = ()
    """Config map first: pods mount it."""
    deletes: tuple[DeleteObject, ...] = ()
    foreign: tuple[ObservedChild, ...] = ()
    """Hold a name that we need."""


def desired_children(
    intent: Intent, plan: PoolPlan, optional_kinds: frozenset[ChildKind]
) -> tuple[tuple[ChildKind, str], ...]:
    """Kind and name of each object the pool shall have now. Without a plan none that depends on it."""
    base = object_base(intent.kind, intent.name)
    desired = [(ChildKind.SERVICE, base), (ChildKind.DISRUPTION_BUDGET, base)]
    if plan.feasible:
        desired.insert(0, (ChildKind.CONFIG_MAP, config_map_name(intent.kind, intent.name, plan.revision)))
    actuator = intent.autoscaling.actuator if intent.autoscaling else Actuator.EXTERNAL
    if plan.feasible and actuator is Actuator.HPA:
        desired.append((ChildKind.HPA, base))
    if plan.feasible and actuator is Actuator.KEDA and ChildKind.SCALED_OBJECT in optional_kinds:
        desired.append((ChildKind.SCALED_OBJECT, base))
    if intent.watches_metrics and ChildKind.POD_MONITOR in optional_kinds:
        desired.append((ChildKind.POD_MONITOR, base))
    if ChildKind.NETWORK_POLICY in optional_kinds:
        desired.append((ChildKind.NETWORK_POLICY, base))
    return tuple(desired)


def plan_children(
    intent: Intent, plan: PoolPlan, observed: Observed, refusals: Iterable[WriteRefusal] = ()
) -> ChildStep:
    """What to apply and what to remove. A config map stays while a pod of its revision exists.

    Args:
        refusals: those in force; what the API server refused is not asked for again yet, and the rest goes on.
    """
    desired = desired_children(intent, plan, observed.optional_kinds)
    found = {(child.kind, child.name): child for child in observed.children}
    withheld = {(item.kind, item.name) for item in refusals if item.is_withheld}
    ensures = [
        EnsureObject(kind=kind, name=name)
        for kind, name in desired
        if (str(kind), name) not in withheld
        and ((child := found.get((kind, name))) is None or not (child.current or child.foreign))
    ]
    in_use = {config_map_name(intent.kind, intent.name, pod.revision) for pod in observed.pods if pod.revision}
    kept = set(desired) | {(ChildKind.CONFIG_MAP, name) for name in in_use}
    deletes = [
        DeleteObject(kind=child.kind, name=child.name)
        for child in observed.children
        if not child.foreign and (child.kind, child.name) not in kept and _is_removable(child, plan)
    ]
    foreign = [child for key, child in found.items() if child.foreign and key in desired]
    return ChildStep(ensures=tuple(ensures), deletes=tuple(deletes), foreign=tuple(foreign))


def find_scaler(intent: Intent, children: Iterable[ObservedChild]) -> ObservedChild | None:
    """The HPA or ScaledObject that the actuator asks for, if it exists and is ours."""
    if intent.autoscaling is None:
        return None
    kinds = {Actuator.HPA: ChildKind.HPA, Actuator.KEDA: ChildKind.SCALED_OBJECT}
    kind = kinds.get(intent.autoscaling.actuator)
    return next((child for child in children if child.kind is kind and not child.foreign), None)


def _is_removable(child: ObservedChild, plan: PoolPlan) -> bool:
    """Without a plan only what no plan could want: scalers and config maps may be wanted again."""
    return plan.feasible or child.kind in {ChildKind.POD_MONITOR, ChildKind.NETWORK_POLICY}
