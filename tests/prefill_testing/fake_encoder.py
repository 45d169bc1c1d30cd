"""A vision encoder without a tower, behind real gRPC in the test's own loop: patterned rows, and every way to answer wrongly."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Self

import crc32c
import grpc.aio

from prefill_engine.rpc import vision_pb2, vision_pb2_grpc
from prefill_engine.rpc.status import Context, Failure, abort_with
from prefill_engine.vision.slab import Slab

FRAME_BYTES = 4096


def rows_of(data: bytes, *, tokens: int, columns: int) -> bytes:
    """The rows that a fake makes of an image: bfloat16 values of about 1, another pattern for every image."""
    seed = hashlib.sha256(data).digest()
    count = tokens * columns
    low = (seed * (count // len(seed) + 1))[:count]
    return b"".join(bytes((value, 0x3F)) for value in low)


@dataclass(slots=True, eq=False, kw_only=True)
class FakeEncoder:
    """Use as `async with FakeEncoder(...) as encoder`. Knobs may be turned at any time.

    fail: what Encode answers instead, None = rows. running: while it is cleared, Encode waits. shared: rows lie in shared memory
    as well. spoil: changes the answer before it is sent. spoil_frame: the same for frames of Claim. released: what Ack answers.
    """

    digest: bytes
    columns: int
    numerics_class: str = "cpu-ref-bf16"
    state: str = "READY"
    epoch: int = 1
    patches_queued: int = 0
    b_ms: float = 0.01
    shared: bool = False
    fail: Callable[[vision_pb2.EncodeRequest], Failure | None] = lambda _request: None
    spoil: Callable[[vision_pb2.EncodedImage], None] = lambda _image: None
    spoil_frame: Callable[[vision_pb2.EmbeddingBytes], None] = lambda _frame: None
    released: bool = True
    running: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[vision_pb2.EncodeRequest] = field(default_factory=list)
    acks: list[vision_pb2.AckRequest] = field(default_factory=list)
    cancels: list[vision_pb2.CancelEncodeRequest] = field(default_factory=list)
    renewals: list[vision_pb2.RenewHoldRequest] = field(default_factory=list)
    num_left: int = 0
    """Calls of Encode that their caller gave up."""
    address: str = ""
    _held: dict[bytes, bytes] = field(default_factory=dict)
    _slab: Slab | None = None
    _server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        self.running.set()
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        vision_pb2_grpc.add_VisionEncoderServicer_to_server(_Servicer(self), server)
        port = server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await server.start()
        self._server = server
        if self.shared:
            self._slab = Slab("fake-encoder", 1 << 20, key="test")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()
        if self._slab is not None:
            self._slab.close()

    async def die(self) -> None:
        """Ends at once, as a killed process; calls under way break."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    @property
    def num_held(self) -> int:
        """Tickets that nobody has acknowledged."""
        return len(self._held)

    def hold(self, data: bytes, *, tokens: int) -> vision_pb2.EncodedImage:
        """Rows of an image under a new ticket."""
        rows = rows_of(data, tokens=tokens, columns=self.columns)
        image = vision_pb2.EncodedImage(
            tokens=tokens,
            columns=self.columns,
            dtype="bf16",
            ticket_id=secrets.token_bytes(16),
            checksum=crc32c.crc32c(rows).to_bytes(4, "little"),
        )
        self._held[image.ticket_id] = rows
        if self._slab is not None:
            region = self._slab.allocate(len(rows))
            assert region is not None
            self._slab.view(region)[:] = rows
            image.region.shm.handle, image.region.shm.host_id = self._slab.path, self._slab.host_id
            image.region.extents.add(offset=region.offset, length=len(rows))
        return image


class _Servicer(vision_pb2_grpc.VisionEncoderServicer):
    def __init__(self, fake: FakeEncoder) -> None:
        self._fake = fake

    async def Encode(self, request: vision_pb2.EncodeRequest, context: Context) -> vision_pb2.EncodeResult:
        fake = self._fake
        fake.requests.append(request)
        try:
            await fake.running.wait()
        except asyncio.CancelledError:
            fake.num_left += 1
            raise
        failure = fake.fail(request)
        if failure is not None:
            await abort_with(context, failure)
        image = fake.hold(request.data, tokens=request.tokens)
        image.content_key = request.content_key
        fake.spoil(image)
        return vision_pb2.EncodeResult(item_id=request.item_id, image=image)

    async def Claim(
        self, request: vision_pb2.ClaimRequest, context: Context
    ) -> AsyncIterator[vision_pb2.EmbeddingBytes]:
        rows = self._fake._held.get(request.ticket_id)
        if rows is None:
            await abort_with(context, Failure(reason="EMBEDDING_GONE", public_message="no such ticket"))
        for start in range(0, len(rows), FRAME_BYTES):
            data = rows[start : start + FRAME_BYTES]
            is_last = start + len(data) == len(rows)
            frame = vision_pb2.EmbeddingBytes(offset=start, data=data, last=is_last, crc32c=crc32c.crc32c(data))
            self._fake.spoil_frame(frame)
            yield frame

    async def Ack(self, request: vision_pb2.AckRequest, _context: Context) -> vision_pb2.AckResponse:
        self._fake.acks.append(request)
        held = self._fake._held.pop(request.ticket_id, None) is not None
        return vision_pb2.AckResponse(released=held and self._fake.released)

    async def Renew(self, request: vision_pb2.RenewHoldRequest, _context: Context) -> vision_pb2.RenewHoldResponse:
        self._fake.renewals.append(request)
        held = self._fake._held
        return vision_pb2.RenewHoldResponse(lost=[each for each in request.ticket_ids if each not in held])

    async def Cancel(
        self, request: vision_pb2.CancelEncodeRequest, _context: Context
    ) -> vision_pb2.CancelEncodeResponse:
        self._fake.cancels.append(request)
        return vision_pb2.CancelEncodeResponse()

    async def GetInfo(self, _request: vision_pb2.VisionInfoRequest, _context: Context) -> vision_pb2.VisionInfo:
        fake = self._fake
        return vision_pb2.VisionInfo(
            vision_digest=fake.digest,
            columns=fake.columns,
            dtype="bf16",
            epoch=fake.epoch,
            numerics_class=fake.numerics_class,
        )

    async def WatchLoad(
        self, _request: vision_pb2.VisionWatchRequest, _context: Context
    ) -> AsyncIterator[vision_pb2.VisionLoad]:
        while True:
            fake = self._fake
            yield vision_pb2.VisionLoad(
                epoch=fake.epoch, state=fake.state, patches_queued=fake.patches_queued, b_ms_per_patch=fake.b_ms
            )
            await asyncio.sleep(0.02)
