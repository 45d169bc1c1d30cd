"""prefill_operator.reconcile where something goes wrong: specs, API server, quota, leases, bugs; on an API server in memory."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import generate_latest

from prefill_operator.errors import LeaseLost
from prefill_operator.model import ChildKind
from prefill_operator.names import Kind
from prefill_operator.reconcile import MAX_PASSES_IN_A_ROW
from prefill_operator.resources import CHILDREN, POOLS
from prefill_testing.fake_api import Fault
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY, OperatorRig
from prefill_testing.operator_rig import POOL as POOL_BODY

SERVICE = CHILDREN[ChildKind.SERVICE]
BUDGET = CHILDREN[ChildKind.DISRUPTION_BUDGET]
CONFIG_MAP = CHILDREN[ChildKind.CONFIG_MAP]
POOL = POOLS[Kind.PREFILL_POOL]
IMAGE_2 = {"image": "engine:2"}
Rigs = Callable[..., Awaitable[OperatorRig]]


@in_loop
async def test_spec_that_cannot_be_used_is_told_and_pods_stay(ready_rig: Rigs) -> None:
    rig = await ready_rig()
    names = rig.names()
    rig.change_spec(gpu={})
    await rig.run(3)

    plan = rig.condition("PlanFeasible")
    assert (plan["status"], plan["reason"]) == ("False", "SpecInvalid")
    assert "spec.gpu" in plan["message"]
    assert rig.names() == names
    rig.api.requests.clear()
    rig.leader.queue.add(KEY)
    await rig.settle()
    assert rig.api.writes() == [], "told once"

    rig.change_spec(gpu={"product": "NVIDIA-H200"})
    await rig.run(3)
    assert rig.condition("PlanFeasible")["status"] == "True"


@in_loop
async def test_architecture_of_a_newer_release_is_told_as_such(ready_rig: Rigs) -> None:
    rig = await ready_rig()
    rig.change_spec(model={**rig.pool()["spec"]["model"], "architecture": "deepseek-v5"})
    await rig.run(3)

    plan = rig.condition("PlanFeasible")
    assert (plan["status"], plan["reason"]) == ("False", "UnknownArchitecture")
    assert "deepseek-v5" in plan["message"]
    assert rig.condition("Ready")["reason"] == "SpecInvalid"
    assert len(rig.names()) == 3


@pytest.mark.parametrize(
    "fault", [{"status": 0}, {"status": 500}, {"status": 429, "retry_after": 7.0}, {"status": 504}]
)
@in_loop
async def test_flapping_api_server_ends_in_the_same_state_without_runaways(fault: dict[str, Any]) -> None:
    rig = await OperatorRig.start()
    rig.api.faults += [Fault(resource=resource, times=2, **fault) for resource in ("pods", "services", "prefillpools")]
    rig.create_pool()
    await rig.run(30)

    assert len(rig.names()) == 3
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_create_whose_answer_was_lost_makes_no_second_pod() -> None:
    rig = await OperatorRig.start()
    rig.api.faults.append(Fault(verb="create", resource="pods", after=True, times=2))
    rig.create_pool()
    await rig.run(8)

    assert len(rig.names()) == 3
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_failures_back_off() -> None:
    rig = await OperatorRig.start()
    rig.api.faults.append(Fault(verb="create", resource="configmaps", status=500, times=1000))
    rig.create_pool()
    for _ in range(100):
        await rig.settle()
        await rig.advance(1.0)
    attempts = [
        request for request in rig.api.requests if request.resource == "configmaps" and request.verb == "create"
    ]

    assert 5 <= len(attempts) <= 8, "1, 2, 4 .. 60 s apart"
    assert rig.nodes.pods() == []


@in_loop
async def test_quota_is_told_and_asked_again_slowly() -> None:
    rig = await OperatorRig.start()
    text = 'pods "x" is forbidden: exceeded quota: gpus, requested: 4, used: 8, limited: 8'
    rig.api.faults.append(Fault(verb="create", resource="pods", status=403, reason="Forbidden", message=text, times=3))
    rig.create_pool()
    await rig.run(10)
    assert rig.condition("Progressing")["reason"] == "QuotaExceeded"
    assert "used: 8, limited: 8" in rig.condition("Progressing")["message"]
    attempts = [request for request in rig.api.requests if request.verb == "create" and request.resource == "pods"]
    assert len(attempts) == 1

    await rig.run(120)

    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_failures_beside_a_refusal_still_back_off() -> None:
    rig = await OperatorRig.start()
    text = 'pods "x" is forbidden: exceeded quota: gpus'
    rig.api.faults.append(Fault(verb="create", resource="pods", status=403, reason="Forbidden", message=text, times=99))
    rig.create_pool()
    await rig.settle()
    rig.api.faults.append(Fault(verb="apply", resource="services", status=500, times=1000))
    rig.api.remove(SERVICE, "flash", "ns")
    for _ in range(50):
        await rig.settle()
        await rig.advance(1.0)
    attempts = [request for request in rig.api.requests if request.resource == "services" and request.verb == "apply"]

    assert len(attempts) <= 8


@in_loop
async def test_two_leaders_on_stale_views_never_make_two_of_one(ready_rig: Rigs) -> None:
    """Fencing excludes this; it must be harmless all the same."""
    rig = await ready_rig()
    other = await OperatorRig.start(api=rig.api, clock=rig.clock, nodes=0)
    other.nodes = rig.nodes
    rig.change_spec(engine=IMAGE_2, replicas=3)
    for turn in range(60):
        one = (rig, other)[turn % 2]
        if turn % 3:
            one.tell()
        one.leader.queue.add(KEY)
        one.leader.queue.release_due()
        await one.leader.reconciler.step(await one.leader.queue.take())
        assert len({pod["metadata"]["name"] for pod in rig.nodes.pods()}) <= 6
        rig.nodes.step()
        await rig.advance(2.0)
        await other.lease.try_hold()
    await rig.run(6)

    assert len(rig.nodes.pods()) == 4
    assert {pod["spec"]["containers"][0]["image"] for pod in rig.nodes.pods()} == {"engine:2"}


@in_loop
async def test_lost_lease_ends_the_worker_without_a_write(ready_rig: Rigs) -> None:
    rig = await ready_rig()
    rig.change_spec(replicas=4)
    rig.tell()
    rig.clock.now += 11.0

    with pytest.raises(LeaseLost):
        await rig.leader.reconciler.work()

    assert rig.api.writes() == []


@in_loop
async def test_one_broken_pool_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await OperatorRig.start()
    rig.create_pool()
    rig.api.put(POOL, {**rig.pool(), "metadata": {"name": "other", "namespace": "ns"}})
    observe = rig.leader.reconciler._observer.observe

    def fail_for_one(key: Any, *rest: Any) -> Any:
        if key == KEY:
            raise ZeroDivisionError
        return observe(key, *rest)

    monkeypatch.setattr(rig.leader.reconciler._observer, "observe", fail_for_one)
    await rig.run(4)

    assert {pod["metadata"]["labels"]["prefill.dev/pool"] for pod in rig.nodes.pods()} == {"other"}
    assert 'prefill_operator_reconcile_errors_total{kind="PrefillPool",reason="BUG"}' in _metrics(rig)


@in_loop
async def test_workers_bound_what_is_asked_of_the_api_server_at_once() -> None:
    """k8s.md 2 row 66: each worker has one request under way, however many pools wait."""
    rig = await OperatorRig.start()
    for number in range(20):
        rig.api.put(POOL, {**POOL_BODY, "metadata": {"name": f"pool{number}", "namespace": "ns"}})
    request, under_way, most = rig.cluster._request, 0, 0

    async def counted(*args: Any, **options: Any) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        try:
            return await request(*args, **options)
        finally:
            under_way -= 1

    rig.cluster._request = counted  # type: ignore[method-assign]
    rig.tell()
    workers = [asyncio.create_task(rig.leader.reconciler.work()) for _ in range(rig.settings.workers)]
    while len(rig.nodes.pods()) < 60:
        await asyncio.sleep(0.001)
    for worker in workers:
        worker.cancel()

    assert most == rig.settings.workers == 8


@in_loop
async def test_fight_over_a_child_is_slowed_down(ready_rig: Rigs) -> None:
    rig = await ready_rig()
    for _ in range(MAX_PASSES_IN_A_ROW + 5):
        budget = rig.api.get(BUDGET, "flash", "ns")
        rig.api.put(BUDGET, {**budget, "spec": {**budget["spec"], "minAvailable": 0}})
        rig.tell()
        if rig.leader.queue.depth:
            await rig.leader.reconciler.step(await rig.leader.queue.take())

    assert 'reason="PREFILL"' in _metrics(rig)


def _metrics(rig: OperatorRig) -> str:
    return generate_latest(rig.metrics.registry).decode()
