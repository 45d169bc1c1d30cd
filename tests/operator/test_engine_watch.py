"""What engines tell when they are asked: the KV store that is lost, backlog, progress of a load, patches (k8s.md 3.3, 4.9)."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from prefill_operator.engine_load import EngineReport, PatchCount
from prefill_operator.engine_watch import MAX_SILENT_ROUNDS, EngineWatch, WatchedEngine
from prefill_operator.engine_wire import LoadState
from prefill_operator.model import ImbalanceNote, LoadProgress, PoolLoad
from prefill_operator.names import Kind
from prefill_operator.resources import PODS, PoolKey
from prefill_testing.fake_cluster import FakeEngines
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY, OperatorRig

ADDRESS = "10.0.0.1:50051"
KVD = {"kvd": {"enabled": True, "image": "kvd:1"}}
ReadyRig = Callable[..., Awaitable[OperatorRig]]


def _engine(address: str = ADDRESS, **changes: Any) -> WatchedEngine:
    known: dict[str, Any] = {"has_store": True, "is_degraded": False, "is_loading": False}
    return WatchedEngine(address=address, **{**known, **changes})


def _watch(**engine: Any) -> tuple[EngineWatch, FakeEngines, list[PoolKey]]:
    """With one engine, u1."""
    engines, changed = FakeEngines(), list[PoolKey]()
    watch = EngineWatch(engines, on_change=changed.append, seconds=0.01, loading_seconds=0.01)
    watch.keep_only(KEY, {"u1": _engine(**engine)})
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
    watch, engines, changed = _watch(is_degraded=was)
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
        watch.keep_only(KEY, {"u1": _engine()})

    assert watch.is_degraded("u1") is True


@in_loop
async def test_silent_engine_holds_up_nobody() -> None:
    """Asked by the task that runs in the operator; one of three never answers."""
    watch, engines, changed = _watch()

    async def report(address: str, *, kind: Kind) -> EngineReport:
        if address == "frozen":
            await asyncio.Event().wait()
        return EngineReport(state=LoadState.DEGRADED)

    engines.report = report  # type: ignore[method-assign]
    others = {name: _engine(name) for name in ("frozen", "a", "b")}
    watch.keep_only(KEY, others)
    asking = asyncio.create_task(watch.keep())
    async with asyncio.timeout(30):
        while len(changed) < 2:
            await asyncio.sleep(0.01)
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking

    assert [watch.is_degraded(name) for name in others] == [False, True, True]


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
    await rig.ask_engines(times=2)

    assert _notes(rig) == [None, "degraded", None]
    where = f"{pod['metadata']['name']} on {pod['spec']['nodeName']}"
    for kind in ("Ready", "Available", "Progressing"):
        assert rig.condition(kind)["status"] == "True"
        assert rig.condition(kind)["message"] == f"3/2 ready, 1 without KV store ({where})"
    rig.written()
    await rig.ask_engines(times=2)
    assert rig.written() == [], "and nothing is written while nothing changes"
    rig.engines.states[address] = READY
    await rig.ask_engines(times=2)
    assert _notes(rig) == [None, None, None]
    assert rig.condition("Ready")["message"] == "3/2 ready"


@in_loop
async def test_restarted_operator_goes_on_from_the_annotation(
    ready_rig: ReadyRig, restarted: Callable[[OperatorRig], Awaitable[OperatorRig]]
) -> None:
    rig = await ready_rig(KVD)
    rig.engines.states[ADDRESS] = DEGRADED
    await rig.ask_engines(times=2)
    assert _notes(rig) == ["degraded"] * 3

    again = await restarted(rig)
    again.engines.is_unreachable = True
    await again.run(2)
    await again.ask_engines(times=2)
    assert again.written() == []
    assert "3 without KV store" in again.condition("Ready")["message"]


@in_loop
async def test_paused_pool_tells_of_its_stores_too(ready_rig: ReadyRig) -> None:
    rig = await ready_rig(KVD)
    rig.change_spec(paused=True)
    await rig.run(1)
    rig.engines.states[ADDRESS] = DEGRADED
    await rig.ask_engines(times=2)

    assert "3 without KV store" in rig.condition("Ready")["message"]


@pytest.mark.parametrize("why", ["crashed", "draining", "gone"])
@in_loop
async def test_who_cannot_tell_is_not_asked(ready_rig: ReadyRig, why: str) -> None:
    rig = await ready_rig(KVD)
    assert len(rig.leader.engines.uids) == 3
    pod = rig.nodes.pods()[0]
    if why == "crashed":
        (container,) = pod["status"]["containerStatuses"]
        waiting = {**container, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
        rig.nodes.change_pod(pod["metadata"]["name"], {"containerStatuses": [waiting]})
    elif why == "draining":
        rig.engines.done.clear()
        rig.change_spec(replicas=1)
    elif why == "gone":
        rig.api.remove(PODS, pod["metadata"]["name"], "ns")
    await rig.settle()

    uid = pod["metadata"]["uid"] if why != "draining" else _drained(rig)
    assert uid not in rig.leader.engines.uids


@pytest.mark.parametrize("why", ["no kvd", "not ready"])
@in_loop
async def test_store_that_cannot_be_lost_is_not_noted(ready_rig: ReadyRig, why: str) -> None:
    rig = await ready_rig({} if why == "no kvd" else KVD)
    if why == "not ready":
        for pod in rig.nodes.pods():
            rig.nodes.lose_readiness(pod["metadata"]["name"])
    rig.engines.states[ADDRESS] = DEGRADED
    await rig.ask_engines(times=2)

    assert _notes(rig) == [None, None, None]


@in_loop
async def test_backlog_of_a_silent_engine_is_unknown_in_the_end() -> None:
    watch, engines, changed = _watch()
    engines.reports[ADDRESS] = EngineReport(backlog_milliseconds=250.0)
    assert watch.backlog_milliseconds("u1") is None
    await watch.look("u1")
    engines.is_unreachable = True
    known = []
    for _ in range(MAX_SILENT_ROUNDS + 1):
        await watch.look("u1")
        known.append(watch.backlog_milliseconds("u1"))

    assert known == [250.0] * MAX_SILENT_ROUNDS + [None]
    assert changed == [], "nobody is woken for a backlog"


@in_loop
async def test_pool_is_told_of_each_step_of_a_load() -> None:
    watch, engines, changed = _watch(is_loading=True)
    engines.states[ADDRESS] = LoadState.STARTING
    for loaded in (0, 4, 5, 9, 10):
        engines.reports[ADDRESS] = EngineReport(progress=LoadProgress(loaded_bytes=loaded, total_bytes=100))
        await watch.look("u1")

    assert watch.progress("u1") == LoadProgress(loaded_bytes=10, total_bytes=100)
    assert len(changed) == 3, "at 0, 5 and 10 %"


@in_loop
async def test_engine_that_loads_is_asked_by_the_running_task() -> None:
    watch, engines, changed = _watch(is_loading=True)
    engines.reports[ADDRESS] = EngineReport(progress=LoadProgress(loaded_bytes=1, total_bytes=2))
    asking = asyncio.create_task(watch.keep())
    async with asyncio.timeout(30):
        while not changed:
            await asyncio.sleep(0.01)
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking

    assert watch.progress("u1") == LoadProgress(loaded_bytes=1, total_bytes=2)


EYES = PoolKey(kind=Kind.VE_POOL, namespace="ns", name="eyes")


@in_loop
async def test_load_of_encoders_is_summed_up_once_per_round_and_told_when_it_is_another() -> None:
    now = 100.0
    engines, changed = FakeEngines(), list[PoolKey]()
    watch = EngineWatch(engines, on_change=changed.append, clock=lambda: now)
    watch.keep_only(EYES, {name: _engine(name, has_store=False) for name in ("a", "b")})
    loads = []
    # A second round with traffic, then two at rest: the rate is that since the round before.
    for encoded in ({"a": 0, "b": 0}, {"a": 3000, "b": 1500}, {"a": 3000, "b": 1500}, {"a": 3000, "b": 1500}):
        for name, count in encoded.items():
            patches = PatchCount(epoch=1, queued=300 if now == 130.0 and name == "a" else 0, encoded=count)
            engines.reports[name] = EngineReport(patches=patches)
            await watch.look(name)
        watch.sum_up()
        loads.append(watch.pool_load(EYES))
        now += 30.0

    rest = PoolLoad(pending_patches=0, patches_per_second=0, imbalance="1.0")
    assert loads == [None, PoolLoad(pending_patches=300, patches_per_second=150, imbalance="2.0"), rest, rest]
    assert changed == [EYES, EYES]
    assert {kind for _, kind in engines.asked} == {Kind.VE_POOL}


class EyesWatch:
    """Two encoders that encode nothing, watched every 30 s of a clock that stands still otherwise."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.engines, self.changed = FakeEngines(), list[PoolKey]()
        self.watch = EngineWatch(self.engines, on_change=self.changed.append, clock=lambda: self.now)

    async def round(self, *queued: int | None) -> ImbalanceNote | None:
        """None: that one does not tell, since it has just started anew."""
        names = [f"u{index}" for index in range(len(queued))]
        known = {name: _engine(name, has_store=False, batch_patches=1_000) for name in names}
        self.watch.keep_only(EYES, known)
        for name, count in zip(names, queued, strict=True):
            epoch = 1 if count is not None else int(self.now)
            self.engines.reports[name] = EngineReport(patches=PatchCount(epoch=epoch, queued=count or 0, encoded=0))
            await self.watch.look(name)
        self.watch.sum_up()
        self.now += 30.0
        load = self.watch.pool_load(EYES)
        return None if load is None else load.uneven

    async def rounds(self, number: int, *queued: int | None) -> list[str]:
        """The spans that are told."""
        notes = [await self.round(*queued) for _ in range(number)]
        return [note.span if note else "" for note in notes]


