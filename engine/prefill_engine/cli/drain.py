"""`prefill-engine drain`: asks an engine to drain and waits until it has. What a pod's preStop hook calls (C43)."""

import argparse
import asyncio
import json
import sys

import grpc.aio

from prefill_engine.client import call_failed, open_channel
from prefill_engine.rpc import prefill_pb2, prefill_pb2_grpc
from prefill_engine.rpc.convert import to_duration
from prefill_plan.errors import CallFailed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoint", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--deadline-seconds", type=float, help="default: the engine's server.drain_seconds")
    parser.add_argument("--finish-queued", action="store_true", help="compute what waits instead of sending it back")
    parser.add_argument("--json", action="store_true", help="one JSON object per status")


def cmd_drain(args: argparse.Namespace) -> int:
    try:
        done = asyncio.run(_drain(args))
    except CallFailed as error:
        print(f"prefill-engine drain: {error}", file=sys.stderr)
        return 1
    return 0 if done else 1


async def _drain(args: argparse.Namespace) -> bool:
    request = prefill_pb2.DrainRequest(finish_queued=args.finish_queued)
    if args.deadline_seconds is not None:
        request.deadline.CopyFrom(to_duration(args.deadline_seconds))
    done = False
    async with open_channel(args.endpoint) as channel:
        stub = prefill_pb2_grpc.PrefillEngineStub(channel)  # type: ignore[no-untyped-call]
        try:
            async for status in stub.Drain(request):
                done = status.done
                print(_line(status, as_json=args.json), flush=True)
        except grpc.aio.AioRpcError as error:
            raise call_failed(args.endpoint, error) from error
    return done


def _line(status: prefill_pb2.DrainStatus, *, as_json: bool) -> str:
    names = ("running", "waiting", "tickets_open", "sent_back", "done")
    values = {name: getattr(status, name) for name in names}
    if as_json:
        return json.dumps(values)
    text = "{running} running, {waiting} waiting, {tickets_open} tickets open, {sent_back} sent back".format(**values)
    return text + (": drained" if status.done else "")
