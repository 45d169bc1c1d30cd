"""The cross-field rules of the CRDs in Python, for manifests that have not met an API server.

The API server checks the same rules in CEL with the same messages; a test keeps the two sets equal. Objects stored before a
rule existed are caught here too. Rules that compare with the old object (immutable fields) exist in CEL only.
The rules of a PrefillPool are in pool_rules.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from prefill_operator.api_parts import AutoscalingSpec, HostPathSource, PvcSource, RolloutSpec
from prefill_operator.errors import PoolInvalid
from prefill_operator.names import MAX_POOL_NAME
from prefill_operator.ve_api import VEPoolSpec

_S = TypeVar("_S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Generic[_S]):
    path: str
    """Where the user should look first."""
    message: str
    """As in the CRD, word by word."""
    holds: Callable[[_S], bool]
    """Called only if all rules before it hold."""


NAME_RULES: tuple[Rule[str], ...] = (
    Rule(
        path="metadata.name",
        message="name must not exceed 40 characters (pod names are derived from it)",
        holds=lambda name: len(name) <= MAX_POOL_NAME,
    ),
    Rule(
        path="metadata.name",
        message="name must start with a letter and hold only a-z, 0-9 and - (a Service is named after it)",
        holds=lambda name: re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) is not None,
    ),
)

VE_RULES: tuple[Rule[VEPoolSpec], ...] = (
    Rule(
        path="spec.replicas",
        message="replicas must not exceed quota.maxVEs",
        holds=lambda spec: spec.quota.max_ves is None or spec.replicas <= spec.quota.max_ves,
    ),
    Rule(
        path="spec.autoscaling.maxReplicas",
        message="autoscaling.maxReplicas must not exceed quota.maxVEs",
        holds=lambda spec: is_capped(spec.autoscaling, spec.quota.max_ves),
    ),
    Rule(
        path="spec.model.source",
        message="exactly one of pvc, hostPath, image",
        holds=lambda spec: count_set(spec.model.source.pvc, spec.model.source.host_path, spec.model.source.image) == 1,
    ),
    Rule(
        path="spec.model.source",
        message="path must not contain ..",
        holds=lambda spec: stays_below(spec.model.source.pvc, spec.model.source.host_path),
    ),
    Rule(
        path="spec.batching.maxPatchesPerImage",
        message="batching.maxPatchesPerImage must not exceed maxPatchesPerBatch",
        holds=lambda spec: spec.batching.max_patches_per_image <= spec.batching.max_patches_per_batch,
    ),
    Rule(
        path="spec.balancing.maxPendingPatchesPerVE",
        message="balancing.maxPendingPatchesPerVE must not be below batching.maxPatchesPerImage",
        holds=lambda spec: (
            spec.balancing.max_pending_patches_per_ve is None
            or spec.balancing.max_pending_patches_per_ve >= spec.batching.max_patches_per_image
        ),
    ),
    Rule(
        path="spec.autoscaling.minReplicas",
        message="minReplicas must not exceed maxReplicas",
        holds=lambda spec: is_ordered(spec.autoscaling),
    ),
    Rule(
        path="spec.rollout",
        message="maxSurge and maxUnavailable must not both be 0",
        holds=lambda spec: can_roll(spec.rollout),
    ),
    Rule(
        path="spec.rollout.progressDeadlineSeconds",
        message="progressDeadlineSeconds must be greater than minReadySeconds",
        holds=lambda spec: has_time(spec.rollout),
    ),
)


def check_rules(subject: _S, rules: Iterable[Rule[_S]]) -> None:
    """Raises PoolInvalid for the first rule that does not hold."""
    for rule in rules:
        if not rule.holds(subject):
            raise PoolInvalid(rule.path, value=_value_at(subject, rule.path), rule=rule.message)


def count_set(*values: object) -> int:
    return sum(value is not None for value in values)


def stays_below(*sources: PvcSource | HostPathSource | None) -> bool:
    return not any(source is not None and ".." in source.path for source in sources)


def is_capped(autoscaling: AutoscalingSpec | None, limit: int | None) -> bool:
    return autoscaling is None or limit is None or autoscaling.max_replicas <= limit


def is_ordered(autoscaling: AutoscalingSpec | None) -> bool:
    return autoscaling is None or autoscaling.min_replicas <= autoscaling.max_replicas


def can_roll(rollout: RolloutSpec) -> bool:
    return rollout.max_surge > 0 or rollout.max_unavailable > 0


def has_time(rollout: RolloutSpec) -> bool:
    return rollout.progress_deadline_seconds > rollout.min_ready_seconds


def _value_at(subject: Any, path: str) -> object:
    """The value a message shows; None for whole blocks, which say nothing."""
    value = msgspec.to_builtins(subject)
    for name in path.split(".")[1:]:
        value = value.get(name) if isinstance(value, dict) else value
    return None if isinstance(value, dict) else value
