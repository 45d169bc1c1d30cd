"""The Chrome trace of recorded attempts."""

import itertools
import json

import msgspec
import pytest

from prefill_engine.timeline import Accepted, AttemptRecord, ChunkDone, FirstToken, RecordedEvent, Stage
from prefill_engine.trace import build_trace


def attempt(label: str, *, sent_at: float) -> AttemptRecord:
    accepted = Accepted(
        dp_rank=0,
        effective_hit=128,
        replay_rows=0,
        compute_rows=300,
        predicted_wait_seconds=0.0,
        predicted_finish_seconds=0.0,
        deduplicated=False,
    )
    chunk = ChunkDone(rows_done=300, rows_total=300, chunk_rows=300, step_seconds=0.2, step_id=9)
    timed = ((0.0, accepted), (0.3, chunk), (0.3, FirstToken(token=4, logprob=-1.0)))
    return AttemptRecord(
        label=label,
        request_id="r",
        prompt_tokens=428,
        sent_at_seconds=sent_at,
        events=tuple(
            RecordedEvent(seq=i + 1, since_accept_seconds=at, received_seconds=at + 0.01, body=body)
            for i, (at, body) in enumerate(timed)
        ),
        own_stages=(Stage(phase="PROBE", start_seconds=0.4, length_seconds=0.1, note="equal"),),
    )


def trace_events(*records: AttemptRecord) -> list[dict[str, object]]:
    return list(json.loads(build_trace(records))["traceEvents"])


def test_every_event_has_the_fields_its_phase_needs() -> None:
    events = trace_events(attempt("a", sent_at=100.0))
    required = {
        "X": {"name", "ts", "dur", "pid", "tid"},
        "i": {"name", "ts", "s", "pid", "tid"},
        "M": {"name", "pid", "tid", "args"},
    }
    assert {event["ph"] for event in events} == set(required)
    assert [event for event in events if not required[str(event["ph"])] <= set(event)] == []


def test_spans_are_microseconds_from_the_first_sending() -> None:
    events = trace_events(attempt("a", sent_at=100.0), attempt("b", sent_at=101.0))
    spans = {(event["pid"], event["name"]): event for event in events if event["ph"] == "X"}
    compute = spans[1, "compute"]
    assert compute["ts"] == pytest.approx(0.11e6)
    assert compute["dur"] == pytest.approx(0.2e6)
    assert spans[2, "compute"]["ts"] == pytest.approx(1.11e6)
    assert spans[1, "chunk, 300 rows"]["ts"] == pytest.approx(0.11e6)
    assert spans[2, "probe"]["ts"] == pytest.approx(1.4e6)


def test_processes_are_named_by_attempt_and_threads_by_phase() -> None:
    events = trace_events(attempt("a", sent_at=0.0), attempt("b", sent_at=1.0))
    names = [(e["name"], e["pid"], e["args"]) for e in events if e["ph"] == "M"]
    assert [row for row in names if row[0] == "process_name"] == [
        ("process_name", 1, {"name": "a"}),
        ("process_name", 2, {"name": "b"}),
    ]
    threads = {e["tid"]: e["args"] for e in events if e["ph"] == "M" and e["name"] == "thread_name" and e["pid"] == 1}
    used = {e["tid"] for e in events if e["ph"] != "M" and e["pid"] == 1}
    assert used <= set(threads)


def test_instants_carry_the_event_and_no_secret() -> None:
    events = trace_events(attempt("a", sent_at=0.0))
    first_token = next(event for event in events if event["name"] == "first token")
    assert first_token["args"] == {"event": "FirstToken", "token": 4, "logprob": -1.0}
    assert first_token["ts"] == pytest.approx(0.31e6)


def test_spans_of_one_thread_do_not_overlap() -> None:
    record = attempt("a", sent_at=0.0)
    record = msgspec.structs.replace(
        record, own_stages=(*record.own_stages, Stage(phase="HANDOFF", start_seconds=0.35, length_seconds=0.3, note=""))
    )
    spans = sorted((e["pid"], e["tid"], e["ts"], e["dur"]) for e in trace_events(record) if e["ph"] == "X")
    pairs = itertools.pairwise(spans)
    assert [pair for pair in pairs if pair[0][:2] == pair[1][:2] and pair[0][2] + pair[0][3] > pair[1][2]] == []


def test_no_attempts_is_an_empty_trace() -> None:
    assert json.loads(build_trace(())) == {"traceEvents": [], "displayTimeUnit": "ms"}
