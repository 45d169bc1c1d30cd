"""Joins a user's affinity with the one we render: both must hold.

The trap: the terms of a required node affinity are alternatives, so our requirements go into each of the user's terms; all
other lists are conjunctions or sums, and are appended.
"""

from collections.abc import Mapping
from typing import Any

from prefill_operator.errors import PoolInvalid
from prefill_operator.manifest import Manifest

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_NODE = "nodeAffinity"
_KINDS = (_NODE, "podAffinity", "podAntiAffinity")


def merge_affinity(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, path: str) -> Manifest:
    """A new affinity.

    Raises:
        PoolInvalid: a key that Kubernetes does not know, or a value of the wrong kind.
    """
    merged: Manifest = {kind: dict(ours[kind]) for kind in _KINDS if kind in ours}
    for kind, given in theirs.items():
        if kind not in _KINDS:
            raise PoolInvalid(f"{path}.{kind}", value=None, rule=f"is unknown; known are {', '.join(_KINDS)}")
        target = merged.setdefault(kind, {})
        for when, terms in _object(given, f"{path}.{kind}").items():
            where = f"{path}.{kind}.{when}"
            if when not in (REQUIRED, PREFERRED):
                raise PoolInvalid(where, value=None, rule=f"is unknown; known are {REQUIRED} and {PREFERRED}")
            if kind == _NODE and when == REQUIRED:
                target[when] = _both_hold(target.get(when), _object(terms, where), where)
            elif isinstance(terms, list):
                target[when] = [*target.get(when, ()), *terms]
            else:
                raise PoolInvalid(where, value=terms, rule="must be a list")
    return merged


def _both_hold(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any], path: str) -> Manifest:
    terms = theirs.get("nodeSelectorTerms")
    if not isinstance(terms, list) or not all(isinstance(term, dict) for term in terms):
        raise PoolInvalid(f"{path}.nodeSelectorTerms", value=None, rule="must be a list of objects")
    if ours is None:
        return {"nodeSelectorTerms": terms}
    (own,) = ours["nodeSelectorTerms"]
    joined = [_joined(term, own["matchExpressions"]) for term in terms]
    return {"nodeSelectorTerms": joined}


def _joined(term: Mapping[str, Any], expressions: list[Any]) -> Manifest:
    return {**term, "matchExpressions": [*term.get("matchExpressions", ()), *expressions]}


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PoolInvalid(path, value=value, rule="must be an object")
    return value
