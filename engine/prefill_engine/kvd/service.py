"""gRPC face of the Keeper: kv.proto on the Unix socket (kv.md 7.3). Translates, checks arguments, decides nothing.

The trap: the Session stream is how a rank's death is noticed; its end, however it comes, must reach Keeper.disconnect.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from prefill_engine.kv.pool_memory import PoolGeometry, SnapshotState
from prefill_engine.kv.record import KEY_BYTES
from prefill_engine.kv.snapshot_record import SNAPSHOT_KEY_BYTES
from prefill_engine.kvd.commits import SlotKey
from prefill_engine.kvd.keeper import Keeper
from prefill_engine.kvd.opens import OpenAnswer, OpenAsk
from prefill_engine.kvd.peer_check import PeerCheck
from prefill_engine.kvd.sessions import Session as RankSession
from prefill_engine.rpc import kv_pb2 as pb
from prefill_engine.rpc import kv_pb2_grpc
from prefill_plan.block_keys import BlockKey
from prefill_plan.errors import CapacityError, ConfigError, PrefillError

logger = logging.getLogger(__name__)

PROTOCOL = 1
_NOTICE_SECONDS = 0.2
_DEFAULT_LIMIT_SECONDS = 10.0
_LIMITS = {
    "keys": 1 << 16,
    "num_blocks": 1024,
    "num_snapshots": 64,
    "blocks": 1024,
    "snapshots": 64,
    "lease_ids": 1 << 16,
    "reservation_ids": 1 << 16,
    "held_leases": 1 << 16,
    "call_ids": 1 << 16,
}
"""Most of each kind in one message (kv.md 7.3: bounded): kvd has one loop, and what one call may take is the pool of all. A rank
reserves and commits a segment (32 blocks) or the two snapshots of a prefill at a time."""
_MAX_LIMIT_SECONDS = 3600
_SNAPSHOT_STATES = {
    SnapshotState.NONE: pb.OpenResponse.NONE,
    SnapshotState.READY: pb.OpenResponse.HELD,
    SnapshotState.PULLING: pb.OpenResponse.PULLING,
}
Context = Any  # grpc.aio.ServicerContext is generic in stubs only


class KvdService(kv_pb2_grpc.KvdServicer):
    """Serves one Keeper. transport_kind: what peers are reached by, told to ranks."""

    def __init__(self, keeper: Keeper, peers: PeerCheck, *, transport_kind: str) -> None:
        self._keeper = keeper
        self._peers = peers
        self._transport_kind = transport_kind

    async def Session(self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context) -> None:
        await self._check_peer(context)
        hello = await _receive(request_iterator, "hello", context)
        await _check_counts(context, held_leases=len(hello.hello.held_leases))
        session, adopted = await self._connect(hello.hello, context)
        connection = session.connection
        try:
            await context.write(self._welcome(session, adopted))
            await _receive(request_iterator, "attached", context)
            try:
                self._keeper.attach(session)
            except ConfigError as error:
                await _refuse(context, error)
            await context.write(pb.SessionResponse(ready=pb.SessionReady()))
            notices = asyncio.create_task(self._send_notices(context))
            try:
                async for request in request_iterator:
                    match request.WhichOneof("m"):
                        case "abandon":
                            await _check_counts(context, call_ids=len(request.abandon.call_ids))
                            self._keeper.abandon(session, request.abandon.call_ids)
                        case "urge":
                            await _check_counts(context, lease_ids=len(request.urge.lease_ids))
                            self._keeper.urge(session, request.urge.lease_ids)
            finally:
                notices.cancel()
                with suppress(asyncio.CancelledError, grpc.aio.UsageError, asyncio.InvalidStateError):
                    await notices
        finally:
            self._keeper.disconnect(session, connection)

    async def Open(self, request: pb.OpenRequest, context: Context) -> pb.OpenResponse:
        keys = request.keys
        num_keys = len(keys) // KEY_BYTES
        if len(keys) % KEY_BYTES or request.resident_blocks > num_keys:
            detail = (
                f"{len(keys)} bytes of keys, {request.resident_blocks} resident blocks: expected {KEY_BYTES} bytes a key and a "
                "key for each resident block; nothing was opened"
            )
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, detail)
        await _check_counts(context, keys=num_keys)
        limit = request.limit
        if not 0 <= limit.seconds <= _MAX_LIMIT_SECONDS or limit.nanos < 0:
            detail = f"limit = {limit.seconds} s, expected 0 (the default) to {_MAX_LIMIT_SECONDS}; nothing was opened"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, detail)
        ask = OpenAsk(
            keys=cast(list[BlockKey], [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]),
            resident_blocks=request.resident_blocks,
            tenant=request.tenant,
            want_snapshot=request.want_snapshot,
            limit_seconds=limit.seconds + limit.nanos * 1e-9 or _DEFAULT_LIMIT_SECONDS,
            refuse_replayed=request.refuse_replayed,
            step_waits=request.step_waits,
            call_id=request.call_id,
        )
        try:
            answer = await self._keeper.open(request.owner_epoch, ask)
        except (ConfigError, CapacityError) as error:
            await _refuse(context, error)
        return _open_response(answer)

    async def Reserve(self, request: pb.ReserveSlotsRequest, context: Context) -> pb.ReserveSlotsResponse:
        await _check_counts(context, num_blocks=request.num_blocks, num_snapshots=request.num_snapshots)
        try:
            reservation = self._keeper.reserve(
                request.owner_epoch,
                num_blocks=request.num_blocks,
                num_snapshots=request.num_snapshots,
                tenant=request.tenant,
                call_id=request.call_id,
            )
        except (ConfigError, CapacityError) as error:
            await _refuse(context, error)
        if reservation is None:
            return pb.ReserveSlotsResponse()
        return pb.ReserveSlotsResponse(
            reservation_id=reservation.lease_id, slots=reservation.slots, snapshot_slots=reservation.snapshot_slots
        )

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        await _check_counts(context, blocks=len(request.blocks), snapshots=len(request.snapshots))
        blocks = await _slot_keys(request.blocks, KEY_BYTES, context)
        snapshots = await _slot_keys(request.snapshots, SNAPSHOT_KEY_BYTES, context)
        try:
            result = await self._keeper.commit(request.reservation_id, blocks, snapshots)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return pb.CommitResponse(
            stored_blocks=result.stored_blocks, held_snapshots=result.held_snapshots, failure=result.failure
        )

    async def Truncate(self, request: pb.TruncateRequest, context: Context) -> pb.TruncateResponse:  # noqa: ARG002
        known = self._keeper.truncate(
            request.lease_id, num_blocks=request.num_blocks, drop_snapshot=request.drop_snapshot
        )
        return pb.TruncateResponse(known=known)

    async def Close(self, request: pb.CloseRequest, context: Context) -> pb.CloseResponse:
        await _check_counts(context, lease_ids=len(request.lease_ids), reservation_ids=len(request.reservation_ids))
        return pb.CloseResponse(unknown=self._keeper.close([*request.lease_ids, *request.reservation_ids]))

    async def _check_peer(self, context: Context) -> None:
        if self._peers.shut_foreign():
            detail = "only processes of kvd's user and root may use this socket"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, detail)

    async def _connect(self, hello: pb.SessionHello, context: Context) -> tuple[RankSession, list[int]]:
        if hello.protocol != PROTOCOL or not hello.owner_epoch:
            detail = f"protocol {hello.protocol}, owner epoch {hello.owner_epoch}: expected {PROTOCOL} and not 0"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, detail)
        geometry = PoolGeometry(
            layout_digest=hello.geometry.layout_digest,
            header_bytes=hello.geometry.header_bytes,
            payload_bytes=hello.geometry.payload_bytes,
            record_bytes=hello.geometry.record_bytes,
            group_bytes=tuple(hello.geometry.group_bytes),
            snapshot_payload_bytes=hello.snapshot_bytes,
        )
        try:
            return await self._keeper.connect(
                owner_epoch=hello.owner_epoch,
                engine_id=hello.engine_id,
                rank=hello.rank,
                geometry=geometry,
                held_leases=hello.held_leases,
            )
        except ConfigError as error:
            await _refuse(context, error)
            raise

    def _welcome(self, session: RankSession, adopted: Sequence[int]) -> pb.SessionResponse:
        memory = self._keeper.memory
        return pb.SessionResponse(
            welcome=pb.SessionWelcome(
                protocol=PROTOCOL,
                kvd_epoch=memory.epoch,
                pool_path=memory.path,
                nonce=memory.nonce,
                adopted_leases=adopted,
                echo_index=session.echo_index,
            )
        )

    async def _send_notices(self, context: Context) -> None:
        """Tells the rank what changed."""
        sent = None
        while True:
            keeper = self._keeper
            notice = pb.SessionNotice(
                store_ok=keeper.store.is_up, transport=self._transport_kind, draining=keeper.is_draining
            )
            if notice != sent:
                await context.write(pb.SessionResponse(notice=notice))
                sent = notice
            await asyncio.sleep(_NOTICE_SECONDS)


def _open_response(answer: OpenAnswer) -> pb.OpenResponse:
    response = pb.OpenResponse(
        lease_id=answer.lease_id,
        lease_row=answer.row,
        found_blocks=answer.found_blocks,
        slots=answer.slots,
        snapshot=_SNAPSHOT_STATES[answer.snapshot],
        snapshot_slot=answer.snapshot_slot,
        shrunk_blocks=answer.shrunk_blocks,
    )
    if answer.retry_seconds:
        response.retry_after.CopyFrom(Duration(nanos=int(answer.retry_seconds * 1e9)))
    return response


async def _check_counts(context: Context, **counts: int) -> None:
    """Aborts a call that asks for more than one call may. counts: names of _LIMITS."""
    for name, count in counts.items():
        if count > _LIMITS[name]:
            detail = f"{name} = {count}, expected at most {_LIMITS[name]}; nothing was done"
            logger.warning("call refused", extra={"detail": detail})
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, detail)


async def _slot_keys(entries: Sequence[Any], key_bytes: int, context: Context) -> list[SlotKey]:
    wrong = next((len(entry.key) for entry in entries if len(entry.key) != key_bytes), None)
    if wrong is not None:
        detail = f"a key of {wrong} bytes, expected {key_bytes}"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, detail)
    return [SlotKey(slot=entry.slot, key=entry.key) for entry in entries]


async def _receive(requests: AsyncIterator[pb.SessionRequest], kind: str, context: Context) -> pb.SessionRequest:
    """The next message, which must be of this kind."""
    request = await anext(requests, None)
    found = None if request is None else request.WhichOneof("m")
    if request is None or found != kind:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"session message {found}, expected {kind}")
    assert request is not None
    return request


async def _refuse(context: Context, error: PrefillError) -> None:
    logger.warning("call refused", extra={"detail": error.message})
    code = grpc.StatusCode.RESOURCE_EXHAUSTED if error.retryable else grpc.StatusCode.FAILED_PRECONDITION
    await context.abort(code, error.message)
