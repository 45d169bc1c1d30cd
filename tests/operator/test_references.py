"""Pools that name another pool: said in Ready, never in the way, looked at again when the other changes."""

import copy
from typing import Any

import pytest

from prefill_operator.api import Pool, parse_pool
from prefill_operator.cache import Cache
from prefill_operator.names import API_VERSION, Kind
from prefill_operator.references import judge_reference, referred_pool
from prefill_operator.resources import EVENTS, POOLS, Json, PoolKey
from prefill_operator.settings import NodeSignals
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY, POOL, OperatorRig

EYES = PoolKey(kind=Kind.VE_POOL, namespace="ns", name="eyes")
VISION = {"mode": "Remote", "vePoolRef": {"name": "eyes"}}


def asking(version: int = 1, *, revision: str = "r1", vision: Json | None = None, **metadata: Any) -> Json:
    pool = copy.deepcopy(POOL)
    pool["metadata"] |= {"uid": "uid-asking", "resourceVersion": str(version), **metadata}
    pool["spec"] |= {"vision": VISION if vision is None else vision}
    pool["spec"]["model"]["revision"] = revision
    return {"apiVersion": API_VERSION, "kind": "PrefillPool", **pool}


def eyes(version: int = 1, *, ready: int = 1, revision: str = "r1", names: str = "", **metadata: Any) -> Json:
    spec: Json = {
        "replicas": 2,
        "model": {"name": "flash", "revision": revision, "source": {"pvc": {"claimName": "tower"}}},
        "quota": {"spares": 0},
        "rollout": {"minReadySeconds": 0},
        "encoder": {"image": "engine:1"},
        **({"prefillPoolRef": {"name": names}} if names else {}),
    }
    meta = {"name": "eyes", "namespace": "ns", "uid": "uid-eyes", "resourceVersion": str(version), **metadata}
    body = {"apiVersion": API_VERSION, "kind": "VEPool", "metadata": meta, "spec": spec}
    return {**body, "status": {"readyVEs": ready}}


def words(pool: Json, other: Json | None) -> str | None:
    subject = parse_pool(pool)
    key = referred_pool(subject)
    assert key is not None
    found: Pool | None = None if other is None else parse_pool(other)
    note = judge_reference(subject, key, found)
    return None if note is None else note.text


def test_pools_are_named_in_their_own_namespace() -> None:
    assert referred_pool(parse_pool(asking())) == EYES
    assert referred_pool(parse_pool(asking(vision={}))) is None
    assert referred_pool(parse_pool(eyes())) is None
    assert referred_pool(parse_pool(eyes(names="flash"))) == KEY


@pytest.mark.parametrize(
    ("pool", "other", "expected"),
    [
        (asking(), eyes(), None),
        (asking(), None, "spec.vision.vePoolRef: VEPool eyes does not exist in namespace ns; images wait and fail"),
        (asking(), eyes(ready=0), "spec.vision.vePoolRef: VEPool eyes has no ready VE (of 2); images wait"),
        (asking(), eyes(deletionTimestamp="2026-01-01T00:00:00Z"), "VEPool eyes is being deleted"),
        (asking(), eyes(revision="r2"), "VEPool eyes has model flash r2, this pool has flash r1"),
        (eyes(names="flash"), asking(), None),
        (eyes(names="flash"), asking(revision="r3"), "PrefillPool flash has model flash r3, this pool has flash r1"),
        (eyes(names="flash"), None, "spec.prefillPoolRef: PrefillPool flash does not exist in namespace ns"),
    ],
    ids=["good", "absent", "none-ready", "deleted", "revision", "served", "served-revision", "served-absent"],
)
def test_what_is_said_about_the_other_pool(pool: Json, other: Json | None, expected: str | None) -> None:
    said = words(pool, other)

    assert (said is None) if expected is None else (said is not None and expected in said)


def test_a_change_of_the_named_pool_concerns_those_that_name_it() -> None:
    cache = Cache(NodeSignals(), has_nodes=True)
    prefill, encoders = POOLS[Kind.PREFILL_POOL], POOLS[Kind.VE_POOL]

    assert cache.put(prefill, asking(1)) == {KEY}
    assert cache.put(encoders, eyes(2)) == {EYES, KEY}
    assert cache.put(prefill, asking(3, vision={})) == {KEY}
    assert cache.put(encoders, eyes(4, ready=0)) == {EYES}
    assert cache.put(prefill, asking(5)) == {KEY}
    assert cache.remove(encoders, ("ns", "eyes"), uid="") == {EYES, KEY}
    assert cache.remove(prefill, ("ns", "flash"), uid="") == {KEY}
    assert cache.put(encoders, eyes(6)) == {EYES}


def warnings(rig: OperatorRig) -> list[str]:
    return [event["message"] for event in rig.api.all(EVENTS) if event["reason"] == "ReferenceMissing"]


@in_loop
async def test_a_missing_pool_is_said_and_blocks_nothing() -> None:
    rig = await OperatorRig.start()
    rig.create_pool({"vision": VISION})
    await rig.run(8)
    ready = rig.condition("Ready")
    await rig.advance(120)
    rig.written()
    await rig.settle()

    assert (ready["status"], ready["reason"]) == ("True", "AllReady")
    assert "VEPool eyes does not exist in namespace ns" in ready["message"]
    assert len(warnings(rig)) == 1
    assert rig.written() == []


@in_loop
async def test_it_follows_the_other_pool() -> None:
    """Absent, there without a ready VE, ready, gone again: each is said without a change of our own pool."""
    rig = await OperatorRig.start()
    rig.create_pool({"vision": VISION})
    await rig.run(8)
    body = eyes()
    del body["status"], body["metadata"]["uid"], body["metadata"]["resourceVersion"]
    rig.api.put(POOLS[Kind.VE_POOL], body)
    await rig.settle()
    await rig.advance(3)
    await rig.settle()
    unready = rig.condition("Ready")["message"]
    await rig.run(8)
    settled = rig.condition("Ready")["message"]
    rig.api.remove(POOLS[Kind.VE_POOL], "eyes", "ns")
    await rig.run(4)
    gone = rig.condition("Ready")["message"]

    assert "VEPool eyes has no ready VE (of 2)" in unready
    assert "eyes" not in settled
    assert "VEPool eyes does not exist" in gone
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_pools_that_name_each_other_come_to_rest() -> None:
    rig = await OperatorRig.start()
    rig.create_pool({"vision": VISION})
    body = eyes(names="flash", revision="r9")
    del body["status"], body["metadata"]["uid"], body["metadata"]["resourceVersion"]
    rig.api.put(POOLS[Kind.VE_POOL], body)
    await rig.run(12)
    rig.written()
    await rig.advance(120)
    await rig.settle()
    other = rig.api.get(POOLS[Kind.VE_POOL], "eyes", "ns")
    (message,) = [item["message"] for item in other["status"]["conditions"] if item["type"] == "Ready"]

    assert rig.written() == []
    assert "PrefillPool flash has model flash r1, this pool has flash r9" in message
    assert "VEPool eyes has model flash r9, this pool has flash r1" in rig.condition("Ready")["message"]
