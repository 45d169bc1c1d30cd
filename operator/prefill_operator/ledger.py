"""What the planner must remember beyond the pods themselves: ends of engines, load times, back-off, replacements (C29).

One annotation of the pool, at most 4 KiB of JSON, read and written through this module only. Losing it costs evidence, never
correctness, so text that is not ours reads as empty. The trap: `record_pods` must be idempotent, or a pool at rest would
write for ever; so an end is named by pod and time, lists are unions cut to the newest, and nothing expires by rewriting.
Rows are JSON arrays, in the order of their fields.
"""

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from prefill_operator.model import ObservedPod, OperatorTimes, PodPhase

MAX_BYTES = 4096
_MAX_ENDS = 20
_MAX_LOADS = 20
_MAX_REPLACEMENTS = 10
_UID_CHARS = 13
"""Of a pod's UID: enough to tell the pods of one pool apart."""
_LOAD_SLACK = 1.5
"""A load may take that many times its limit (the startup probe's budget, C44); beyond that it was no load."""

REFUSED_EXIT = -1
"""Exit code of a pod that Failed without its engine having run, e.g. UnexpectedAdmissionError."""
FOREIGN_MEMORY = "ForeignMemory"
"""Reason of an out-of-memory end that is no evidence: somebody else held the GPU's memory."""


class EngineEnd(msgspec.Struct, frozen=True, array_like=True):
    at: int
    node: str
    pod: str
    """Leading characters of the pod's UID."""
    restart_count: int
    exit_code: int
    plan_hash: str
    reason: str
    """The kubelet's word, or FOREIGN_MEMORY."""


class LoadTime(msgspec.Struct, frozen=True, array_like=True):
    """From scheduled to Ready."""

    ready_at: int
    pod: str
    seconds: int
    plan_hash: str


class Replacement(msgspec.Struct, frozen=True, array_like=True):
    """A pod that we replaced because of a failure; its node is avoided for a while."""

    at: int
    node: str
    pod: str
    revision: str
    cause: str
    """The reason of the pod's verdict."""


class Backoff(msgspec.Struct, frozen=True, array_like=True):
    """Pause before the next pod is created."""

    count: int = 0
    at: int = 0
    """Pods that were created by then belong to the last failure; by the clock of the API server."""
    until: int = 0
    """By the operator's clock."""
    ready_at: int = 0
    """A pod that becomes Ready later than this ends the series; by the kubelets' clocks."""


class Ledger(msgspec.Struct, frozen=True, omit_defaults=True):
    ends: tuple[EngineEnd, ...] = ()
    loads: tuple[LoadTime, ...] = ()
    replaced: tuple[Replacement, ...] = ()
    backoff: Backoff = Backoff()
    forgotten_at: int = 0
    """Grounds for avoiding a node that are not later than this count no more: nothing else had room."""
    escalated_at: int = 0
    last_incarnation: int = 0
    """Highest number of a pod that was removed; numbers are not used twice, so that a stale decision finds its name taken."""


def parse_ledger(text: str | None) -> Ledger:
    """From the annotation; empty if absent, too long, or not of our making."""
    if not text or len(text) > MAX_BYTES:
        return Ledger()
    try:
        return msgspec.json.decode(text, type=Ledger)
    except msgspec.MsgspecError:
        return Ledger()


def ledger_text(ledger: Ledger) -> str:
    """JSON of at most 4 KiB: the oldest rows go first. "" for an empty ledger."""
    if ledger == Ledger():
        return ""
    while len(data := msgspec.json.encode(ledger)) > MAX_BYTES:
        if ledger.ends and len(ledger.ends) >= len(ledger.loads):
            ledger = replace(ledger, ends=ledger.ends[1:])
        elif ledger.loads:
            ledger = replace(ledger, loads=ledger.loads[1:])
        else:
            ledger = replace(ledger, replaced=ledger.replaced[1:])
    return data.decode()


def pod_key(pod: ObservedPod) -> str:
    """How the ledger names a pod."""
    return pod.uid[:_UID_CHARS]


def longest_load(load_timeout_seconds: float) -> float:
    """Seconds; a longer time from scheduled to Ready is no load but a pod that was not Ready for a while."""
    return load_timeout_seconds * _LOAD_SLACK


def record_pods(
    ledger: Ledger, pods: Iterable[ObservedPod], *, max_load_seconds: float, times: OperatorTimes
) -> Ledger:
    """With everything that these pods show and the ledger does not hold yet.

    Args:
        max_load_seconds: see longest_load.
    """
    ends = {(end.pod, end.at): end for end in ledger.ends}
    loads = {load.pod: load for load in ledger.loads}
    for pod in pods:
        end = _end_of(pod, times)
        if end is not None:
            ends.setdefault((end.pod, end.at), end)
        load = load_of(pod, max_load_seconds)
        if load is not None:
            loads.setdefault(load.pod, load)
    return replace(
        ledger,
        ends=tuple(sorted(ends.values(), key=lambda end: (end.at, end.pod)))[-_MAX_ENDS:],
        loads=tuple(sorted(loads.values(), key=lambda load: (load.ready_at, load.pod)))[-_MAX_LOADS:],
    )


