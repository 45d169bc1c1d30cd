"""Which changes of a spec replace pods: the revision hash over user intent, and the class of every field (k8s.md 3.1 rule 7).

The trap: what is hashed here decides whether an operator upgrade restarts every pool of every user. So the hash covers what
users wrote, not what we render; a value equal to its default counts as not written, so that a new field changes no hash; and
golden hashes in tests/operator/data/revisions.json fail on any change that comes without a new TEMPLATE_VERSION.
"""

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import msgspec

from prefill_operator.pool_api import PrefillPoolSpec
from prefill_operator.quantity import quantity_value
from prefill_operator.ve_api import VEPoolSpec

TEMPLATE_VERSION = 1
"""Raised only when every pool of every user shall be rolled by an operator upgrade."""

REVISION_DIGITS = 8


class ChangeClass(StrEnum):
    """What a change of a field does."""

    ROLL = "rolling replacement"
    NEXT_POD = "new pods only"
    AT_ONCE = "at once"


CHANGE_CLASSES: Mapping[str, ChangeClass] = MappingProxyType(
    {
        "model": ChangeClass.ROLL,
        "gpu": ChangeClass.ROLL,
        "cpu": ChangeClass.ROLL,
        "expert_parallel": ChangeClass.ROLL,
        "expert_parallel.oom_escalation": ChangeClass.AT_ONCE,
        "engram": ChangeClass.ROLL,
        "context": ChangeClass.ROLL,
        "kv_cache": ChangeClass.ROLL,
        "kvd": ChangeClass.ROLL,
        "vision": ChangeClass.ROLL,
        "engine": ChangeClass.ROLL,
        "encoder": ChangeClass.ROLL,
        "batching": ChangeClass.ROLL,
        "network": ChangeClass.ROLL,
        "pod_template": ChangeClass.ROLL,
        "scheduling": ChangeClass.NEXT_POD,
        "scheduling.runtime_class_name": ChangeClass.ROLL,
        "monitoring": ChangeClass.NEXT_POD,
        "lifecycle": ChangeClass.AT_ONCE,
        "lifecycle.load_timeout_seconds": ChangeClass.NEXT_POD,
        "replicas": ChangeClass.AT_ONCE,
        "paused": ChangeClass.AT_ONCE,
        "quota": ChangeClass.AT_ONCE,
        "autoscaling": ChangeClass.AT_ONCE,
        "rollout": ChangeClass.AT_ONCE,
        "balancing": ChangeClass.AT_ONCE,
        "balancing.max_pending_patches_per_ve": ChangeClass.ROLL,
        "prefill_pool_ref": ChangeClass.AT_ONCE,
    }
)
"""By path of the spec; the longest listed prefix of a field's path holds."""

FIRST_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "batching.max_delay_milliseconds": 5,
        "balancing.max_pending_patches_per_ve": 262_144,
    }
)
"""Defaults that are another by now, as they were at first. The API server writes defaults into what it stores, so pools made
then hold these for ever, and their revisions count them as not written; today's default counts as written. Whoever changes the
default of a field that rolls pods adds the old one here."""

_QUANTITIES = frozenset(
    {"memory", "reserved", "host_memory_per_node", "budget_per_gpu", "host_pool", "swa_pool", "memory_per_gpu"}
    | {"extra_shm", "rows_pool", "pool_size", "size_limit", "requests", "limits"}
)


def change_class(path: str) -> ChangeClass:
    """Class of a field, e.g. of "lifecycle.load_timeout_seconds".

    Raises:
        ValueError: the table does not know the field; a test asks for every field of both kinds.
    """
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        found = CHANGE_CLASSES.get(".".join(parts[:length]))
        if found is not None:
            return found
    raise ValueError(f"field {path} has no change class; add it to CHANGE_CLASSES")


def rolling_intent(spec: PrefillPoolSpec | VEPoolSpec) -> dict[str, Any]:
    """What the user wrote in the fields that roll pods, by path; values equal to the default are absent."""
    written: dict[str, Any] = {}
    _collect_written(spec, "", written)
    return {path: value for path, value in written.items() if change_class(path) is ChangeClass.ROLL}


def revision_hash(spec: PrefillPoolSpec | VEPoolSpec, *, ep: int, engram: str, degraded: str) -> str:
    """First 8 hex digits of SHA-256 over canonical JSON of the rolling fields and the plan's choices (k8s.md 4.5)."""
    plan = {"ep": ep, "engram": engram, "degraded": degraded}
    return digest_json(
        {"spec": rolling_intent(spec), "plan": plan, "templateVersion": TEMPLATE_VERSION}, digits=REVISION_DIGITS
    )


def digest_json(value: object, *, digits: int) -> str:
    """Leading hex digits of SHA-256 over canonical JSON: sorted keys, no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def _collect_written(struct: msgspec.Struct, prefix: str, written: dict[str, Any]) -> None:
    values = msgspec.structs.asdict(struct)
    for info in msgspec.structs.fields(struct):
        value = values[info.name]
        path = f"{prefix}{info.name}"
        default = info.default if info.default is not msgspec.NODEFAULT else None
        if info.default_factory is not msgspec.NODEFAULT:
            default = info.default_factory()
        default = FIRST_DEFAULTS.get(path, default)
        if value is None and path not in FIRST_DEFAULTS:
            continue
        if isinstance(value, msgspec.Struct):
            _collect_written(value, f"{path}.", written)
            # An optional block that is present says something even if all its fields have their defaults.
            if default is None and not any(key.startswith(f"{path}.") for key in written):
                written[path] = {}
        elif _plain(info.name, value) != _plain(info.name, default):
            written[path] = _plain(info.name, value)


def _plain(name: str, value: Any) -> Any:
    """JSON-ready; one form for two spellings of one intent: 1Gi and 1024Mi, size 4 and "4"."""
    if value is None:
        return None
    if name == "size":
        return str(value)
    if name in _QUANTITIES:
        if isinstance(value, Mapping):
            return {key: str(quantity_value(item)) for key, item in value.items()}
        return str(quantity_value(value))
    return msgspec.to_builtins(value)
