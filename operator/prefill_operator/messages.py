"""Sentences for conditions: how many PEs are in which state, and what is wrong with the worst (k8s.md 3.3).

The trap: a message that changes with the clock makes the status differ on every pass. So there are no ages up to now, and
load progress is rounded down to steps of 5 %.
"""

from datetime import UTC, datetime

from prefill_operator.engine_load import PROGRESS_STEPS, progress_step
from prefill_operator.failures import PodState
from prefill_operator.fleet import Fleet, PodView
from prefill_operator.imbalance import IMBALANCE_LIMIT
from prefill_operator.intent import Intent
from prefill_operator.model import ImbalanceNote, LoadProgress

_SEVERITY = (
    PodState.CONFIG_REJECTED,
    PodState.GPU_FAULT,
    PodState.OUT_OF_MEMORY,
    PodState.CRASH_LOOP,
    PodState.CRASHED,
    PodState.IMAGE_PULL,
    PodState.CONTAINER_ERROR,
    PodState.FOREIGN,
    PodState.LOST,
    PodState.FAILED,
    PodState.UNSCHEDULABLE,
    PodState.NODE_NOT_READY,
    PodState.UNREADY,
    PodState.NODE_MAINTENANCE,
    PodState.NODE_CORDONED,
    PodState.LOADING,
)
"""Worst first."""

UNEVEN_LOAD = "patches wait unevenly"
"""How describe_imbalance begins, whatever its figures are."""

_MAX_NAMED = 3


def format_time(seconds: float) -> str:
    """RFC 3339 in UTC, whole seconds, as the API server writes times."""
    return datetime.fromtimestamp(int(seconds), tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def troubled_views(fleet: Fleet) -> list[PodView]:
    """Pods with something wrong, the worst first; a pod that loads for the first time is none of them."""
    troubled = [view for view in fleet.views if _is_troubled(view)]
    return sorted(troubled, key=lambda view: (_SEVERITY.index(view.state), view.verdict.since, view.pod.name))


def describe_fleet(intent: Intent, fleet: Fleet) -> str:
    """E.g. "12/16 ready, 2 loading (306/510 GB), 1 draining; flash-4f2a9c01-7 on gpu-3: CudaOom (exit 12) in warmup"."""
    parts = [f"{fleet.num_serving}/{intent.replicas} ready"]
    loading = fleet.in_state(PodState.LOADING)
    if loading:
        parts.append(f"{len(loading)} loading{_progress(loading)}")
    for state, word in (
        (PodState.PENDING, "pending"),
        (PodState.UNSCHEDULABLE, "unschedulable"),
        (PodState.DRAINING, "draining"),
        (PodState.TERMINATING, "terminating"),
        (PodState.LOST, "lost"),
        (PodState.FAILED, "failed"),
    ):
        count = len(fleet.in_state(state))
        if count:
            parts.append(f"{count} {word}")
    degraded = fleet.select(lambda view: view.is_serving and view.pod.is_store_degraded)
    if degraded:
        parts.append(f"{len(degraded)} without KV store ({_names(degraded)})")
    text = ", ".join(parts)
    worst = troubled_views(fleet)
    return f"{text}; {describe_pod(worst[0])}" if worst else text


def describe_imbalance(note: ImbalanceNote, fleet: Fleet) -> str:
    """E.g. "patches wait unevenly for over 5 min: imbalance 1.9, expected at most 1.5; look first at eyes-ve-4f2a9c01-7 on gpu-3,
    where most are (52000): PEs send each image to the VE that by its own report is done first"."""
    worst = next((view.pod for view in fleet.views if view.pod.uid == note.worst_uid), None)
    text = f"{UNEVEN_LOAD} for over {note.span}: imbalance {note.imbalance}, expected at most {IMBALANCE_LIMIT}"
    if worst is not None:
        where = f"{worst.name}{f' on {worst.node}' if worst.node else ''}"
        text += f"; look first at {where}, where most are ({note.most_patches})"
    return f"{text}: PEs send each image to the VE that by its own report is done first"


def describe_pause(intent: Intent, fleet: Fleet) -> str:
    """E.g. "spec.paused: no PE is created, drained or deleted; 2 whose drain had begun take no work and stay until spec.paused is
    false (flash-4f2a9c01-7 on gpu-3, flash-4f2a9c01-8 on gpu-3)"."""
    text = f"spec.paused: no {intent.noun} is created, drained or deleted"
    draining = fleet.in_state(PodState.DRAINING)
    if not draining:
        return text
    verb = "take no work and stay" if len(draining) > 1 else "takes no work and stays"
    return f"{text}; {len(draining)} whose drain had begun {verb} until spec.paused is false ({_names(draining)})"


def describe_pod(view: PodView) -> str:
    where = f" on {view.pod.node}" if view.pod.node else ""
    return f"{view.pod.name}{where}: {view.verdict.message or view.state}"


def _names(views: list[PodView]) -> str:
    more = f" and {len(views) - _MAX_NAMED} more" if len(views) > _MAX_NAMED else ""
    return ", ".join(f"{view.pod.name} on {view.pod.node}" for view in views[:_MAX_NAMED]) + more


def _is_troubled(view: PodView) -> bool:
    if view.state not in _SEVERITY:
        return False
    if view.state is PodState.LOADING:
        return bool(view.verdict.message)
    return True


def _progress(views: list[PodView]) -> str:
    """Progress of all loads together, in steps of 5 %, so that the status is not rewritten all the time."""
    loads = [view.pod.load for view in views if view.pod.load and view.pod.load.total_bytes > 0]
    if not loads:
        return ""
    total = sum(load.total_bytes for load in loads)
    steps = progress_step(LoadProgress(loaded_bytes=sum(load.loaded_bytes for load in loads), total_bytes=total)) or 0
    return f" ({total * steps / PROGRESS_STEPS / 1e9:.0f}/{total / 1e9:.0f} GB)"
