"""What a VE does when its parts fail or it is told to end: exit codes, termination message, nobody waits, nothing is left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from prefill_engine.rpc import vision_pb2
from prefill_engine.rpc.convert import to_duration
from prefill_engine.vision.slab import SHM_DIR
from prefill_testing.rpc_calls import refused
from prefill_testing.serve_process import is_alive
from prefill_testing.ve_calls import WAIT_SECONDS, Stub, run_calls, until_queued
from prefill_testing.ve_process import VeProcess, closed_gate, encode_request, png, start_gated_ve, start_ve


async def until_draining(stub: Stub) -> None:
    async for report in stub.WatchLoad(vision_pb2.VisionWatchRequest(period=to_duration(0.02))):
        if report.state == vision_pb2.VisionLoad.DRAINING:
            return


async def until_dead(*pids: int) -> None:
    while any(is_alive(pid) for pid in pids):
        await asyncio.sleep(0.02)


def slabs(encoder: VeProcess) -> list[str]:
    return [path.name for path in SHM_DIR.glob(f"prefill-ve.*.{encoder.process.pid}.*")]


def test_killed_decode_worker_costs_one_image(tmp_path: Path) -> None:
    with start_ve(tmp_path, "image_seconds=60") as encoder:
        (worker,) = encoder.worker_pids()

        async def scenario(stub: Stub) -> None:
            os.kill(worker, signal.SIGSTOP)
            calls = [asyncio.ensure_future(stub.Encode(encode_request(png(168, 126, seed=index)))) for index in (1, 2)]
            await until_queued(stub, 2)
            os.kill(worker, signal.SIGKILL)
            done = await asyncio.gather(*calls, return_exceptions=True)
            lost = [result for result in done if not isinstance(result, vision_pb2.EncodeResult)]
            assert len(lost) == 1

            async def again() -> None:
                raise lost[0]  # type: ignore[misc]

            failure = await refused(again())
            assert (failure.reason, failure.retry_scope) == ("ENGINE_LOST", "ONCE_THEN_FAIL")

        run_calls(encoder, scenario)
        assert len(encoder.worker_pids(2)) == 2
        encoder.send(signal.SIGTERM)
        assert encoder.wait() == 0


def test_hung_encoder_times_images_out_and_its_death_ends_the_ve(tmp_path: Path) -> None:
    with start_ve(tmp_path, "image_seconds=3", fault="hang") as encoder:
        facts = encoder.ready()

        async def scenario(stub: Stub) -> None:
            slow = await refused(stub.Encode(encode_request(png(168, 126, seed=1))))
            assert (slow.reason, slow.phase) == ("ENCODER_TIMEOUT", "IMAGES")
            hurried = encode_request(png(168, 126, seed=2), time_left=to_duration(0.2))
            assert (await refused(stub.Encode(hurried))).reason == "ENCODER_TIMEOUT"
            waiting = asyncio.ensure_future(stub.Encode(encode_request(png(168, 126, seed=3))))
            await until_queued(stub, 2)
            os.kill(int(str(facts["encoder_pid"])), signal.SIGKILL)
            assert (await refused(waiting)).reason == "RANK_LOST"

        run_calls(encoder, scenario)
        assert encoder.wait() == 16
        message = encoder.termination()
        assert (message["code"], message["exit"], message["phase"]) == ("RankLost", 16, "serve")
        assert message["planHash"] == "plan-7"
        assert not (tmp_path / "ready.json").exists()
        assert slabs(encoder) == []
        asyncio.run(asyncio.wait_for(until_dead(*encoder.worker_pids()), WAIT_SECONDS))


def test_last_words_of_the_encoder_become_the_exit_code(tmp_path: Path) -> None:
    with start_ve(tmp_path, fault="exit=14@batch") as encoder:

        async def scenario(stub: Stub) -> None:
            assert (await refused(stub.Encode(encode_request(png(168, 126))))).reason == "RANK_LOST"

        run_calls(encoder, scenario)
        assert encoder.wait() == 14
        assert encoder.termination()["code"] == "GpuFault"
        assert encoder.termination()["detail"] == "fake fault"


def test_sigterm_loses_no_image(tmp_path: Path) -> None:
    with start_gated_ve(tmp_path, "batching.max_images_per_batch=1", "server.drain_seconds=45") as encoder:
        encoder_pid = int(str(encoder.ready()["encoder_pid"]))

        async def scenario(stub: Stub) -> None:
            with closed_gate(encoder):
                calls = [
                    asyncio.ensure_future(stub.Encode(encode_request(png(168, 126, seed=index)))) for index in range(4)
                ]
                await until_queued(stub, 4)
                encoder.send(signal.SIGTERM)
                await until_draining(stub)
            images = [result.image for result in await asyncio.gather(*calls)]
            assert (await refused(stub.Encode(encode_request(png(168, 126, seed=9))))).reason == "DRAINING"
            for image in images[:3]:
                assert (await stub.Ack(vision_pb2.AckRequest(ticket_id=image.ticket_id, ok=True))).released
            frames = [frame async for frame in stub.Claim(vision_pb2.ClaimRequest(ticket_id=images[3].ticket_id))]
            assert frames[-1].last
            assert (await stub.Ack(vision_pb2.AckRequest(ticket_id=images[3].ticket_id, ok=True))).released

        run_calls(encoder, scenario)
        assert encoder.wait() == 0
        assert encoder.termination()["code"] == "Drained"
        assert not is_alive(encoder_pid)
        assert slabs(encoder) == []
        assert not [line for line in map(json.loads, encoder.stderr().splitlines()) if line["level"] == "ERROR"]


def test_drain_verb_waits_for_held_rows_up_to_its_deadline(tmp_path: Path) -> None:
    with start_ve(tmp_path) as encoder:

        async def scenario(stub: Stub) -> None:
            await stub.Encode(encode_request(png(168, 126)))

        run_calls(encoder, scenario)
        verb = [sys.executable, "-m", "prefill_engine", "ve", "drain", "--endpoint", encoder.endpoint, "--json"]
        done = subprocess.run([*verb, "--deadline-seconds", "0.5"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        statuses = [json.loads(line) for line in done.stdout.splitlines()]
        assert (statuses[0]["tickets_open"], statuses[0]["done"]) == (1, False)
        assert statuses[-1] == {"patches_left": 0, "tickets_open": 0, "done": True}
        assert encoder.process.poll() is None  # only SIGTERM ends the process


def test_killed_ve_leaves_no_process_and_the_next_one_removes_its_memory(tmp_path: Path) -> None:
    with start_ve(tmp_path / "first") as first:
        pids = (int(str(first.ready()["encoder_pid"])), *first.worker_pids())
        first.send(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        asyncio.run(asyncio.wait_for(until_dead(*pids), WAIT_SECONDS))
        assert len(slabs(first)) == 2
        with start_ve(tmp_path / "second") as second:
            second.ready()
            assert slabs(first) == []
            assert len(slabs(second)) == 2
