"""Host memory of a PE: engine container, KV sidecar and /dev/shm. One sum for the plan, the requests of pods and the CLI, so that
a plan that says feasible is what is rendered (k8s.md 4.3).

Pure; without the plan, which is made from it.
"""

from prefill_operator.pool_api import PrefillPoolSpec
from prefill_operator.pool_vision import vision_shm_bytes
from prefill_operator.quantity import quantity_bytes
from prefill_plan.kvd_config import JOURNAL_ROOM_BYTES


def pool_bytes(spec: PrefillPoolSpec) -> int:
    """Host memory for KV blocks and window snapshots; kvd's may be given on its own."""
    if spec.kvd.enabled and spec.kvd.pool_size is not None:
        return quantity_bytes(spec.kvd.pool_size)
    return quantity_bytes(spec.kv_cache.host_pool) + quantity_bytes(spec.kv_cache.swa_pool)


def engine_memory_bytes(spec: PrefillPoolSpec, *, ep: int, engram_bytes: int) -> int:
    """Of the engine container: its processes, the Engram copy, rows of images, and the pools unless kvd holds them."""
    processes = ep * quantity_bytes(spec.engine.memory_per_gpu)
    pools = 0 if spec.kvd.enabled else pool_bytes(spec)
    return processes + engram_bytes + pools + quantity_bytes(spec.engine.extra_shm) + vision_shm_bytes(spec)


def kvd_memory_bytes(spec: PrefillPoolSpec) -> int:
    """Of the sidecar, its pool included: pages of /dev/shm count where they were first touched. 0 without kvd."""
    return quantity_bytes(spec.kvd.memory) + pool_bytes(spec) if spec.kvd.enabled else 0


def shm_bytes(spec: PrefillPoolSpec) -> int:
    """Of the pod's /dev/shm: the pools, rows of images, and extraShm. A pool of kvd needs room for its lease journal beside it,
    whatever extraShm says."""
    extra = max(quantity_bytes(spec.engine.extra_shm), 2 * JOURNAL_ROOM_BYTES if spec.kvd.enabled else 0)
    return pool_bytes(spec) + extra + vision_shm_bytes(spec)
