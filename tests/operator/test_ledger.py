from dataclasses import replace

import msgspec
import pytest

from prefill_operator.ledger import (
    FOREIGN_MEMORY,
    MAX_BYTES,
    REFUSED_EXIT,
    Backoff,
    EngineEnd,
    Ledger,
    LoadTime,
    Replacement,
    count_ends,
    ledger_text,
    load_seconds,
    parse_ledger,
    paused_until,
    record_failure,
    record_pods,
    record_replacement,
)
from prefill_operator.model import ObservedPod, OperatorTimes, PodPhase, Termination

TIMES = OperatorTimes()
NOW = 1_000_000.0


def pod(number: int = 1, **changes: object) -> ObservedPod:
    base = ObservedPod(
        name=f"flash-4f2a9c01-{number}",
        uid=f"0000000{number:05d}-aaaa",
        revision="4f2a9c01",
        incarnation=number,
        ep=2,
        gpus=2,
        created_at=NOW,
        node="gpu-1",
        scheduled_at=NOW,
        phase=PodPhase.RUNNING,
        plan_hash="plan",
    )
    return replace(base, **changes)


def ended(at: float, *, code: int = 1, count: int = 0, **changes: object) -> Termination:
    return replace(Termination(at=at, exit_code=code, restart_count=count), **changes)


def record(ledger: Ledger, *pods: ObservedPod) -> Ledger:
    return record_pods(ledger, pods, max_load_seconds=2700, times=TIMES)


def fail(ledger: Ledger, created_at: float, now: float, *, last_ready_at: float = 0.0, is_free: bool = False) -> Ledger:
    failed, ready_at = pod(created_at=created_at), last_ready_at
    return record_failure(
        ledger, failed, now=now, newest_at=created_at, last_ready_at=ready_at, is_free=is_free, times=TIMES
    )


def test_ledger_text_round_trip() -> None:
    ledger = Ledger(
        ends=(EngineEnd(at=1, node="a", pod="p", restart_count=2, exit_code=12, plan_hash="h", reason="Error"),),
        loads=(LoadTime(ready_at=2, pod="p", seconds=300, plan_hash="h"),),
        replaced=(Replacement(at=3, node="a", pod="p", revision="r", cause="CrashLoop"),),
        backoff=Backoff(count=1, at=4, until=14),
        forgotten_at=5,
        escalated_at=6,
    )
    assert parse_ledger(ledger_text(ledger)) == ledger


def test_ledger_text_of_nothing_is_empty() -> None:
    assert ledger_text(Ledger()) == ""


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"ends":[[1]]}', '{"ends":7}', "x" * 5000])
def test_parse_ledger_reads_what_is_not_ours_as_empty(text: str | None) -> None:
    assert parse_ledger(text) == Ledger()


def test_ledger_text_drops_the_oldest_above_4_kib() -> None:
    name = "gpu-node-with-a-very-long-name." * 8
    ledger = Ledger()
    for number in range(20):
        crashed = pod(number, node=name, termination=ended(NOW + number))
        ledger = record(ledger, crashed)
    text = ledger_text(ledger)
    cut = parse_ledger(text)
    assert len(text) <= MAX_BYTES
    assert 0 < len(cut.ends) < 20
    assert cut.ends[-1] == ledger.ends[-1]
    assert ledger_text(record(cut, crashed)) == text


def test_record_pods_is_idempotent_and_keeps_the_newest_twenty() -> None:
    pods = [pod(n, termination=ended(NOW + n), ready=False) for n in range(30)]
    pods += [pod(n, ready=True, ready_changed_at=NOW + 100 + n) for n in range(30, 60)]
    once = record(Ledger(), *pods)
    assert record(once, *pods) == once
    assert [end.at for end in once.ends] == [int(NOW) + n for n in range(10, 30)]
    assert [load.seconds for load in once.loads] == [100 + n for n in range(40, 60)]


def test_record_pods_keeps_ends_of_pods_that_are_gone() -> None:
    ledger = record(Ledger(), pod(1, termination=ended(NOW)))
    assert len(record(ledger, pod(2, termination=ended(NOW + 5))).ends) == 2


def test_record_pods_sees_each_end_once_whatever_the_restart_count_says() -> None:
    ledger = record(Ledger(), pod(termination=ended(NOW, count=0)))
    assert len(record(ledger, pod(termination=ended(NOW, count=1))).ends) == 1


@pytest.mark.parametrize("changes", [{"draining_since": NOW}, {"terminating_since": NOW}], ids=["drained", "deleted"])
def test_record_pods_ignores_ends_that_we_caused(changes: dict[str, object]) -> None:
    assert record(Ledger(), pod(termination=ended(NOW), **changes)) == Ledger()


def test_record_pods_marks_memory_held_by_others() -> None:
    end = ended(NOW, code=12, plan_hash="plan", foreign_bytes=2_000_000_000)
    assert record(Ledger(), pod(termination=end)).ends[0].reason == FOREIGN_MEMORY


