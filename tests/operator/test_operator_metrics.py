"""prefill_operator.operator_metrics and pool_metrics: names, labels, and that a pool's series go with it."""

import re
from unittest.mock import patch

from prometheus_client import generate_latest

from prefill_operator.api_status import PoolStatus
from prefill_operator.model import Decision, DeletePod, SetPoolAnnotation
from prefill_operator.names import ConditionType, Kind
from prefill_operator.resources import POOLS
from prefill_testing.fake_api import Fault
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
    "prefill_operator_resync_rounds",
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
async def test_a_load_is_counted_when_the_pod_becomes_ready_and_by_no_later_operator() -> None:
    rig = await OperatorRig.start()
    rig.create_pool()
    await rig.run(5)
    assert _value(rig, "prefill_pool_load_seconds_count") == 3

    later = await OperatorRig.start(api=rig.api, clock=rig.clock, nodes=0)
    await later.run(3)
    assert _value(later, "prefill_pool_pes", state="ready") == 3
    assert not _value(later, "prefill_pool_load_seconds_count")
    later.change_spec(replicas=3)
    await later.run(5)
    assert _value(later, "prefill_pool_load_seconds_count") == 1


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


def _crash(rig: OperatorRig, name: str, *, restarts: int) -> None:
    """The engine has ended for the `restarts`-th time, and runs again."""
    end = {"exitCode": 1, "reason": "Error", "finishedAt": rig.api.stamp()}
    container = {"name": "engine", "restartCount": restarts, "lastState": {"terminated": end}}
    rig.nodes.change_pod(name, {"containerStatuses": [{**container, "state": {"running": {}}}]})


@in_loop
async def test_ends_in_place_are_failures_those_that_no_pass_saw_included() -> None:
    rig = await OperatorRig.start()
    rig.create_pool()
    await rig.run(5)
    assert _value(rig, "prefill_pool_pe_failures_total") == 0

    _crash(rig, rig.names()[0], restarts=1)
    await rig.run(2)
    assert _value(rig, "prefill_pool_pe_failures_total") == 1
    _crash(rig, rig.names()[0], restarts=2)
    _crash(rig, rig.names()[1], restarts=1)
    await rig.run(2)
    assert _value(rig, "prefill_pool_pe_failures_total") == 3

    later = await OperatorRig.start(api=rig.api, clock=rig.clock, nodes=0)
    await later.run(2)
    assert _value(later, "prefill_pool_pe_failures_total") == 0


@in_loop
async def test_a_crash_loop_is_as_many_failures_as_its_ends() -> None:
    rig = await OperatorRig.start()
    rig.create_pool()
    await rig.run(5)
    name = rig.names()[0]
    rig.nodes.lose_readiness(name)
    for restarts in (1, 2, 3):
        await rig.advance(10)
        _crash(rig, name, restarts=restarts)
        await rig.settle()
    await rig.run(3)

    assert name not in rig.names()
    assert _value(rig, "prefill_pool_pe_failures_total") == 3


@in_loop
async def test_a_lost_node_is_a_failure_of_each_of_its_pods() -> None:
    rig = await OperatorRig.start()
    rig.create_pool({"replicas": 4})
    await rig.run(5)
    lost = rig.nodes.pods()[0]["spec"]["nodeName"]
    gone = [pod["metadata"]["name"] for pod in rig.nodes.pods() if pod["spec"]["nodeName"] == lost]
    rig.nodes.dead.add(lost)
    rig.nodes.set_node(lost, ready=False)
    await rig.run(30, seconds=60.0)

    assert len(gone) == 2
    assert _value(rig, "prefill_pool_pe_failures_total") == len(gone)


@in_loop
async def test_a_cordoned_node_is_no_failure() -> None:
    rig = await OperatorRig.start()
    rig.create_pool()
    await rig.run(5)
    rig.nodes.set_node(rig.nodes.pods()[0]["spec"]["nodeName"], unschedulable=True)
    before = rig.names()
    await rig.run(14)

    assert rig.names() != before
    assert _value(rig, "prefill_pool_pe_failures_total") == 0


@in_loop
async def test_what_a_pass_did_before_it_failed_is_counted() -> None:
    rig = await OperatorRig.start()
    rig.create_pool()
    await rig.run(5)
    key = rig.leader.cache.pool_keys()[0]
    pods = [pod.observed for pod in rig.leader.cache.pods(key)]
    gone = DeletePod(name=pods[0].name, uid=pods[0].uid, grace_seconds=None, reason="NodeLost")
    never = DeletePod(name=pods[1].name, uid=pods[1].uid, grace_seconds=None, reason="NodeLost")
    note = SetPoolAnnotation(key="note", value="x")
    decision = Decision(actions=(gone, note, never), status=PoolStatus(), next_wakeup=None)
    rig.api.faults.append(Fault(resource=POOLS[Kind.PREFILL_POOL].plural, status=503))
    with patch("prefill_operator.reconcile.decide", return_value=decision):
        rig.leader.queue.add(key)
        await rig.leader.reconciler.step(await rig.leader.queue.take())

    assert _value(rig, "prefill_pool_pe_failures_total") == 1


@in_loop
async def test_expected_availability_goes_with_the_wish_for_it() -> None:
    rig = await OperatorRig.start()
    wish = {"peMTBFSeconds": 604800, "target": "0.999", "restartSeconds": 600}
    rig.create_pool({"quota": {"redundancy": {"mode": "Availability", "availability": wish}}})
    await rig.run(5)
    assert _value(rig, "prefill_pool_expected_availability") > 0.99
    rig.change_spec(quota={"redundancy": {"mode": "Fixed", "spares": 1}})
    await rig.run(5)

    assert _value(rig, "prefill_pool_expected_availability") is None


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
