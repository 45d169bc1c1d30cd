"""A VE, seen from its caller: one image in, its rows out, checked, and let go of. No torch.

Used by `prefill-engine ve encode` and by tests; whoever spreads images over VEs uses its parts. The traps: shared memory may be
another image's by the time it is read, so rows count only if their checksum is right and the Ack found the hold still on; gRPC's
default limits are far below an image.
"""

import os
import secrets
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import crc32c
import grpc.aio

from prefill_engine.client import call_failed
from prefill_engine.rpc import common_pb2, vision_pb2, vision_pb2_grpc
from prefill_engine.rpc.convert import to_duration
from prefill_engine.vision.image_intake import MAX_IMAGE_BYTES
from prefill_engine.vision.slab import host_id
from prefill_plan.errors import CallFailed

ITEM_ID_BYTES = 16
VALUE_BYTES = {"bf16": 2, "fp32": 4}
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", 2 * MAX_IMAGE_BYTES),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """rows: [tokens, columns] of dtype, row-major. transport: "shm", "stream" or "inline". image: all that the VE said."""

    image: vision_pb2.EncodedImage
    rows: bytes
    transport: str


def open_encoder_channel(endpoint: str) -> grpc.aio.Channel:
    """Plaintext channel for images of up to 32 MB; connects at the first call."""
    return grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)


def read_shared(region: common_pb2.RegionRef) -> bytes | None:
    """A copy of rows in shared memory; None if that memory is another host's, or gone. It is not checked here."""
    shm = region.shm
    try:
        if not shm.handle or host_id(shm.handle) != shm.host_id:
            return None
        fd = os.open(shm.handle, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return b"".join(os.pread(fd, extent.length, extent.offset) for extent in region.extents)
    except OSError:
        return None
    finally:
        os.close(fd)


class EncoderClient:
    """One VE. Use as an async context manager."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._channel = open_encoder_channel(endpoint)
        self.stub = vision_pb2_grpc.VisionEncoderStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def info(self, *, timeout_seconds: float = 10.0) -> vision_pb2.VisionInfo:
        """Raises CallFailed."""
        try:
            info: vision_pb2.VisionInfo = await self.stub.GetInfo(
                vision_pb2.VisionInfoRequest(), timeout=timeout_seconds
            )
        except grpc.aio.AioRpcError as error:
            raise call_failed(self._endpoint, error) from error
        return info

    async def load(self, *, timeout_seconds: float = 10.0) -> vision_pb2.VisionLoad:
        """One load report. Raises CallFailed."""
        call = self.stub.WatchLoad(vision_pb2.VisionWatchRequest(period=to_duration(60.0)), timeout=timeout_seconds)
        try:
            report: vision_pb2.VisionLoad = await call.read()
        except grpc.aio.AioRpcError as error:
            raise call_failed(self._endpoint, error) from error
        call.cancel()
        return report

    async def encode(
        self, data: bytes, *, timeout_seconds: float = 30.0, use_shared_memory: bool = True
    ) -> EncodedRows:
        """Has one image encoded, fetches and checks its rows, and lets them go.

        Raises:
            CallFailed: refused or failed; reason EMBEDDING_CHECKSUM or EMBEDDING_GONE: the rows that came are not to be used.
        """
        request = vision_pb2.EncodeRequest(item_id=secrets.token_bytes(ITEM_ID_BYTES), data=data)
        try:
            result = await self.stub.Encode(request, timeout=timeout_seconds)
            image: vision_pb2.EncodedImage = result.image
            rows, transport = await self._fetch(image, use_shared_memory=use_shared_memory)
            if image.ticket_id:
                acked = await self.stub.Ack(vision_pb2.AckRequest(ticket_id=image.ticket_id, ok=True))
                if not acked.released:
                    raise self._bad_rows("EMBEDDING_GONE", "the hold ended while the rows were read")
        except grpc.aio.AioRpcError as error:
            raise call_failed(self._endpoint, error) from error
        return EncodedRows(image=image, rows=rows, transport=transport)

    async def _fetch(self, image: vision_pb2.EncodedImage, *, use_shared_memory: bool) -> tuple[bytes, str]:
        rows, transport = image.inline_rows, "inline"
        if not rows:
            shared = read_shared(image.region) if use_shared_memory else None
            if shared is None:
                rows, transport = await self._claim(image.ticket_id), "stream"
            else:
                rows, transport = shared, "shm"
        size = image.tokens * image.columns * VALUE_BYTES[image.dtype]
        if len(rows) != size or crc32c.crc32c(rows).to_bytes(4, "little") != image.checksum:
            text = f"{len(rows)} bytes of rows by {transport}, expected {size} with another checksum; dropped"
            raise self._bad_rows("EMBEDDING_CHECKSUM", text)
        return rows, transport

    async def _claim(self, ticket_id: bytes) -> bytes:
        pieces = []
        async for frame in self.stub.Claim(vision_pb2.ClaimRequest(ticket_id=ticket_id)):
            if crc32c.crc32c(frame.data) != frame.crc32c:
                raise self._bad_rows(
                    "EMBEDDING_CHECKSUM", f"frame at {frame.offset} came with another checksum; dropped"
                )
            pieces.append(frame.data)
        return b"".join(pieces)

    def _bad_rows(self, reason: str, text: str) -> CallFailed:
        return CallFailed(
            f"{self._endpoint}: {reason}: {text}", status="DATA_LOSS", reason=reason, retry="ONCE_THEN_FAIL"
        )
