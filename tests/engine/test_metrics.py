"""Metric families: names of serving.md 7.1, bounded labels, buckets; what a finished attempt and a load report add."""

import math

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from prefill_engine.front.load import LoadBoard
from prefill_engine.front.telemetry import Telemetry
from prefill_engine.messages import Resolved
from prefill_engine.metrics import Metrics
from prefill_testing.fake_rank import load_message
from prefill_testing.lifecycle_rig import LifecycleRig

# serving.md 7.1, the families of a PE; pe_pages_quarantined, pe_collective_wait_seconds and pe_flops_total need what one CPU
# rank does not have (RDMA pages, a collective, a GPU).
NAMES = frozenset(
    """
    pe_requests_total pe_attempts_waiting pe_attempts_running pe_rows_waiting pe_predicted_wait_seconds
    pe_kv_usage_ratio pe_kv_ticket_ratio pe_state_slots_free pe_cache_info pe_step_seconds pe_step_rows
    pe_step_model_ms pe_lockstep_efficiency_ratio pe_last_step_age_seconds pe_steps_total pe_prompt_tokens_total
    pe_replayed_rows_total pe_image_tokens_total pe_wasted_rows_total pe_stage_seconds pe_ttft_seconds
    pe_hit_shrunk_total pe_swa_source_total pe_kv_transfer_seconds pe_kv_transfer_bytes_total
    pe_kv_transfer_failures_total pe_tickets_open pe_ticket_expired_total pe_store_lag_blocks
    pe_store_commit_seconds pe_startup_seconds pe_weight_load_bytes pe_epoch
    pe_kv_open_total pe_kv_hit_tokens_total pe_kv_requested_tokens_total kv_swapin_stall_seconds pe_kv_group_ready_seconds
    kv_replay_total kv_handoff_seconds
    """.split()  # noqa: SIM905
)
FORBIDDEN_LABELS = {"tenant", "request_id", "attempt_id", "ticket_id"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def telemetry_of(registry: CollectorRegistry) -> Telemetry:
    board = LoadBoard(num_ranks=1, chunk_rows=100, epoch=1, started=0.0)
    return Telemetry(Metrics(registry), board, started=0.0)


def test_every_family_of_the_contract_is_declared(registry: CollectorRegistry):
    Metrics(registry)
    declared = {name for names in registry._collector_to_names.values() for name in names}
    assert declared >= NAMES


def test_no_family_has_an_unbounded_label(registry: CollectorRegistry):
    metrics = Metrics(registry)
    for family in vars(metrics).values():
        assert not FORBIDDEN_LABELS & set(family._labelnames)


def test_histograms_run_from_a_millisecond_to_two_minutes(registry: CollectorRegistry):
    bounds = Metrics(registry).ttft_seconds._kwargs["buckets"]
    assert (bounds[0], bounds[-1]) == (0.001, 120)
    assert all(
        math.isclose(low / 10 ** math.floor(math.log10(low)), round(low / 10 ** math.floor(math.log10(low))))
        for low in bounds[:-1]
    )


def test_prompt_tokens_by_source_sum_to_the_prompt(registry: CollectorRegistry):
    rig = LifecycleRig()
    attempt = rig.submit()
    ticket = rig.run_to_ticket()
    rig.stored()
    rig.claim(ticket)
    rig.settle(ticket)
    telemetry_of(registry).attempt_finished(attempt)
    value = registry.get_sample_value
    total = sum(value("pe_prompt_tokens_total", {"source": source}) or 0 for source in ("computed", "kv_hit"))
    assert total == attempt.call.num_tokens
    assert value("pe_requests_total", {"outcome": "completed", "reason": ""}) == 1
    assert value("pe_stage_seconds_count", {"stage": "compute"}) == 1


def test_failed_attempt_counts_its_rows_as_wasted(registry: CollectorRegistry):
    rig = LifecycleRig()
    attempt = rig.submit()
    rig.resolve()
    rig.start()
    rig.chunk(done=100)
    rig.failed()
    telemetry_of(registry).attempt_finished(attempt)
    assert registry.get_sample_value("pe_wasted_rows_total", {"reason": "KERNEL_FAULT"}) == 100
    assert registry.get_sample_value("pe_requests_total", {"outcome": "failed", "reason": "KERNEL_FAULT"}) == 1


def test_lockstep_efficiency_is_the_mean_over_the_fullest_rank(registry: CollectorRegistry):
    telemetry = telemetry_of(registry)
    board = LoadBoard(num_ranks=2, chunk_rows=100, epoch=1, started=0.0)
    for rank, rows in ((0, 100), (1, 50)):
        load = load_message(rank)
        assert load.step is not None
        telemetry.rank_load(structs.replace(load, step=structs.replace(load.step, encoder_rows=rows)))
    view = board.view(now=1.0, draining=False, working_since={}, tickets_open={})
    telemetry.refresh(view, rows_waiting={(0, 2): 70}, wait_seconds=0.5, grants_open=0)
    assert registry.get_sample_value("pe_lockstep_efficiency_ratio") == pytest.approx(0.75)
    assert registry.get_sample_value("pe_rows_waiting", {"rank": "0", "class": "standard"}) == 70
    assert registry.get_sample_value("pe_predicted_wait_seconds") == 0.5


def test_load_report_sets_rank_gauges_and_counts_steps_once(registry: CollectorRegistry):
    telemetry = telemetry_of(registry)
    telemetry.rank_load(load_message(0, steps=3))
    telemetry.rank_load(load_message(0, steps=5))
    value = registry.get_sample_value
    assert value("pe_steps_total", {"rank": "0"}) == 5
    assert value("pe_kv_usage_ratio", {"rank": "0"}) == pytest.approx(0.4)
    assert value("pe_kv_ticket_ratio", {"rank": "0"}) == pytest.approx(0.2)
    assert value("pe_step_seconds_count", {"kind": "real"}) == 2


def test_kv_counts_of_a_rank_become_families_and_are_added_once(registry: CollectorRegistry):
    telemetry, load, value = telemetry_of(registry), load_message(0), registry.get_sample_value
    totals = {
        "kv_open_exact": 2,
        "kv_hit_tokens": 1280,
        "kv_swapin_whole": 2,
        "kv_swapin_late": 1,
        "kv_swapin_gone": 2,
        "kv_swapin_given_up": 1,
        "kv_open_shrunk": 3,
        "kv_swapin_stall_us_1": 2_500,
        "kv_group_ready_us_0": 6_000,
        "kv_group_ready_count_0": 2,
        "blocks_evicted": 3,
    }
    more = totals | {"kv_group_ready_us_0": 10_000, "kv_group_ready_count_0": 3, "kv_hit_tokens": 1408}
    for counters in (totals, totals, more):
        telemetry.rank_load(structs.replace(load, counters=counters))
    assert value("pe_kv_open_total", {"mode": "exact"}) == 2
    assert value("pe_kv_hit_tokens_total") == 1408
    assert value("kv_swapin_total", {"ending": "whole"}) == 2
    assert value("pe_hit_shrunk_total", {"reason": "pressure"}) == 3
    assert [value("kv_swapin_total", {"ending": ending}) for ending in ("late", "gone")] == [1, 2]
    assert value("pe_hit_shrunk_total", {"reason": "swap_in"}) == 3
    assert value("kv_swapin_stall_seconds_total", {"group": "1"}) == pytest.approx(0.0025)
    assert value("pe_kv_group_ready_seconds_count", {"group": "0"}) == 3
    assert value("pe_kv_group_ready_seconds_sum", {"group": "0"}) == pytest.approx(0.010)
    assert value("pe_rank_events", {"rank": "0", "name": "blocks_evicted"}) == 3
    assert value("pe_rank_events", {"rank": "0", "name": "kv_hit_tokens"}) is None


@pytest.mark.parametrize(("planned", "reason"), [("replay", "none"), ("peer", "pull"), ("local", "lost")])
def test_replays_are_counted_by_what_was_planned(registry: CollectorRegistry, planned: str, reason: str):
    rig = LifecycleRig()
    attempt = rig.submit()
    ticket = rig.run_to_ticket()
    rig.stored()
    rig.claim(ticket)
    rig.settle(ticket)
    assert attempt.computed is not None
    attempt.computed = structs.replace(attempt.computed, replayed_tokens=128)
    telemetry = telemetry_of(registry)
    resolved = Resolved(
        attempt_id=attempt.call.attempt_id,
        effective_hit=1280,
        replay_rows=128,
        compute_rows=300,
        swa_source=planned,
        predicted_wait_seconds=0.0,
        predicted_finish_seconds=0.1,
        at_ns=0,
    )
    telemetry.attempt_accepted(attempt, resolved)
    telemetry.attempt_finished(attempt)
    assert registry.get_sample_value("kv_replay_total", {"reason": reason}) == 1
