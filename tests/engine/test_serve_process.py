"""`serve` as a process: ports, drain on SIGTERM, exit codes and termination message, death of rank and front, drain verb."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefill_engine.rpc import prefill_pb2, prefill_pb2_grpc
from prefill_testing.engine_rig import prefill_request
from prefill_testing.rpc_calls import next_of, read_stream
from prefill_testing.serve_process import is_alive, start_serve


def test_ready_engine_answers_on_all_ports_and_drains_on_sigterm(tmp_path: Path):
    with start_serve(tmp_path) as engine:
        facts = engine.ready()

        async def probe() -> int:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{facts['probe_port']}") as channel:
                request = health_pb2.HealthCheckRequest(service="pe.v1.PrefillEngine")
                while True:
                    status: int = (await health_pb2_grpc.HealthStub(channel).Check(request)).status
                    if status == health_pb2.HealthCheckResponse.SERVING:
                        return status
                    await asyncio.sleep(0.02)

        asyncio.run(asyncio.wait_for(probe(), 10))
        with urllib.request.urlopen(f"http://127.0.0.1:{facts['metrics_port']}/metrics") as reply:
            text = reply.read().decode()
        assert "pe_predicted_wait_seconds 0.0" in text
        (epoch,) = [line for line in text.splitlines() if line.startswith("pe_epoch ")]
        assert float(epoch.split()[1]) == facts["epoch"]
        assert 'pe_engine_info{build="prefill ' in text
        engine.send(signal.SIGTERM)
        assert engine.wait() == 0
        assert engine.termination()["code"] == "Drained"
        assert not any(is_alive(pid) for pid in facts["rank_pids"])  # type: ignore[attr-defined]
        assert not (tmp_path / "ready.json").exists()
        lines = [json.loads(line) for line in engine.stderr().splitlines() if line.startswith("{")]
        assert {"listening", "ready", "drain begins", "engine ended"} <= {line["message"] for line in lines}
        # The hash of the operator's plan, by which its log and the engine's are put together (k8s.md 4.3).
        assert [line["plan_hash"] for line in lines if line["message"] == "listening"] == ["plan-7"]
        assert not [line for line in lines if line["level"] == "ERROR"]


def test_sigterm_lets_a_running_attempt_end_and_the_log_holds_its_stages(tmp_path: Path):
    with start_serve(tmp_path) as engine:
        facts = engine.ready()

        async def run() -> prefill_pb2.PrefillEvent:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{facts['port']}") as channel:
                request = prefill_request(300, request_id="drained-request")
                request.handoff.ticket_ttl.FromMilliseconds(800)
                call = prefill_pb2_grpc.PrefillEngineStub(channel).Prefill(request)
                await next_of(call, "ticket")
                engine.send(signal.SIGTERM)
                events, failure = await read_stream(call)
                assert failure is None
                return events[-1]

        last = asyncio.run(run())
        assert last.completed.handoff.state == prefill_pb2.HandoffState.EXPIRED
        assert engine.wait() == 0
        lines = [json.loads(line) for line in engine.stderr().splitlines() if line.startswith("{")]
        (ended,) = [line for line in lines if line["message"] == "attempt ended"]
        assert (ended["request_id"], ended["outcome"], ended["prompt_tokens"]) == ("drained-request", "completed", 300)
        assert set(ended["stage_ms"]) == {"admission", "queue", "compute", "store", "handoff"}


@pytest.mark.parametrize(
    ("fault", "code", "name", "phase"),
    [("exit=12@load", 12, "CudaOom", "load"), ("exit=14", 14, "GpuFault", "serve"), ("kill", 16, "RankLost", None)],
    ids=["oom-at-load", "gpu-fault", "killed"],
)
def test_dead_rank_ends_the_engine_with_its_code(tmp_path: Path, fault: str, code: int, name: str, phase: str | None):
    with start_serve(tmp_path, fault=fault) as engine:
        assert engine.wait() == code
        message = engine.termination()
        assert (message["exit"], message["code"], message["rank"], message["planHash"]) == (code, name, 0, "plan-7")
        assert phase is None or message["phase"] == phase


def test_killed_rank_answers_its_attempts_rank_lost(tmp_path: Path):
    with start_serve(tmp_path, fault="hold=computed") as engine:
        facts = engine.ready()

        async def run() -> tuple[str, str]:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{facts['port']}") as channel:
                call = prefill_pb2_grpc.PrefillEngineStub(channel).Prefill(prefill_request(300))
                await next_of(call, "first_token")
                os.kill(facts["rank_pids"][0], signal.SIGKILL)  # type: ignore[index]
                _, failure = await read_stream(call)
                assert failure is not None
                return failure.reason, failure.retry_scope

        assert asyncio.run(run()) == ("RANK_LOST", "OTHER_PE")
        assert engine.wait() == 16


def test_killed_front_takes_its_ranks_along(tmp_path: Path):
    with start_serve(tmp_path) as engine:
        (pid,) = engine.ready()["rank_pids"]  # type: ignore[misc]
        engine.send(signal.SIGKILL)
        engine.wait()
        deadline = time.monotonic() + 10
        while is_alive(pid):
            assert time.monotonic() < deadline, "the rank outlived its front"
            time.sleep(0.02)


def test_port_in_use_exits_10_with_one_line(tmp_path: Path):
    with start_serve(tmp_path) as engine:
        port = engine.ready()["port"]
        second = tmp_path / "second"
        second.mkdir()
        with start_serve(second, "--set", f"server.port={port}") as other:
            assert other.wait() == 10
            assert other.stderr().splitlines()[-1] == (
                f"prefill-engine serve: server.port {port} on 127.0.0.1 cannot be bound; is it in use?"
            )
            assert other.termination()["code"] == "Config"


def test_drain_verb_waits_for_the_engine_and_leaves_it_running(tmp_path: Path):
    with start_serve(tmp_path) as engine:
        port = engine.ready()["port"]
        command = [sys.executable, "-m", "prefill_engine", "drain", "--endpoint", f"127.0.0.1:{port}", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["done"] is True
        assert engine.process.poll() is None
