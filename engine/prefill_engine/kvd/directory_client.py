"""RemoteDirectory: the Directory protocol against a directory service, which may be away, slow, restarted or wrong.

One task keeps this kvd joined: join, announce everything, heartbeat, and again after any doubt. Calls never raise and never wait
longer than their deadline; while the service is known to be away they answer at once. The trap: announcements and withdrawals
must arrive in order, else a location stays that is gone; so one lock sends them.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from prefill_engine.kv.directory import Holder, SnapshotLocation
from prefill_engine.kv.segments import BlockLocation, SegmentInfo
from prefill_engine.kvd.directory_failures import PullFailures
from prefill_engine.kvd.directory_local import pullable
from prefill_engine.kvd.directory_messages import (
    MAX_KEYS,
    channel_credentials,
    holder_message,
    runs_to_locations,
    segment_message,
    snapshot_location,
)
from prefill_engine.rpc import directory_pb2 as pb
from prefill_engine.rpc import directory_pb2_grpc
from prefill_plan.block_keys import BlockKey
from prefill_plan.config import TlsConfig
from prefill_plan.kvd_config import DirectoryConfig

logger = logging.getLogger(__name__)

_TELL_SECONDS = 1.0  # announcements: nobody waits for them, and they may carry thousands of keys
_RETRY_SECONDS = (0.05, 2.0)
_MOST_UNSAID = 1024  # withdrawals; one that is forgotten costs who asks a read that fails
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Two kvds of one process are two clients; and a new incarnation never inherits a connection in back-off.
    ("grpc.use_local_subchannel_pool", 1),
)


class RemoteDirectory:
    """holder: this kvd. snapshot_keys: what it serves right now. on_resync: called after a join at a directory that has forgotten
    everything, or was not told of a segment; kvd then publishes the segments of its store again.

    counters: monotonic; calls, failed, skipped, joins, resyncs, fenced.
    """

    def __init__(
        self,
        config: DirectoryConfig,
        holder: Holder,
        *,
        snapshot_keys: Callable[[], Iterable[bytes]],
        on_resync: Callable[[], None],
        tls: TlsConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts on the running loop. Raises ConfigError for unusable TLS files."""
        self._config = config
        self._holder = holder
        self._snapshot_keys = snapshot_keys
        self._on_resync = on_resync
        self._clock = clock
        credentials = channel_credentials(tls)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(config.address, options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(config.address, credentials, options=_CHANNEL_OPTIONS)
        self._stub: Any = directory_pb2_grpc.DirectoryStub(self._channel)  # type: ignore[no-untyped-call]
        self._failures = PullFailures()
        self._announced: set[bytes] = set()
        self._telling = asyncio.Lock()
        self._heartbeat_seconds = _TELL_SECONDS
        self._directory_epoch = 0
        self._is_fenced = False
        self._suspicious = asyncio.Event()
        self._has_lost_words = False
        self._has_lost_segments = False
        self._unsaid: deque[pb.WithdrawSegmentRequest] = deque(maxlen=_MOST_UNSAID)
        self.is_joined = False
        self.counters: Counter[str] = Counter()
        self._keeper = asyncio.create_task(self._keep_joined())

    async def lookup_blocks(
        self, store_id: str, layout_id: bytes, keys: Sequence[BlockKey]
    ) -> tuple[BlockLocation, ...]:
        request = pb.LookupBlocksRequest(store_id=store_id, layout_id=layout_id, keys=b"".join(keys[:MAX_KEYS]))
        answer = await self._ask(self._stub.LookupBlocks, request)
        return () if answer is None else runs_to_locations(answer.runs, limit=len(keys))

    async def lookup_snapshot(self, key: bytes) -> tuple[SnapshotLocation, ...]:
        request = pb.LookupSnapshotsRequest(keys=[key], prefer_zone=self._holder.zone)
        answer = await self._ask(self._stub.LookupSnapshots, request)
        if answer is None:
            return ()
        found = [snapshot_location(one) for one in answer.locations if one.key == key]
        return pullable(found, us=self._holder, failures=self._failures, now=self._clock())

    async def publish_segments(self, store_id: str, segments: Sequence[SegmentInfo]) -> None:
        async with self._telling:
            for start in range(0, len(segments), MAX_KEYS // 8):
                batch = [segment_message(one) for one in segments[start : start + MAX_KEYS // 8]]
                request = pb.PublishSegmentRequest(store_id=store_id, segments=batch)
                if await self._tell(self._stub.PublishSegment, request) is None:
                    self._has_lost_segments = True

    async def withdraw_segments(self, store_id: str, names: Sequence[str]) -> None:
        async with self._telling:
            request = pb.WithdrawSegmentRequest(store_id=store_id, names=names)
            if await self._tell(self._stub.WithdrawSegment, request) is None:
                self._unsaid.append(request)

    async def publish_snapshots(self, keys: Sequence[bytes]) -> None:
        async with self._telling:
            await self._announce(keys)

    async def withdraw_snapshots(self, keys: Sequence[bytes]) -> None:
        async with self._telling:
            self._announced.difference_update(keys)
            for start in range(0, len(keys), MAX_KEYS):
                await self._withdraw(self._holder, keys[start : start + MAX_KEYS])

    async def report_failure(self, location: SnapshotLocation) -> None:
        if self._failures.report(location, now=self._clock()):
            await self._withdraw(location.holder, [location.key])

    async def close(self) -> None:
        """Withdraws everything of this holder, if the directory answers at once. Later calls are skipped."""
        was_joined, self.is_joined = self.is_joined, False
        self._keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeper
        holder = self._holder
        if was_joined:
            request = pb.WithdrawSnapshotsRequest(holder_id=holder.holder_id, epoch=holder.epoch, all=True)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._stub.WithdrawSnapshots(request, timeout=_TELL_SECONDS)
        await self._channel.close(None)

    async def _keep_joined(self) -> None:
        retry_seconds = _RETRY_SECONDS[0]
        while not self._is_fenced:
            try:
                if not self.is_joined:
                    await self._join()
                    retry_seconds = _RETRY_SECONDS[0]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._suspicious.wait(), self._heartbeat_seconds)
                await self._heartbeat()
            except grpc.aio.AioRpcError as error:
                self.counters["failed"] += 1
                if self.is_joined:
                    logger.warning(
                        "directory lost, look-ups are misses until it is back", extra={"status": str(error.code())}
                    )
                self.is_joined = False
                self._is_fenced = error.code() is grpc.StatusCode.FAILED_PRECONDITION
                await asyncio.sleep(retry_seconds * random.uniform(0.5, 1.0))
                retry_seconds = min(2 * retry_seconds, _RETRY_SECONDS[1])
        self.counters["fenced"] += 1
        logger.error("a newer incarnation of this holder has joined, nothing is announced any more")

    async def _join(self) -> None:
        """Raises AioRpcError. Nobody waits for it: until it is through, announcements are lost words; all is told afterwards."""
        async with self._telling:  # what is on its way arrives before
            self._has_lost_words = False
        answer = await self._stub.Join(
            pb.JoinRequest(holder=holder_message(self._holder)), timeout=_TELL_SECONDS, wait_for_ready=True
        )
        self.counters["joins"] += 1
        self._heartbeat_seconds = max(0.01, answer.heartbeat.ToNanoseconds() / 1e9)
        self._announced.clear()
        self.is_joined = True
        await self._announce_all()
        await self._say_unsaid()
        if self._has_lost_segments or answer.directory_epoch != self._directory_epoch:
            self._has_lost_segments = False
            self._directory_epoch = answer.directory_epoch
            try:
                self._on_resync()
            except Exception:
                logger.exception("segments could not be announced again")

    async def _say_unsaid(self) -> None:
        """Withdrawals that did not arrive: a directory that was only out of reach still has those segments."""
        unsaid, self._unsaid = self._unsaid, deque(maxlen=_MOST_UNSAID)
        for request in unsaid:
            await self.withdraw_segments(request.store_id, request.names)

    async def _heartbeat(self) -> None:
        """Raises AioRpcError."""
        async with self._telling:
            self._suspicious.clear()
            request = pb.HeartbeatRequest(
                holder_id=self._holder.holder_id, epoch=self._holder.epoch, num_snapshots=len(self._announced)
            )
            answer = await self._stub.Heartbeat(request, timeout=_TELL_SECONDS)
        if answer.fenced:
            self._is_fenced, self.is_joined = True, False
        elif answer.resync or self._has_lost_words:
            self.counters["resyncs"] += 1
            self.is_joined = False

    async def _announce_all(self) -> None:
        """In batches, each one only of what is still there when it is sent."""
        keys = list(self._snapshot_keys())
        for start in range(0, len(keys), MAX_KEYS):
            async with self._telling:
                current = set(self._snapshot_keys())
                await self._announce([key for key in keys[start : start + MAX_KEYS] if key in current])

    async def _announce(self, keys: Sequence[bytes]) -> None:
        for start in range(0, len(keys), MAX_KEYS):
            batch = keys[start : start + MAX_KEYS]
            request = pb.PublishSnapshotsRequest(holder_id=self._holder.holder_id, epoch=self._holder.epoch, keys=batch)
            answer = await self._tell(self._stub.PublishSnapshots, request)
            if answer is None:
                return
            if answer.fenced:
                self._is_fenced, self.is_joined = True, False
                return
            self._announced.update(batch)

    async def _withdraw(self, holder: Holder, keys: Sequence[bytes]) -> None:
        request = pb.WithdrawSnapshotsRequest(holder_id=holder.holder_id, epoch=holder.epoch, keys=keys)
        await self._tell(self._stub.WithdrawSnapshots, request)

    async def _ask(self, method: Callable[..., Awaitable[Any]], request: Message) -> Any:
        """A look-up: the answer, or None after deadline_seconds at the latest."""
        return await self._call(method, request, self._config.deadline_seconds)

    async def _tell(self, method: Callable[..., Awaitable[Any]], request: Message) -> Any:
        """An announcement: after one that failed nobody knows what the directory knows, so the next heartbeat tells all again."""
        answer = await self._call(method, request, _TELL_SECONDS)
        if answer is None:
            self._has_lost_words = True
        return answer

    async def _call(self, method: Callable[..., Awaitable[Any]], request: Message, seconds: float) -> Any:
        if not self.is_joined:
            self.counters["skipped"] += 1
            return None
        self.counters["calls"] += 1
        try:
            return await method(request, timeout=seconds)
        except grpc.aio.AioRpcError:
            self.counters["failed"] += 1
            # A heartbeat now says whether it is away: then no further call waits for it.
            self._suspicious.set()
            return None
