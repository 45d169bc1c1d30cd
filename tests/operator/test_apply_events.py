"""prefill_operator.apply and Events: how many, about what, and that none of them stops the work."""

from collections.abc import Awaitable, Callable
from typing import Any

from prefill_operator.model import (
    ChildKind,
    EmitEvent,
    EventType,
)
from prefill_operator.names import EventReason
from prefill_operator.resources import CHILDREN, EVENTS
from prefill_operator.settings import OperatorSettings
from prefill_testing.in_loop import in_loop

SERVICE = CHILDREN[ChildKind.SERVICE]
EVENT = EmitEvent(type=EventType.WARNING, reason=EventReason.NODE_LOST, message="n1 is gone", node="n1")
Desks = Callable[..., Awaitable[Any]]


@in_loop
async def test_events_of_one_reason_come_once_a_minute(open_desk: Desks) -> None:
    desk = await open_desk()
    other = EmitEvent(type=EventType.WARNING, reason=EventReason.NODE_LOST, message="n2 is gone")
    for _ in range(3):
        await desk.do(EVENT, other)
    messages = [
        event["message"] for event in desk.rig.api.all(EVENTS) if event["involvedObject"]["kind"] == "PrefillPool"
    ]
    assert messages == ["n1 is gone"]

    for _ in range(8):
        await desk.rig.advance(8.0)
    await desk.do(EVENT)

    events = [event for event in desk.rig.api.all(EVENTS) if event["involvedObject"]["kind"] == "PrefillPool"]
    assert {event["message"] for event in events} == {"n1 is gone", "n1 is gone (and 3 more like it)"}


@in_loop
async def test_event_is_told_on_pool_and_node(open_desk: Desks) -> None:
    desk = await open_desk()
    await desk.do(EVENT)

    pool, node = sorted(desk.rig.api.all(EVENTS), key=lambda event: str(event["involvedObject"]["kind"]), reverse=True)
    assert (pool["involvedObject"]["uid"], pool["metadata"]["namespace"]) == (desk.target().pool.uid, "ns")
    assert (node["involvedObject"]["name"], node["metadata"]["namespace"]) == ("n1", "default")
    assert node["message"] == "PrefillPool/ns/flash: n1 is gone"
    assert (pool["type"], pool["reason"], pool["count"]) == ("Warning", "NodeLost", 1)


@in_loop
async def test_namespaced_operator_writes_no_events_on_nodes(open_desk: Desks) -> None:
    desk = await open_desk(settings=OperatorSettings(namespaces=("ns",)))
    await desk.do(EVENT)

    assert [event["involvedObject"]["kind"] for event in desk.rig.api.all(EVENTS)] == ["PrefillPool"]


@in_loop
async def test_event_that_cannot_be_written_stops_nothing(open_desk: Desks) -> None:
    desk = await open_desk()
    desk.fail("events", status=403, reason="Forbidden", times=9)

    applied = await desk.do(EVENT, desk.create())

    assert (applied.num_writes, applied.error) == (1, None)
