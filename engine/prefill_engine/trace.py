"""Chrome trace JSON of recorded attempts, for ui.perfetto.dev and chrome://tracing. Pure; for `request` and `demo`.

One process per attempt, one thread per phase, because spans of one thread must nest and phases of an attempt overlap.
Times are microseconds from the first attempt's sending.
"""

from collections.abc import Mapping, Sequence

import msgspec

from prefill_engine.timeline import (
    PHASE_NAMES,
    Accepted,
    AttemptRecord,
    ChunkDone,
    Completed,
    Event,
    FirstToken,
    HandoffState,
    Queued,
    RecordedEvent,
    StoreState,
    SwapIn,
    TicketOffered,
    build_spans,
    clock_offset,
)

_EVENTS_THREAD = 0
_STEPS_THREAD = 1
_FIRST_PHASE_THREAD = 2
_EVENT_NAMES: tuple[tuple[type[Event], str], ...] = (
    (Accepted, "accepted"),
    (Queued, "queued"),
    (SwapIn, "swapped in"),
    (FirstToken, "first token"),
    (TicketOffered, "ticket"),
    (StoreState, "stored"),
    (HandoffState, "hand-off"),
    (Completed, "completed"),
)

TraceEvent = dict[str, object]
"""One row of the trace event format: a JSON object whose keys depend on `ph`."""


def build_trace(records: Sequence[AttemptRecord]) -> bytes:
    """JSON of the attempts in the trace event format; attempt i is process i + 1."""
    origin = min((record.sent_at_seconds for record in records), default=0.0)
    events: list[TraceEvent] = []
    for index, record in enumerate(records):
        events += _attempt_events(record, pid=index + 1, shift=record.sent_at_seconds - origin)
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _attempt_events(record: AttemptRecord, *, pid: int, shift: float) -> list[TraceEvent]:
    threads = {name: _FIRST_PHASE_THREAD + index for index, name in enumerate(PHASE_NAMES.values())}
    spans = build_spans(record)
    chunks = [event for event in record.events if isinstance(event.body, ChunkDone)]
    events = [_name_event("process_name", record.label, pid=pid, tid=_EVENTS_THREAD)]
    events.append(_name_event("thread_name", "events", pid=pid, tid=_EVENTS_THREAD))
    if chunks:
        events.append(_name_event("thread_name", "steps", pid=pid, tid=_STEPS_THREAD))
    for name in dict.fromkeys(span.name for span in spans):
        events.append(_name_event("thread_name", name, pid=pid, tid=threads[name]))
    for span in spans:
        place = {"pid": pid, "tid": threads[span.name]}
        events.append(_span_event(span.name, shift + span.start, span.end - span.start, place, {"note": span.note}))
    offset = shift + clock_offset(record)
    events += [_chunk_event(event, offset, pid) for event in chunks]
    for event in record.events:
        events += _instant_event(event, shift, pid)
    return events


def _name_event(kind: str, name: str, *, pid: int, tid: int) -> TraceEvent:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _span_event(
    name: str, start: float, length: float, place: Mapping[str, object], args: Mapping[str, object]
) -> TraceEvent:
    return {"name": name, "cat": "prefill", "ph": "X", "ts": _us(start), "dur": _us(length), **place, "args": args}


def _chunk_event(event: RecordedEvent, offset: float, pid: int) -> TraceEvent:
    chunk = event.body
    assert isinstance(chunk, ChunkDone)
    start = offset + event.since_accept_seconds - chunk.step_seconds
    args = {"rows": chunk.chunk_rows, "step_id": chunk.step_id}
    return _span_event(
        f"chunk, {chunk.chunk_rows} rows", start, chunk.step_seconds, {"pid": pid, "tid": _STEPS_THREAD}, args
    )


def _instant_event(event: RecordedEvent, shift: float, pid: int) -> list[TraceEvent]:
    """At the moment of receipt, with the event's fields; no entry for kinds that are spans already."""
    names = [name for kind, name in _EVENT_NAMES if isinstance(event.body, kind)]
    args = msgspec.to_builtins(event.body)
    ts = _us(shift + event.received_seconds)
    return [
        {"name": name, "cat": "event", "ph": "i", "s": "t", "ts": ts, "pid": pid, "tid": _EVENTS_THREAD, "args": args}
        for name in names
    ]


def _us(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e6, 3)
