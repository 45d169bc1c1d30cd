"""Start-up, health, load, estimate, drain and reflection over gRPC against a fake rank."""

import asyncio
import time

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from prefill_engine.front.ports import ENGINE_SERVICE
from prefill_engine.messages import Progress
from prefill_engine.rpc import prefill_pb2
from prefill_testing.engine_rig import Rig, play, prefill_request
from prefill_testing.fake_rank import load_message
from prefill_testing.rpc_calls import claim, next_of, read_stream, refused, settle


def test_while_starting_calls_are_refused_and_liveness_holds():
    async def scenario(rig: Rig) -> None:
        _, failure = await read_stream(rig.stub.Prefill(prefill_request()))
        info = await refused(rig.stub.GetServerInfo(prefill_pb2.GetServerInfoRequest()))
        load = await rig.stub.GetLoad(prefill_pb2.GetLoadRequest())
        assert failure is not None
        assert (failure.reason, info.reason) == ("STARTING", "STARTING")
        assert load.state == prefill_pb2.LoadReport.STARTING
        assert await health(rig, "") == "SERVING"
        assert await health(rig, ENGINE_SERVICE) == "NOT_SERVING"

    play(scenario, ready=False)


def test_engine_that_loads_tells_how_far_it_is():
    async def scenario(rig: Rig) -> None:
        await rig.ranks[0].send(Progress(rank=0, stage="load", done=301, total=510, unit="bytes", item="a", at_ns=0))
        while not (load := await rig.stub.GetLoad(prefill_pb2.GetLoadRequest())).weight_bytes_total:
            await asyncio.sleep(0.01)
        assert load.state == prefill_pb2.LoadReport.STARTING
        assert (load.weight_bytes_loaded, load.weight_bytes_total) == (301, 510)
        assert load.HasField("backlog")

    play(scenario, ready=False)


async def health(rig: Rig, service: str) -> str:
    stub = health_pb2_grpc.HealthStub(rig.channel)
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


async def health_becomes(rig: Rig, service: str, status: str) -> None:
    while await health(rig, service) != status:
        await asyncio.sleep(0.02)


def test_ready_engine_serves_and_a_draining_one_does_not():
    async def scenario(rig: Rig) -> None:
        await health_becomes(rig, ENGINE_SERVICE, "SERVING")
        statuses = [status async for status in rig.stub.Drain(prefill_pb2.DrainRequest())]
        await health_becomes(rig, ENGINE_SERVICE, "NOT_SERVING")
        assert statuses[-1].done
        assert await health(rig, "") == "SERVING"

    play(scenario)


def test_lost_store_degrades_but_serves():
    async def scenario(rig: Rig) -> None:
        await rig.ranks[0].send(load_message(0, store_ok=False))
        while (await rig.stub.GetLoad(prefill_pb2.GetLoadRequest())).state != prefill_pb2.LoadReport.DEGRADED:
            await asyncio.sleep(0.01)
        await health_becomes(rig, ENGINE_SERVICE, "SERVING")

    play(scenario)


def test_silence_during_work_is_wedged_and_fails_both_health_services():
    async def scenario(rig: Rig) -> None:
        rig.ranks[0].hold.add("computed")
        call = rig.stub.Prefill(prefill_request())
        await next_of(call, "chunk")
        await health_becomes(rig, ENGINE_SERVICE, "SERVING")
        rig.front.clock = lambda: time.monotonic() + 6.0
        await health_becomes(rig, "", "NOT_SERVING")
        assert await health(rig, ENGINE_SERVICE) == "NOT_SERVING"
        assert (await rig.stub.GetLoad(prefill_pb2.GetLoadRequest())).state == prefill_pb2.LoadReport.WEDGED
        call.cancel()

    play(scenario)


def test_idle_engine_that_is_silent_stays_well():
    async def scenario(rig: Rig) -> None:
        rig.front.clock = lambda: time.monotonic() + 600.0
        await health_becomes(rig, ENGINE_SERVICE, "SERVING")

    play(scenario)