@in_loop
async def test_imbalance_is_told_once_it_has_lasted() -> None:
    eyes = EyesWatch()
    await eyes.round(0, 0)
    spans = await eyes.rounds(32, 4_000, 0)

    assert spans == [""] * 10 + ["5 min"] * 20 + ["15 min"] * 2
    # With the first figures, at 5 minutes, at 15: nobody is woken in between.
    assert eyes.changed == [EYES] * 3


@pytest.mark.parametrize(
    "pause",
    [(2_000, 2_000), (0, 0), (2_700, 900), (1_000, 0), (4_000,), (4_000, None), ()],
    ids=["even", "rest", "at-the-limit", "running-batch", "one-left", "one-silent", "none-left"],
)
@in_loop
async def test_imbalance_that_pauses_begins_anew(pause: tuple[int | None, ...]) -> None:
    eyes = EyesWatch()
    await eyes.round(0, 0)
    before = await eyes.rounds(11, 4_000, 0)
    during = await eyes.rounds(1, *pause)
    # An encoder that is new to the watch, or started anew, tells from its second answer on.
    await eyes.rounds(2, *pause)
    await eyes.round(0, 0)
    after = await eyes.rounds(11, 4_000, 0)

    assert (before[-1], during, after) == ("5 min", [""], [""] * 10 + ["5 min"])