def test_record_pods_records_a_refused_pod() -> None:
    refused = pod(phase=PodPhase.FAILED, failed_reason="UnexpectedAdmissionError", failed_at=NOW + 3)
    end = record(Ledger(), refused).ends[0]
    assert (end.exit_code, end.reason, end.at, end.node) == (REFUSED_EXIT, "UnexpectedAdmissionError", NOW + 3, "gpu-1")


@pytest.mark.parametrize(
    "changes",
    [
        {"ready_changed_at": NOW + 5000},
        {"restart_count": 1},
        {"ready_changed_at": NOW - 5},
        {"scheduled_at": None},
        {"ready": False},
    ],
    ids=["too long", "restarted", "clock skew", "unscheduled", "not ready"],
)
def test_record_pods_takes_only_plain_loads(changes: dict[str, object]) -> None:
    assert record(Ledger(), pod(**{"ready": True, "ready_changed_at": NOW + 60, **changes})).loads == ()


def test_load_seconds_are_schedule_to_ready() -> None:
    assert load_seconds(record(Ledger(), pod(ready=True, ready_changed_at=NOW + 301.7))) == [301.0]


def test_count_ends_includes_those_nobody_saw() -> None:
    ledger = record(Ledger(), pod(termination=ended(NOW, count=0)))
    ledger = record(ledger, pod(termination=ended(NOW + 600, count=4)))
    assert count_ends(ledger, pod(), since=NOW - 1) == 5
    assert count_ends(ledger, pod(), since=NOW + 1) == 1
    assert count_ends(ledger, pod(2), since=NOW - 1) == 0


def test_record_failure_doubles_the_pause_for_each_retry_up_to_the_limit() -> None:
    """k8s.md 4.6: 10 s x 2^n, at most 10 min."""
    ledger, now, pauses = Ledger(), NOW, []
    for _ in range(9):
        ledger = fail(ledger, created_at=now, now=now + 1)
        pauses.append(ledger.backoff.until - int(now + 1))
        now = ledger.backoff.until + 2.0
    assert pauses == [10, 20, 40, 80, 160, 320, 600, 600, 600]


def test_record_failure_counts_pods_of_one_batch_once() -> None:
    ledger = fail(Ledger(), created_at=NOW, now=NOW + 1)
    assert fail(ledger, created_at=NOW, now=NOW + 3) == ledger


def test_record_failure_of_an_engine_costs_nothing_the_first_time() -> None:
    first = fail(Ledger(), created_at=NOW, now=NOW + 1, is_free=True)
    second = fail(first, created_at=NOW + 60, now=NOW + 90, is_free=True)
    assert (first.backoff.until, second.backoff.until) == (int(NOW + 1), int(NOW + 100))


def test_record_failure_starts_anew_after_a_pod_became_ready_or_a_long_time() -> None:
    ledger = fail(fail(Ledger(), created_at=NOW, now=NOW + 1), created_at=NOW + 20, now=NOW + 21)
    assert ledger.backoff.count == 2
    assert fail(ledger, created_at=NOW + 90, now=NOW + 99, last_ready_at=NOW + 50).backoff.count == 1
    assert fail(ledger, created_at=NOW + 9000, now=NOW + 9001).backoff.count == 1


@pytest.mark.parametrize("skew", [-7200.0, 7200.0], ids=["ahead", "behind"])
def test_record_failure_with_an_api_server_of_another_time(skew: float) -> None:
    ledger = fail(Ledger(), created_at=NOW - skew, now=NOW)
    assert fail(ledger, created_at=NOW - skew, now=NOW + 1) == ledger
    assert fail(ledger, created_at=NOW - skew + 11, now=NOW + 12).backoff.count == 2


def test_paused_until_ends_with_time_or_success() -> None:
    ledger = fail(Ledger(), created_at=NOW, now=NOW)
    assert paused_until(ledger, now=NOW + 1, last_ready_at=0.0, times=TIMES) == NOW + 10
    assert paused_until(ledger, now=NOW + 10, last_ready_at=0.0, times=TIMES) is None
    assert paused_until(ledger, now=NOW + 3, last_ready_at=NOW + 2, times=TIMES) is None


def test_paused_until_does_not_believe_an_operator_of_another_time() -> None:
    ledger = fail(Ledger(), created_at=NOW, now=NOW + 7200)
    assert paused_until(ledger, now=NOW, last_ready_at=0.0, times=TIMES) is None


def test_record_replacement_once_per_pod_and_only_where_it_ran() -> None:
    ledger = record_replacement(Ledger(), pod(), cause="CrashLoop", now=NOW)
    assert record_replacement(ledger, pod(), cause="CrashLoop", now=NOW + 9) == ledger
    assert record_replacement(Ledger(), pod(node=""), cause="CrashLoop", now=NOW) == Ledger()


def test_ledger_of_a_newer_operator_is_read() -> None:
    text = msgspec.json.encode({"forgotten_at": 7, "somethingNew": [1]}).decode()
    assert parse_ledger(text).forgotten_at == 7
