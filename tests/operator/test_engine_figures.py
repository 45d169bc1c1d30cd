"""What engines tell, on the way to where it counts: the victim of a scale-down, the conditions, status.load (k8s.md 3.3, 4.5)."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from prefill_operator.engine_load import EngineReport, PatchCount
from prefill_operator.engine_wire import LoadState
from prefill_operator.model import LoadProgress
from prefill_operator.names import Kind
from prefill_operator.resources import EVENTS, POOLS
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import OperatorRig

ADDRESS = "10.0.0.1:50051"
NO_SPARES = {"redundancy": {"mode": "Fixed", "spares": 0}}
ReadyRig = Callable[..., Awaitable[OperatorRig]]


def _own_addresses(rig: OperatorRig) -> dict[str, str]:
    """By pod: in this cluster all pods have one address until a test says otherwise."""
    found = {}
    for index, pod in enumerate(rig.nodes.pods()):
        name = pod["metadata"]["name"]
        rig.nodes.change_pod(name, {"podIP": f"10.0.1.{index}"})
        found[name] = f"10.0.1.{index}:50051"
    return found


@pytest.mark.parametrize("least", [0, 1, 2, 3])
@in_loop
async def test_scale_down_takes_the_engine_with_the_least_backlog_and_asking_writes_nothing(
    ready_rig: ReadyRig, least: int
) -> None:
    rig = await ready_rig({"replicas": 4, "quota": NO_SPARES})
    assert sorted(pod["spec"]["nodeName"] for pod in rig.nodes.pods()) == ["node-0"] * 2 + ["node-1"] * 2
    addresses = _own_addresses(rig)
    await rig.settle()
    for index, address in enumerate(addresses.values()):
        rig.engines.reports[address] = EngineReport(backlog_milliseconds=40.0 if index == least else 90.0 + index)
    rig.written()
    await rig.ask_engines(times=2)
    assert rig.written() == []

    rig.engines.done.clear()
    rig.change_spec(replicas=3)
    await rig.settle()
    assert [address for address, _ in rig.engines.calls] == [list(addresses.values())[least]]


@in_loop
async def test_conditions_tell_how_far_a_load_is_and_are_not_rewritten_in_between(ready_rig: ReadyRig) -> None:
    rig = await ready_rig({"replicas": 1, "quota": NO_SPARES})
    (pod,) = rig.nodes.pods()
    rig.nodes.lose_readiness(pod["metadata"]["name"])
    await rig.settle()
    rig.engines.states[ADDRESS] = LoadState.STARTING
    told, writes = [], []
    for loaded in (100, 101, 301, 510):
        progress = LoadProgress(loaded_bytes=loaded * 10**9, total_bytes=510 * 10**9)
        rig.engines.reports[ADDRESS] = EngineReport(progress=progress)
        rig.written()
        await rig.ask_engines()
        writes.append(len(rig.written()))
        told.append(rig.condition("Ready")["message"].partition(" (")[2].partition(")")[0])

    assert told == ["76/510 GB", "76/510 GB", "280/510 GB", "510/510 GB"]
    assert writes == [1, 0, 1, 1]
    await rig.ask_engines(times=2)
    assert rig.written() == []


VE_POOL: dict[str, Any] = {
    "metadata": {"name": "eyes", "namespace": "ns"},
    "spec": {
        "model": {"name": "flash", "revision": "r1", "source": {"pvc": {"claimName": "ckpt"}}},
        "encoder": {"image": "engine:1"},
        "replicas": 2,
        "quota": {"spares": 0},
        "rollout": {"minReadySeconds": 0},
    },
}


async def _start_encoders() -> OperatorRig:
    rig = await OperatorRig.start()
    rig.api.put(POOLS[Kind.VE_POOL], VE_POOL)
    await rig.run(8)
    _own_addresses(rig)
    await rig.settle()
    return rig


async def _encode(rig: OperatorRig, *, encoded: int, queued: int) -> None:
    """One round in which the encoders have done so many patches more, and so many wait at the second one."""
    addresses = sorted(f"10.0.1.{index}:50051" for index in range(2))
    for index, address in enumerate(addresses):
        before = rig.engines.reports.get(address, EngineReport()).patches
        done = (before.encoded if before else 0) + encoded
        patches = PatchCount(epoch=1, queued=queued * index, encoded=done)
        rig.engines.reports[address] = EngineReport(backlog_milliseconds=0.0, patches=patches)
    await rig.advance(30.0)
    await rig.ask_engines()


@in_loop
async def test_status_of_a_ve_pool_tells_its_load_and_rests_with_it(
    restarted: Callable[[OperatorRig], Awaitable[OperatorRig]],
) -> None:
    rig = await _start_encoders()

    def load() -> Any:
        return rig.api.get(POOLS[Kind.VE_POOL], "eyes", "ns")["status"].get("load")

    assert load() is None
    await _encode(rig, encoded=0, queued=0)
    await _encode(rig, encoded=30_000, queued=12_345)
    seen = load()
    assert (seen["pendingPatches"], seen["imbalance"]) == (12_000, "2.0")
    assert 0 < seen["patchesPerSecond"] <= 2_000
    await _encode(rig, encoded=0, queued=0)
    rest = load()
    assert (rest["pendingPatches"], rest["patchesPerSecond"], rest["imbalance"]) == (0, 0, "1.0")
    assert rest["observedAt"] != seen["observedAt"]

    rig.written()
    for _ in range(3):
        await _encode(rig, encoded=0, queued=0)
    assert rig.written() == []

    reports = rig.engines.reports
    rig = await restarted(rig)
    rig.engines.reports = reports
    for _ in range(3):
        await _encode(rig, encoded=0, queued=0)
    assert rig.written() == []
    assert load() == rest

    for pod in rig.nodes.pods():
        rig.nodes.lose_readiness(pod["metadata"]["name"])
    await rig.settle()
    await rig.ask_engines()
    assert load() is None


@in_loop
async def test_ready_says_that_patches_wait_unevenly_and_is_not_rewritten_meanwhile() -> None:
    rig = await _start_encoders()

    def ready() -> Any:
        conditions = rig.api.get(POOLS[Kind.VE_POOL], "eyes", "ns")["status"]["conditions"]
        return next(item for item in conditions if item["type"] == "Ready")

    def warnings() -> list[str]:
        return [event["message"] for event in rig.api.all(EVENTS) if event["reason"] == "LoadImbalance"]

    await _encode(rig, encoded=0, queued=0)
    before = ready()["message"]
    # A round takes 34 s of the rig's clock, so the tenth of an uneven load is the first after five minutes. Less than a full
    # batch (16,384 patches) is none.
    for _ in range(11):
        await _encode(rig, encoded=0, queued=16_000)
    await _encode(rig, encoded=0, queued=40_000)
    rig.written()
    for _ in range(8):
        await _encode(rig, encoded=0, queued=40_000)
    assert (ready()["message"], rig.written()) == (before, [])

    await _encode(rig, encoded=0, queued=40_000)
    worst = rig.nodes.pods()[1]
    said = ready()
    assert said["status"] == "True"
    assert "patches wait unevenly for over 5 min: imbalance 2.0, expected at most 1.5" in said["message"]
    where = f"{worst['metadata']['name']} on {worst['spec']['nodeName']}"
    assert f"look first at {where}, where most are (40000)" in said["message"]
    assert len(warnings()) == 1

    rig.written()
    for _ in range(5):
        await _encode(rig, encoded=0, queued=40_000)
    assert (ready(), rig.written()) == (said, [])

    await _encode(rig, encoded=0, queued=0)
    assert ready()["message"] == before
    assert len(warnings()) == 1
