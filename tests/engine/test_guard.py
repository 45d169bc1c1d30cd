"""Unexpected exceptions of handlers reach the caller as INTERNAL/INVARIANT; socket directories of dead engines go."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from prefill_engine.front.guard import Guard
from prefill_engine.front.socket_dir import make_socket_dir
from prefill_engine.rpc import prefill_pb2, prefill_pb2_grpc
from prefill_engine.rpc.status import DETAILS_KEY, decode_failure


class BrokenService(prefill_pb2_grpc.PrefillEngineServicer):
    async def GetServerInfo(self, request: object, context: object) -> prefill_pb2.ServerInfo:
        raise KeyError("a bug")

    async def Prefill(self, request: object, context: object) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        yield prefill_pb2.PrefillEvent(seq=1)
        raise ZeroDivisionError

    async def GetLoad(self, request: object, context: grpc.aio.ServicerContext) -> prefill_pb2.LoadReport:
        await context.abort(grpc.StatusCode.NOT_FOUND, "on purpose")


async def call_broken(method: str) -> tuple[grpc.StatusCode, str | None, int]:
    """(code, reason of the detail, messages received) of a call that fails."""
    server = grpc.aio.server(interceptors=[Guard()])
    prefill_pb2_grpc.add_PrefillEngineServicer_to_server(BrokenService(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    received = 0
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = prefill_pb2_grpc.PrefillEngineStub(channel)
            try:
                if method == "Prefill":
                    async for _ in stub.Prefill(prefill_pb2.PrefillRequest()):
                        received += 1
                elif method == "GetServerInfo":
                    await stub.GetServerInfo(prefill_pb2.GetServerInfoRequest())
                else:
                    await stub.GetLoad(prefill_pb2.GetLoadRequest())
            except grpc.aio.AioRpcError as error:
                details = dict(error.trailing_metadata() or ()).get(DETAILS_KEY)
                failure = decode_failure(details) if details is not None else None
                return error.code(), failure.reason if failure else None, received
    finally:
        await server.stop(0)
    raise AssertionError("the call did not fail")


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("GetServerInfo", (grpc.StatusCode.INTERNAL, "INVARIANT", 0)),
        ("Prefill", (grpc.StatusCode.INTERNAL, "INVARIANT", 1)),
        ("GetLoad", (grpc.StatusCode.NOT_FOUND, None, 0)),
    ],
)
def test_guard_answers_for_a_broken_handler(
    method: str, expected: tuple[grpc.StatusCode, str | None, int], caplog: pytest.LogCaptureFixture
) -> None:
    assert asyncio.run(call_broken(method)) == expected
    assert ("handler failed" in caplog.messages) == (expected[1] is not None)


def test_socket_dirs_of_dead_processes_are_swept(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale = tmp_path / f"prefill-lanes-{ended.pid}-x"
    living = tmp_path / f"prefill-lanes-{os.getpid()}-y"
    foreign = tmp_path / "prefill-lanes-notes"
    for path in (stale, living, foreign):
        path.mkdir()
    made = make_socket_dir(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living, foreign, made])
    assert made.stat().st_mode & 0o777 == 0o700
