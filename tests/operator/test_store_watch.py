"""The annotation prefill.dev/kv-store: which PE serves without its KV store, from its own word to the pool's (k8s.md 4.9)."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from prefill_operator.engine_wire import LoadState
from prefill_operator.resources import PODS, PoolKey
from prefill_operator.store_watch import StoreWatch, WatchedEngine
from prefill_testing.fake_cluster import FakeEngines
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY, OperatorRig

ADDRESS = "10.0.0.1:50051"
KVD = {"kvd": {"enabled": True, "image": "kvd:1"}}
ReadyRig = Callable[..., Awaitable[OperatorRig]]


def _watch(*, was_degraded: bool = False) -> tuple[StoreWatch, FakeEngines, list[PoolKey]]:
    engines, changed = FakeEngines(), list[PoolKey]()
    watch = StoreWatch(engines, on_change=changed.append, seconds=0.01)
    watch.keep_only(KEY, {"u1": WatchedEngine(address=ADDRESS, is_degraded=was_degraded)})
    return watch, engines, changed


DEGRADED, READY, DRAINING, SILENT = LoadState.DEGRADED, LoadState.READY, LoadState.DRAINING, None


@pytest.mark.parametrize(
    ("was", "answers", "after", "changes"),
    [
        (False, [READY, READY], False, 0),
        (False, [DEGRADED], False, 0),
        (False, [DEGRADED, DEGRADED], True, 1),
        (False, [DEGRADED, DEGRADED, DEGRADED], True, 1),
        (False, [DEGRADED, READY, DEGRADED, READY], False, 0),
        (False, [DEGRADED, SILENT, DEGRADED], False, 0),
        (True, [READY, READY], False, 1),
        (True, [SILENT, SILENT, SILENT], True, 0),
        (True, [DRAINING, DRAINING], True, 0),
        (True, [DEGRADED, DEGRADED], True, 0),
        (False, [DEGRADED, DEGRADED, READY, READY], False, 2),
    ],
    ids=str,
)
@in_loop
async def test_what_is_heard_twice_counts(
    was: bool, answers: list[LoadState | None], after: bool, changes: int
) -> None:
    watch, engines, changed = _watch(was_degraded=was)
    for answer in answers:
        engines.is_unreachable = answer is SILENT
        if answer is not SILENT:
            engines.states[ADDRESS] = answer
        await watch.look("u1")

    assert watch.is_degraded("u1") == after
    assert changed == [KEY] * changes


@in_loop
async def test_pod_that_is_no_longer_asked_is_forgotten() -> None:
    watch, engines, changed = _watch()
    engines.states[ADDRESS] = DEGRADED
    await watch.look("u1")
    watch.keep_only(KEY, {})
    await watch.look("u1")

    assert watch.uids == ()
    assert watch.is_degraded("u1") is None
    assert changed == []


@in_loop
async def test_another_pass_does_not_lose_what_was_heard() -> None:
    watch, engines, _ = _watch()
    engines.states[ADDRESS] = DEGRADED
    for _ in range(2):
        await watch.look("u1")
        watch.keep_only(KEY, {"u1": WatchedEngine(address=ADDRESS, is_degraded=False)})

    assert watch.is_degraded("u1") is True


@in_loop
async def test_silent_engine_holds_up_nobody() -> None:
    """Asked by the task that runs in the operator; one of three never answers."""
    watch, engines, changed = _watch()

    async def load_state(address: str) -> LoadState:
        if address == "frozen":
            await asyncio.Event().wait()
        return LoadState.DEGRADED

    engines.load_state = load_state  # type: ignore[method-assign]
    others = {name: WatchedEngine(address=name, is_degraded=False) for name in ("frozen", "a", "b")}
    watch.keep_only(KEY, others)
    asking = asyncio.create_task(watch.keep())
    async with asyncio.timeout(30):
        while len(changed) < 2:
            await asyncio.sleep(0.01)
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking

    assert [watch.is_degraded(name) for name in others] == [False, True, True]


async def _ask(rig: OperatorRig, *, times: int = 2) -> None:
    for _ in range(times):
        for uid in rig.leader.stores.uids:
            await rig.leader.stores.look(uid)
    await rig.run(2)


def _notes(rig: OperatorRig) -> list[str | None]:
    return [pod["metadata"]["annotations"].get("prefill.dev/kv-store") for pod in rig.nodes.pods()]


@in_loop
async def test_lost_store_is_noted_on_the_pod_and_told_by_the_pool(ready_rig: ReadyRig) -> None:
    rig = await ready_rig(KVD)
    pod = rig.nodes.pods()[1]
    rig.nodes.change_pod(pod["metadata"]["name"], {"podIP": "10.0.0.9"})
    await rig.settle()
    address = "10.0.0.9:50051"
    rig.engines.states[address] = DEGRADED
    await _ask(rig)

    assert _notes(rig) == [None, "degraded", None]
    where = f"{pod['metadata']['name']} on {pod['spec']['nodeName']}"
    for kind in ("Ready", "Available", "Progressing"):
        assert rig.condition(kind)["status"] == "True"
        assert rig.condition(kind)["message"] == f"3/2 ready, 1 without KV store ({where})"
    rig.written()
    await _ask(rig)
    assert rig.written() == [], "and nothing is written while nothing changes"
    rig.engines.states[address] = READY
    await _ask(rig)
    assert _notes(rig) == [None, None, None]
    assert rig.condition("Ready")["message"] == "3/2 ready"


@in_loop
async def test_restarted_operator_goes_on_from_the_annotation(
    ready_rig: ReadyRig, restarted: Callable[[OperatorRig], Awaitable[OperatorRig]]
) -> None:
    rig = await ready_rig(KVD)
    rig.engines.states[ADDRESS] = DEGRADED
    await _ask(rig)
    assert _notes(rig) == ["degraded"] * 3

    again = await restarted(rig)
    again.engines.is_unreachable = True
    await again.run(2)
    await _ask(again)
    assert again.written() == []
    assert "3 without KV store" in again.condition("Ready")["message"]


@in_loop
async def test_paused_pool_tells_of_its_stores_too(ready_rig: ReadyRig) -> None:
    rig = await ready_rig(KVD)
    rig.change_spec(paused=True)
    await rig.run(1)
    rig.engines.states[ADDRESS] = DEGRADED
    await _ask(rig)

    assert "3 without KV store" in rig.condition("Ready")["message"]


@pytest.mark.parametrize("why", ["no kvd", "not ready", "draining", "gone"])
@in_loop
async def test_who_cannot_tell_is_not_asked(ready_rig: ReadyRig, why: str) -> None:
    rig = await ready_rig({} if why == "no kvd" else KVD)
    assert len(rig.leader.stores.uids) == (0 if why == "no kvd" else 3)
    pod = rig.nodes.pods()[0]
    if why == "not ready":
        kept = [item for item in pod["status"]["conditions"] if item["type"] != "ContainersReady"]
        rig.nodes.change_pod(pod["metadata"]["name"], {"conditions": kept})
    elif why == "draining":
        rig.engines.done.clear()
        rig.change_spec(replicas=1)
    elif why == "gone":
        rig.api.remove(PODS, pod["metadata"]["name"], "ns")
    await rig.settle()

    uid = pod["metadata"]["uid"] if why != "draining" else _drained(rig)
    assert uid not in rig.leader.stores.uids


def _drained(rig: OperatorRig) -> str:
    notes = {pod["metadata"]["uid"]: pod["metadata"]["annotations"] for pod in rig.nodes.pods()}
    return next(uid for uid, note in notes.items() if "prefill.dev/draining-since" in note)
