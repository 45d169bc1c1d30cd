"""Event log: gapless numbers, replacement of unseen progress, joiners from seq 1, overrun."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_engine.front.event_log import MAX_LAG_EVENTS, Cursor, EventLog
from prefill_engine.front.events import ChunkDone, Event, FirstToken, Queued, SwapIn


def queued(ahead: int) -> Queued:
    return Queued(ahead_requests=ahead, ahead_rows=0, waiting_for="QUEUE")


def chunk(rows: int) -> ChunkDone:
    return ChunkDone(rows_done=rows, rows_total=100, chunk_rows=1, step_seconds=0.0, step_id=rows)


def token(number: int) -> FirstToken:
    return FirstToken(token=number, logprob=0.0, alt_tokens=(), alt_logprobs=())


def swap_in(groups: int, *, shrunk_to: int = 0) -> SwapIn:
    return SwapIn(layers_ready=groups, layers_total=4, num_bytes=0, hit_shrunk_to=shrunk_to)


def drain(log: EventLog, cursor: Cursor) -> list[Event]:
    events = []
    while (event := log.take(cursor)) is not None:
        events.append(event)
    return events


def test_slow_reader_sees_only_the_newest_of_each_progress_kind():
    log = EventLog(progress_gap_seconds=0.0)
    reader = log.join(after_seq=0)
    for body in (queued(3), chunk(1), queued(2), token(5), chunk(2), queued(1)):
        log.append(body, since_accept_seconds=0.0)
    events = drain(log, reader)
    assert [event.body for event in events] == [token(5), chunk(2), queued(1)]
    assert [event.seq for event in events] == [1, 2, 3]


def test_each_layer_group_of_a_burst_keeps_its_time():
    log = EventLog(progress_gap_seconds=0.2)
    reader = log.join(after_seq=0)
    for groups, at in ((1, 0.1), (2, 0.15), (3, 0.16), (4, 0.3)):
        log.append(swap_in(groups), since_accept_seconds=at)
    log.append(swap_in(4, shrunk_to=128), since_accept_seconds=0.5)
    events = [(event.body, event.since_accept_seconds) for event in drain(log, reader)]
    assert events == [(swap_in(1), 0.1), (swap_in(2), 0.15), (swap_in(3), 0.16), (swap_in(4, shrunk_to=128), 0.5)]


def test_numbered_progress_is_never_replaced():
    log = EventLog(progress_gap_seconds=0.0)
    reader = log.join(after_seq=0)
    log.append(queued(2), since_accept_seconds=0.0)
    first = log.take(reader)
    log.append(queued(1), since_accept_seconds=0.1)
    assert [event.body for event in (first, *drain(log, reader)) if event] == [queued(2), queued(1)]


def test_joiner_gets_the_same_events_as_the_first_reader():
    log = EventLog(progress_gap_seconds=0.0)
    first = log.join(after_seq=0)
    log.append(queued(1), since_accept_seconds=0.0)
    log.append(token(1), since_accept_seconds=0.5)
    seen = drain(log, first)
    assert drain(log, log.join(after_seq=0)) == seen
    assert drain(log, log.join(after_seq=1)) == seen[1:]


def test_join_beyond_the_last_number_is_refused():
    log = EventLog(progress_gap_seconds=0.0)
    log.append(token(1), since_accept_seconds=0.0)
    with pytest.raises(ValueError, match="only 0 events"):
        log.join(after_seq=1)


def test_progress_within_the_gap_waits_for_the_next_event():
    log = EventLog(progress_gap_seconds=1.0)
    reader = log.join(after_seq=0)
    log.append(chunk(1), since_accept_seconds=0.0)
    assert [event.body for event in drain(log, reader)] == [chunk(1)]
    log.append(chunk(2), since_accept_seconds=0.4)
    log.append(chunk(3), since_accept_seconds=0.8)
    assert drain(log, reader) == []
    log.append(token(9), since_accept_seconds=0.9)
    assert [event.body for event in drain(log, reader)] == [chunk(3), token(9)]


def test_reader_left_behind_by_more_than_the_buffer_overruns():
    log = EventLog(progress_gap_seconds=0.0)
    fast, slow = log.join(after_seq=0), log.join(after_seq=0)
    for number in range(MAX_LAG_EVENTS):
        log.append(token(number), since_accept_seconds=0.0)
        drain(log, fast)
    assert not log.has_overrun(slow)
    log.append(token(0), since_accept_seconds=0.0)
    drain(log, fast)
    assert log.has_overrun(slow)
    assert not log.has_overrun(fast)


def test_backlog_at_joining_is_no_overrun():
    log = EventLog(progress_gap_seconds=0.0)
    fast = log.join(after_seq=0)
    for number in range(2 * MAX_LAG_EVENTS):
        log.append(token(number), since_accept_seconds=0.0)
    drain(log, fast)
    late = log.join(after_seq=0)
    assert not log.has_overrun(late)
    assert len(drain(log, late)) == 2 * MAX_LAG_EVENTS


def test_long_wait_is_thinned_to_one_event_a_second():
    log = EventLog(progress_gap_seconds=0.0)
    reader = log.join(after_seq=0)
    for step in range(20_000):
        log.append(queued(step), since_accept_seconds=step * 0.01)
        drain(log, reader)
    assert reader.taken < 1024 + 200


@given(st.lists(st.one_of(st.just("read"), st.just("queued"), st.just("chunk"), st.just("swap"), st.just("token"))))
def test_numbers_have_no_gaps_and_lasting_events_are_never_lost(actions: list[str]):
    log = EventLog(progress_gap_seconds=0.0)
    readers = [log.join(after_seq=0), log.join(after_seq=0)]
    seen: list[list[Event]] = [[], []]
    bodies = {
        "queued": queued,
        "chunk": chunk,
        "swap": swap_in,
        "token": token,
    }
    tokens = 0
    for number, action in enumerate(actions):
        if action == "read":
            event = log.take(readers[number % 2])
            seen[number % 2] += [event] if event else []
        else:
            tokens += action == "token"
            log.append(bodies[action](number), since_accept_seconds=0.0)
    for index in (0, 1):
        seen[index] += drain(log, readers[index])
        assert [event.seq for event in seen[index]] == list(range(1, len(seen[index]) + 1))
    assert seen[0] == seen[1]
    assert sum(isinstance(event.body, FirstToken) for event in seen[0]) == tokens
