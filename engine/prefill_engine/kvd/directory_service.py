"""`pe.v1.Directory` over a DirectoryState: the gRPC servicer. The server around it is directory_server.py.

Runs on one asyncio loop, which owns the state. The trap: every message comes from a peer that may be wrong; sizes are checked
here, since the state takes what it is given.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from prefill_engine.kv.segments import MAX_RECORDS
from prefill_engine.kvd.directory_messages import (
    KEY_BYTES,
    MAX_KEYS,
    SNAPSHOT_KEY_BYTES,
    block_runs,
    holder_of,
    segment_info,
    snapshot_message,
    split_keys,
)
from prefill_engine.kvd.directory_state import DirectoryState, Standing
from prefill_engine.rpc import directory_pb2 as pb
from prefill_engine.rpc import directory_pb2_grpc

logger = logging.getLogger(__name__)

DIRECTORY_SERVICE: str = pb.DESCRIPTOR.services_by_name["Directory"].full_name
_MAX_NAME_CHARACTERS = 512
_SWEEP_SECONDS = 1.0

Context = grpc.aio.ServicerContext[Any, Any]


class DirectoryService(directory_pb2_grpc.DirectoryServicer):
    """heartbeat_seconds, expiry_seconds: told to holders at Join. epoch: of this directory's incarnation."""

    def __init__(
        self,
        state: DirectoryState,
        *,
        heartbeat_seconds: float,
        expiry_seconds: float,
        epoch: int,
        count: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._heartbeat_seconds = heartbeat_seconds
        self._expiry_seconds = expiry_seconds
        self._epoch = epoch
        self._count = count
        self._clock = clock

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        self._count("join")
        holder = holder_of(request.holder)
        if not holder.holder_id or ":" not in holder.endpoint:
            await _refuse(context, f"holder {holder.holder_id!r} at {holder.endpoint!r}, expected an id and host:port")
        if self._state.join(holder, now=self._clock()) is Standing.FENCED:
            detail = f"holder {holder.holder_id}: epoch {holder.epoch} is older than one that has joined"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, detail)
        logger.info("holder joined", extra={"holder_id": holder.holder_id, "endpoint": holder.endpoint})
        response = pb.JoinResponse(directory_epoch=self._epoch)
        response.heartbeat.FromNanoseconds(round(self._heartbeat_seconds * 1e9))
        response.expiry.FromNanoseconds(round(self._expiry_seconds * 1e9))
        return response

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:  # noqa: ARG002
        self._count("heartbeat")
        standing = self._state.heartbeat(request.holder_id, request.epoch, request.num_snapshots, now=self._clock())
        return pb.HeartbeatResponse(resync=standing is Standing.UNKNOWN, fenced=standing is Standing.FENCED)

    async def PublishSnapshots(
        self, request: pb.PublishSnapshotsRequest, context: Context
    ) -> pb.PublishSnapshotsResponse:
        self._count("publish_snapshots")
        await _check_keys(context, request.keys)
        standing = self._state.publish_snapshots(request.holder_id, request.epoch, request.keys, now=self._clock())
        if standing is Standing.UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"holder {request.holder_id} has not joined; join first")
        return pb.PublishSnapshotsResponse(fenced=standing is Standing.FENCED)

    async def WithdrawSnapshots(
        self, request: pb.WithdrawSnapshotsRequest, context: Context
    ) -> pb.WithdrawSnapshotsResponse:
        self._count("withdraw_snapshots")
        await _check_keys(context, request.keys)
        self._state.withdraw_snapshots(
            request.holder_id, request.epoch, request.keys, everything=request.all, now=self._clock()
        )
        return pb.WithdrawSnapshotsResponse()

    async def PublishSegment(self, request: pb.PublishSegmentRequest, context: Context) -> pb.PublishSegmentResponse:
        self._count("publish_segment")
        await _check_segments(context, request)
        self._state.publish_segments(request.store_id, [segment_info(one) for one in request.segments])
        return pb.PublishSegmentResponse()

    async def WithdrawSegment(self, request: pb.WithdrawSegmentRequest, context: Context) -> pb.WithdrawSegmentResponse:  # noqa: ARG002
        self._count("withdraw_segment")
        self._state.withdraw_segments(request.store_id, request.names)
        return pb.WithdrawSegmentResponse()

    async def LookupBlocks(self, request: pb.LookupBlocksRequest, context: Context) -> pb.LookupBlocksResponse:
        self._count("lookup_blocks")
        if len(request.keys) % KEY_BYTES or len(request.keys) > MAX_KEYS * KEY_BYTES:
            await _refuse(context, f"keys of {len(request.keys)} bytes, expected up to {MAX_KEYS} of {KEY_BYTES}")
        found = self._state.lookup_blocks(request.store_id, request.layout_id, split_keys(request.keys))
        return pb.LookupBlocksResponse(runs=block_runs(found))

    async def LookupSnapshots(self, request: pb.LookupSnapshotsRequest, context: Context) -> pb.LookupSnapshotsResponse:
        self._count("lookup_snapshots")
        await _check_keys(context, request.keys)
        found = self._state.lookup_snapshots(request.keys, prefer_zone=request.prefer_zone, now=self._clock())
        return pb.LookupSnapshotsResponse(locations=[snapshot_message(one) for one in found])

    async def sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for holder in self._state.sweep(now=self._clock()):
                logger.warning("holder fell silent, its locations are withdrawn", extra={"holder_id": holder.holder_id})


async def _check_keys(context: Context, keys: Sequence[bytes]) -> None:
    if len(keys) > MAX_KEYS or any(len(key) != SNAPSHOT_KEY_BYTES for key in keys):
        await _refuse(context, f"{len(keys)} keys, expected up to {MAX_KEYS} of {SNAPSHOT_KEY_BYTES} bytes each")


async def _check_segments(context: Context, request: pb.PublishSegmentRequest) -> None:
    for one in request.segments:
        num_keys, rest = divmod(len(one.keys), KEY_BYTES)
        if rest or not 1 <= num_keys <= MAX_RECORDS or not 1 <= len(one.name) <= _MAX_NAME_CHARACTERS:
            await _refuse(
                context,
                f"segment with a name of {len(one.name)} characters and keys of {len(one.keys)} bytes: "
                f"expected 1 to {MAX_RECORDS} keys of {KEY_BYTES} bytes",
            )
    if len(request.segments) > MAX_KEYS:
        await _refuse(context, f"{len(request.segments)} segments in a message, expected up to {MAX_KEYS}")


async def _refuse(context: Context, detail: str) -> None:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, detail)
