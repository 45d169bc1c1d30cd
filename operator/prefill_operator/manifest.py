"""Kubernetes objects as the operator writes them: metadata, and whether a live object still is what we would write.

The trap of `is_current`: the API server fills in defaults, drops empty fields and rewrites quantities ("12000" becomes "12k"),
so equality is asked of the fields that we set, and of their meaning.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from prefill_operator.api import Pool
from prefill_operator.names import API_VERSION, object_labels
from prefill_operator.quantity import quantity_value

Manifest: TypeAlias = dict[str, Any]
"""A raw Kubernetes object, or a part of one."""


def object_metadata(pool: Pool, name: str, *, labels: Mapping[str, str] | None = None) -> Manifest:
    """Metadata of an object of the pool: labels, and the pool as controller so that it goes with the pool."""
    metadata: Manifest = {"name": name, "labels": {**(labels or {}), **object_labels(pool.kind, pool.name)}}
    if pool.namespace:
        metadata["namespace"] = pool.namespace
    if pool.uid:
        metadata["ownerReferences"] = [owner_reference(pool)]
    return metadata


def owner_reference(pool: Pool) -> Manifest:
    return {
        "apiVersion": API_VERSION,
        "kind": str(pool.kind),
        "name": pool.name,
        "uid": pool.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def is_current(rendered: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """True if applying `rendered` would change nothing of what we set. Fields that only `live` has are not ours.

    An immutable ConfigMap counts as current whatever it holds: its name is its revision, and a newer operator that would
    write other bytes for the same revision must not touch what running pods were started with (k8s.md 4.5).
    """
    if rendered.get("kind") == "ConfigMap" and rendered.get("immutable"):
        rendered = {"metadata": rendered["metadata"]}
    return _holds(rendered, live)


def _holds(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            return not wanted and found is None
        return all(_holds_field(key, value, found.get(key)) for key, value in wanted.items())
    if isinstance(wanted, list | tuple):
        if not isinstance(found, list | tuple):
            return not wanted and found is None
        return len(wanted) == len(found) and all(_holds(*pair) for pair in zip(wanted, found, strict=True))
    if isinstance(wanted, bool) is not isinstance(found, bool):
        # Also false: the API server drops it where it is the default.
        return wanted is False and found is None
    if found is None:
        return bool(wanted == "")
    return bool(wanted == found) or _is_same_quantity(wanted, found)


def _holds_field(key: str, wanted: Any, found: Any) -> bool:
    if key == "ownerReferences":
        # Others may add owners; server-side apply would never take theirs away.
        return all(any(_holds(one, other) for other in found or ()) for one in wanted)
    return _holds(wanted, found)


def _is_same_quantity(wanted: object, found: object) -> bool:
    if not isinstance(wanted, int | str) or not isinstance(found, int | str):
        return False
    try:
        return quantity_value(wanted) == quantity_value(found)
    except ValueError:
        return False
