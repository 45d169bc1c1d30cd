"""What the operator hears of a real front and of a real VE when it asks them for a report: the figures that they compute."""

import asyncio
from pathlib import Path

import pytest

from prefill_engine.messages import Progress
from prefill_operator.engine_client import GrpcEngineClient
from prefill_operator.engine_load import EngineReport
from prefill_operator.engine_wire import LoadState
from prefill_operator.model import LoadProgress
from prefill_operator.names import Kind
from prefill_testing.engine_rig import Rig, play
from prefill_testing.fake_rank import load_message
from prefill_testing.ve_calls import Stub, ack, run_calls
from prefill_testing.ve_process import encode_request, png, start_ve


def test_operator_hears_how_far_a_load_is() -> None:
    async def scenario(rig: Rig) -> None:
        client, address = GrpcEngineClient(), f"127.0.0.1:{rig.port}"
        assert (await client.report(address, kind=Kind.PREFILL_POOL)).progress is None
        await rig.ranks[0].send(Progress(rank=0, stage="load", done=301, total=510, unit="bytes", item="a", at_ns=0))
        while (report := await client.report(address, kind=Kind.PREFILL_POOL)).progress is None:
            await asyncio.sleep(0.02)
        progress = LoadProgress(loaded_bytes=301, total_bytes=510)
        assert report == EngineReport(state=LoadState.STARTING, backlog_milliseconds=0.0, progress=progress)

    play(scenario, ready=False)


def test_operator_hears_the_backlog() -> None:
    async def scenario(rig: Rig) -> None:
        client, address = GrpcEngineClient(), f"127.0.0.1:{rig.port}"
        await rig.ranks[0].send(load_message(0, waiting_rows=1000))
        while not (report := await client.report(address, kind=Kind.PREFILL_POOL)).backlog_milliseconds:
            await asyncio.sleep(0.02)
        # At least 0.5 ms a row.
        assert report.backlog_milliseconds == pytest.approx(1e3 * rig.front.board.wait_seconds(0))
        assert report.backlog_milliseconds > 500.0
        assert report.progress is None

    play(scenario)


def test_operator_hears_what_a_ve_has_encoded(tmp_path: Path) -> None:
    with start_ve(tmp_path) as encoder:
        patches = []

        async def scenario(stub: Stub) -> None:
            client = GrpcEngineClient()
            patches.append((await client.report(encoder.endpoint, kind=Kind.VE_POOL)).patches)
            image = (await stub.Encode(encode_request(png(168, 126)))).image
            await ack(stub, image.ticket_id)
            patches.append((await client.report(encoder.endpoint, kind=Kind.VE_POOL)).patches)

        run_calls(encoder, scenario)
    before, after = patches
    assert before is not None
    assert after is not None
    assert (before.encoded, after.encoded, after.queued) == (0, 108, 0)
    assert before.epoch == after.epoch > 0
