"""The part of an engine that the operator talks to, for pods that do not exist: ready, idle, drained at once."""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio

from prefill_engine.rpc import prefill_pb2, prefill_pb2_grpc


class FakeEngine(prefill_pb2_grpc.PrefillEngineServicer):
    """Answers for every address of the pod range alike, so it has no memory of who drained."""

    async def GetLoad(self, request: object, context: object) -> prefill_pb2.LoadReport:
        return prefill_pb2.LoadReport(epoch=1, seq=1, state=prefill_pb2.LoadReport.READY)

    async def WatchLoad(self, request: object, context: object) -> AsyncIterator[prefill_pb2.LoadReport]:
        for seq in range(1, 1 << 31):
            yield prefill_pb2.LoadReport(epoch=1, seq=seq, state=prefill_pb2.LoadReport.READY)
            await asyncio.sleep(1)

    async def Drain(self, request: object, context: object) -> AsyncIterator[prefill_pb2.DrainStatus]:
        yield prefill_pb2.DrainStatus(done=True)


async def serve_engine(port: int) -> None:
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillEngineServicer_to_server(FakeEngine(), server)
    server.add_insecure_port(f"0.0.0.0:{port}")
    await server.start()
    await server.wait_for_termination()