@in_loop
async def test_nothing_is_uneven_where_nobody_tells_any_more() -> None:
    """The figures stay as they were last known; the word does not stay with them."""
    eyes = EyesWatch()
    await eyes.round(0, 0)
    await eyes.rounds(11, 4_000, 0)
    told = eyes.watch.pool_load(EYES)
    eyes.engines.is_unreachable = True
    silent = await eyes.rounds(MAX_SILENT_ROUNDS + 1, 4_000, 0)
    load = eyes.watch.pool_load(EYES)

    assert told is not None
    assert silent == ["5 min"] * MAX_SILENT_ROUNDS + [""]
    assert load == replace(told, uneven=None)


@in_loop
async def test_load_of_encoders_is_kept_by_the_running_task() -> None:
    engines, changed, counts = FakeEngines(), list[PoolKey](), itertools.count()

    async def report(address: str, *, kind: Kind) -> EngineReport:
        return EngineReport(patches=PatchCount(epoch=1, queued=4, encoded=1000 * next(counts)))

    engines.report = report  # type: ignore[method-assign]
    watch = EngineWatch(engines, on_change=changed.append, seconds=0.01)
    watch.keep_only(EYES, {"u1": _engine(has_store=False)})
    asking = asyncio.create_task(watch.keep())
    async with asyncio.timeout(30):
        while EYES not in changed:
            await asyncio.sleep(0.01)
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking

    load = watch.pool_load(EYES)
    assert load is not None
    assert (load.pending_patches, load.imbalance) == (4, "1.0")
    assert load.patches_per_second > 0
    watch.keep_only(EYES, {})
    assert watch.pool_load(EYES) is None


def _drained(rig: OperatorRig) -> str:
    notes = {pod["metadata"]["uid"]: pod["metadata"]["annotations"] for pod in rig.nodes.pods()}
    return next(uid for uid, note in notes.items() if "prefill.dev/draining-since" in note)