def record_replacement(ledger: Ledger, pod: ObservedPod, *, cause: str, now: float) -> Ledger:
    """Once per pod."""
    key = pod_key(pod)
    if not pod.node or any(row.pod == key for row in ledger.replaced):
        return ledger
    row = Replacement(at=int(now), node=pod.node, pod=key, revision=pod.revision, cause=cause)
    return replace(ledger, replaced=(*ledger.replaced, row)[-_MAX_REPLACEMENTS:])


def record_failure(
    ledger: Ledger,
    pod: ObservedPod,
    *,
    now: float,
    newest_at: float,
    last_ready_at: float,
    is_free: bool,
    times: OperatorTimes,
) -> Ledger:
    """Raises the back-off for a failed pod, once per retry: pods that were there at the last failure belong to that one.

    Args:
        newest_at: when the youngest pod of the pool was created.
        last_ready_at: when a pod of the pool last became Ready; a later failure starts a new series.
        is_free: the first failure of a series costs no pause (an engine that failed, not an admission).
    """
    backoff = ledger.backoff
    if backoff.count and pod.created_at <= backoff.at:
        return ledger
    is_new_series = last_ready_at > backoff.ready_at or now > backoff.until + times.max_backoff_seconds
    count = 1 if is_new_series else backoff.count + 1
    doublings = count - 2 if is_free else count - 1
    pause = min(times.max_backoff_seconds, times.backoff_seconds * 2.0 ** min(doublings, 30)) if doublings >= 0 else 0.0
    # Not `now`: by a clock ahead of the API server's the failures to come would all belong to this one.
    at, ready_at = int(newest_at) + 1, int(last_ready_at) + 1
    return replace(ledger, backoff=Backoff(count=count, at=at, until=int(now + pause), ready_at=ready_at))


def paused_until(ledger: Ledger, *, now: float, last_ready_at: float, times: OperatorTimes) -> float | None:
    """Until when no pod may be created; None = create. An end beyond the longest pause was written by another clock."""
    backoff = ledger.backoff
    if not now < backoff.until <= now + times.max_backoff_seconds or last_ready_at > backoff.ready_at:
        return None
    return float(backoff.until)


def last_failure(ledger: Ledger) -> str:
    """Cause and node of the last pod that was replaced or refused, e.g. "GPUFault on gpu-3"; "" if there is none."""
    rows = [(row.at, row.cause, row.node) for row in ledger.replaced]
    rows += [(end.at, end.reason, end.node) for end in ledger.ends if end.exit_code == REFUSED_EXIT]
    if not rows:
        return ""
    _, cause, node = max(rows)
    return f"{cause} on {node}" if node else cause


def load_seconds(ledger: Ledger) -> list[float]:
    return [float(load.seconds) for load in ledger.loads]


def load_of(pod: ObservedPod, max_load_seconds: float) -> LoadTime | None:
    """Of a pod that is Ready and whose engine never ended; else None. See longest_load for the limit."""
    if not pod.ready or pod.restart_count or pod.scheduled_at is None or pod.ready_changed_at is None:
        return None
    seconds = pod.ready_changed_at - pod.scheduled_at
    if not 0 <= seconds <= max_load_seconds:
        return None
    return LoadTime(ready_at=int(pod.ready_changed_at), pod=pod_key(pod), seconds=int(seconds), plan_hash=pod.plan_hash)


def ends_of(ledger: Ledger, pod: ObservedPod, *, since: float) -> list[EngineEnd]:
    """Ends of this pod's engine after `since`, oldest first."""
    key = pod_key(pod)
    return [end for end in ledger.ends if end.pod == key and end.at >= since and end.exit_code != REFUSED_EXIT]


def count_ends(ledger: Ledger, pod: ObservedPod, *, since: float) -> int:
    """How often this pod's engine ended after `since`, those that nobody saw included."""
    ends = ends_of(ledger, pod, since=since)
    if not ends:
        return 0
    counts = [end.restart_count for end in ends]
    return max(len(ends), max(counts) - min(counts) + 1)


def _end_of(pod: ObservedPod, times: OperatorTimes) -> EngineEnd | None:
    if pod.phase is PodPhase.FAILED:
        at = pod.failed_at if pod.failed_at is not None else pod.created_at
        return EngineEnd(
            at=int(at),
            node=pod.node,
            pod=pod_key(pod),
            restart_count=pod.restart_count,
            exit_code=REFUSED_EXIT,
            plan_hash="",
            reason=pod.failed_reason,
        )
    end = pod.termination
    # What ends while the pod is being drained or deleted ends because of us.
    if end is None or pod.terminating_since is not None or pod.draining_since is not None:
        return None
    return EngineEnd(
        at=int(end.at),
        node=pod.node,
        pod=pod_key(pod),
        restart_count=end.restart_count,
        exit_code=end.exit_code,
        plan_hash=end.plan_hash,
        reason=FOREIGN_MEMORY if end.foreign_bytes > times.foreign_bytes else end.reason,
    )