def test_watch_load_reports_admitted_attempts_once():
    async def scenario(rig: Rig) -> None:
        watch = rig.stub.WatchLoad(prefill_pb2.WatchLoadRequest())
        reports = [await watch.read()]
        request = prefill_request()
        call = rig.stub.Prefill(request)
        await next_of(call, "accepted")
        while not any(report.known_attempts for report in reports):
            reports.append(await watch.read())
        reports.append(await watch.read())
        assert [report.seq for report in reports] == list(range(1, len(reports) + 1))
        assert [i for report in reports for i in report.known_attempts] == [request.key.attempt_id]
        assert reports[-1].acked_attempts == 1
        watch.cancel()
        call.cancel()

    play(scenario)


def test_load_shows_rank_figures_and_open_tickets():
    async def scenario(rig: Rig) -> None:
        await rig.ranks[0].send(load_message(0, waiting_rows=50))
        call = rig.stub.Prefill(prefill_request())
        await next_of(call, "ticket")
        report = await rig.stub.GetLoad(prefill_pb2.GetLoadRequest())
        assert (report.ranks[0].waiting_rows, report.ranks[0].tickets_open) == (50, 1)
        assert (report.step.a_ms, report.epoch) == (10.0, 1_000_123)
        call.cancel()

    play(scenario)


def test_estimate_predicts_and_judges_without_side_effects():
    async def scenario(rig: Rig) -> None:
        await rig.ranks[0].send(load_message(0, waiting_rows=1000))
        while not (await rig.stub.GetLoad(prefill_pb2.GetLoadRequest())).ranks:
            await asyncio.sleep(0.01)
        fits = await rig.stub.Estimate(prefill_pb2.EstimateRequest(compute_rows=100, context=300))
        too_long = await rig.stub.Estimate(prefill_pb2.EstimateRequest(compute_rows=100, context=1 << 20))
        assert fits.admissible
        assert not too_long.admissible
        assert 0 < fits.wait.ToMilliseconds() < fits.finish.ToMilliseconds()
        assert not rig.ranks[0].received

    play(scenario)


def test_drain_refuses_new_work_waits_for_the_ticket_and_never_ends_the_engine():
    async def scenario(rig: Rig) -> None:
        call = rig.stub.Prefill(prefill_request(request_id="a"))
        ticket = (await next_of(call, "ticket")).ticket
        drain = rig.stub.Drain(prefill_pb2.DrainRequest())
        status = await drain.read()
        _, failure = await read_stream(rig.stub.Prefill(prefill_request(request_id="b")))
        assert failure is not None
        assert (failure.reason, failure.retry_scope) == ("DRAINING", "OTHER_PE")
        assert (status.running, status.tickets_open, status.done) == (1, 1, False)
        claimed = await claim(rig, ticket)
        assert await settle(rig, ticket, claimed.claim_id)
        while not status.done:
            status = await drain.read()
        assert (await rig.stub.GetServerInfo(prefill_pb2.GetServerInfoRequest())).engine_id == "pe-test"

    play(scenario)


def test_drain_sends_queued_attempts_back():
    async def scenario(rig: Rig) -> None:
        rig.ranks[0].hold.add("start")
        call = rig.stub.Prefill(prefill_request())
        await next_of(call, "accepted")
        status = await rig.stub.Drain(prefill_pb2.DrainRequest()).read()
        _, failure = await read_stream(call)
        assert failure is not None
        assert failure.reason == "DRAINING"
        assert status.sent_back == 1

    play(scenario)


def test_reflection_lists_the_services():
    async def scenario(rig: Rig) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        async for reply in call:
            names = {service.name for service in reply.list_services_response.service}
            assert {"pe.v1.PrefillEngine", "pe.v1.HandoffSource", "grpc.health.v1.Health"} <= names
            return

    play(scenario)
