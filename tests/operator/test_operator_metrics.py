"""prefill_operator.operator_metrics and pool_metrics: names, labels, and that a pool's series go with it."""

import re

from prometheus_client import generate_latest

from prefill_operator.names import ConditionType, Kind
from prefill_operator.resources import POOLS
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import OperatorRig

LABELS = 'kind="PrefillPool",namespace="ns",pool="flash"'

NAMES = {
    "prefill_operator_reconcile_seconds",
    "prefill_operator_reconcile_errors",
    "prefill_operator_queue_depth",
    "prefill_operator_oldest_key_seconds",
    "prefill_operator_api_requests",
    "prefill_operator_watch_restarts",
    "prefill_operator_resync_mismatch",
    "prefill_operator_leader",
    "prefill_operator_event_loop_lag_seconds",
    "prefill_pool_pes",
    "prefill_pool_desired",
    "prefill_pool_ep",
    "prefill_pool_gpus",
    "prefill_pool_condition",
    "prefill_pool_autoscaling",
    "prefill_pool_load_seconds",
    "prefill_pool_drain_seconds",
    "prefill_pool_ep_escalations",
    "prefill_pool_expected_availability",
    "prefill_pool_pe_failures",
    "prefill_drain_deadline_exceeded",
}
"""k8s.md 4.14 and 4.7."""


def _text(rig: OperatorRig) -> str:
    return generate_latest(rig.metrics.registry).decode()


def _value(rig: OperatorRig, name: str, **labels: str) -> float | None:
    return rig.metrics.registry.get_sample_value(
        name, {"kind": "PrefillPool", "namespace": "ns", "pool": "flash", **labels}
    )


async def _rolled_rig() -> OperatorRig:
    rig = await OperatorRig.start()
    rig.create_pool()
    await rig.run(5)
    rig.change_spec(engine={"image": "engine:2"})
    await rig.run(14)
    return rig


@in_loop
async def test_all_promised_metrics_are_there() -> None:
    rig = await _rolled_rig()
    found = {metric.name for metric in rig.metrics.registry.collect()}

    assert found >= NAMES
    assert {name for name in found if name.startswith("prefill_")} == NAMES


@in_loop
async def test_pool_series_say_what_the_status_says() -> None:
    rig = await _rolled_rig()

    assert [_value(rig, "prefill_pool_pes", state=state) for state in ("ready", "loading", "draining", "broken")] == [
        3,
        0,
        0,
        0,
    ]
    assert [_value(rig, "prefill_pool_desired", part=part) for part in ("capacity", "spares")] == [2, 1]
    assert (_value(rig, "prefill_pool_ep"), _value(rig, "prefill_pool_gpus")) == (4, 12)


@in_loop
async def test_each_condition_has_one_series() -> None:
    rig = await _rolled_rig()
    rows = re.findall(r'^prefill_pool_condition\{.*status="(\w+)",type="(\w+)"\} (\S+)$', _text(rig), re.MULTILINE)

    statuses = {item["type"]: item["status"] for item in rig.pool()["status"]["conditions"]}
    assert {kind: status for status, kind, _ in rows} == statuses
    assert len(rows) == len(ConditionType)
    assert {value for _, _, value in rows} == {"1.0"}


@in_loop
async def test_loads_and_drains_are_counted_once() -> None:
    rig = await _rolled_rig()

    assert _value(rig, "prefill_pool_load_seconds_count") == 6
    assert _value(rig, "prefill_pool_drain_seconds_count") == 3
    rig.leader.queue.add(rig.leader.cache.pool_keys()[0])
    await rig.settle()
    assert _value(rig, "prefill_pool_load_seconds_count") == 6


@in_loop
async def test_late_drain_is_counted() -> None:
    rig = await OperatorRig.start()
    rig.create_pool({"lifecycle": {"drainTimeoutSeconds": 5}})
    await rig.run(4)
    rig.engines.done.clear()
    rig.change_spec(replicas=1)
    await rig.run(6)

    assert _value(rig, "prefill_drain_deadline_exceeded_total") == 1


@in_loop
async def test_series_go_with_the_pool() -> None:
    rig = await _rolled_rig()
    assert LABELS in _text(rig)
    rig.api.remove(POOLS[Kind.PREFILL_POOL], "flash", "ns")
    await rig.settle()

    assert LABELS not in _text(rig)


@in_loop
async def test_no_label_names_a_pod_or_node() -> None:
    rig = await _rolled_rig()
    text = _text(rig)

    assert not [name for name in (*rig.names(), "node-0") if name in text]


@in_loop
async def test_requests_are_counted_by_verb_resource_and_code() -> None:
    rig = await OperatorRig.start()
    rig.metrics.count_request("list", "pods", 200)
    rig.metrics.count_request("create", "pods", 0)

    text = _text(rig)
    assert 'prefill_operator_api_requests_total{code="200",resource="pods",verb="list"} 1.0' in text
    assert 'prefill_operator_api_requests_total{code="0",resource="pods",verb="create"} 1.0' in text
