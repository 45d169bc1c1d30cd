"""Pools that name another pool: a PrefillPool its encoders (vision.vePoolRef), a VEPool whom it serves (prefillPoolRef).

Pure. cache.py asks which pool is named, so that a change there is a reason to look here; observe.py asks what to say about it.
The trap: a reference never blocks and never stalls. Pods are made as if it were good, since encoders are found by name and may
come later; the pool's Ready condition says what is missing.
"""

from prefill_operator.api import Pool
from prefill_operator.api_status import VEPoolStatus
from prefill_operator.model import ReferenceNote
from prefill_operator.names import Kind
from prefill_operator.resources import PoolKey
from prefill_operator.ve_api import VEPoolSpec


def referred_pool(pool: Pool) -> PoolKey | None:
    """The pool that this one names, in its own namespace."""
    spec = pool.spec
    if isinstance(spec, VEPoolSpec):
        ref, kind = spec.prefill_pool_ref, Kind.PREFILL_POOL
        return None if ref is None else PoolKey(kind=kind, namespace=pool.namespace, name=ref.name)
    encoders = spec.vision.ve_pool_ref
    return None if encoders is None else PoolKey(kind=Kind.VE_POOL, namespace=pool.namespace, name=encoders.name)


def judge_reference(pool: Pool, key: PoolKey, other: Pool | None) -> ReferenceNote | None:
    """What is wrong with the pool that is named; None = nothing.

    Args:
        key: referred_pool(pool).
        other: that pool; None = there is none.
    """
    asks = not isinstance(pool.spec, VEPoolSpec)
    field = "spec.vision.vePoolRef" if asks else "spec.prefillPoolRef"
    consequence = "; images wait and fail until it has, text is served" if asks else ""
    where = f"{field}: {key.kind} {key.name}"
    if other is None or other.is_deleting:
        state = "does not exist" if other is None else "is being deleted"
        return ReferenceNote(text=f"{where} {state} in namespace {key.namespace}{consequence}", is_missing=True)
    if isinstance(other.status, VEPoolStatus) and not other.status.ready_ves:
        return ReferenceNote(text=f"{where} has no ready VE (of {other.spec.replicas}){consequence}")
    ours, theirs = pool.spec.model, other.spec.model
    if (ours.name, ours.revision) != (theirs.name, theirs.revision):
        text = f"{where} has model {theirs.name} {theirs.revision}, this pool has {ours.name} {ours.revision}"
        return ReferenceNote(text=text)
    return None
