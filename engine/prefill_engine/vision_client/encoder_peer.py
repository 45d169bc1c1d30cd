"""One vision encoder as a PE sees it: connected, known by its digest, its load watched; usable or not.

Owner of the channel and of the count of patches sent since the last report. EncoderSet makes and ends it. The traps: an
encoder of another tower must never get an image, so it is asked who it is after every restart (its epoch changes); a report
that stopped coming means nothing is known, not that all is well.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import grpc.aio

from prefill_engine.rpc import vision_pb2, vision_pb2_grpc
from prefill_engine.vision.encoder_client import open_encoder_channel
from prefill_engine.vision_client.choose import EncoderLoad

logger = logging.getLogger(__name__)

STALE_SECONDS = 2.0  # serving.md 1.1: WatchLoad is suspect after 2 s
_CALL_SECONDS = 5.0
_BACK_OFF_SECONDS = (0.1, 2.0)


class EncoderPeer:
    """Start it inside the running loop, with `watch` as a task. digest: of the tower whose rows fit our model; columns: of a
    row. changed: called when it becomes usable or not, or less busy. is_named: its name still leads to it. num_images: being
    fetched."""

    def __init__(
        self,
        address: str,
        *,
        digest: bytes,
        columns: int,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self.address = address
        self.refusal = "not connected yet"
        self.is_named = True
        self.num_images = 0
        self._digest = digest
        self._columns = columns
        self._clock = clock
        self._changed = changed
        self._channel = open_encoder_channel(address)
        self.stub: Any = vision_pb2_grpc.VisionEncoderStub(self._channel)  # type: ignore[no-untyped-call]
        self._epoch = 0
        self._report: vision_pb2.VisionLoad | None = None
        self._reported_at = 0.0
        self._sent_since = 0

    def load(self) -> EncoderLoad | None:
        """None: it takes no images now; `refusal` says why."""
        report = self._report
        if report is None:
            return None
        if not self.is_named:
            self.refusal = "its name leads elsewhere"
            return None
        if self._clock() - self._reported_at > STALE_SECONDS:
            self.refusal = f"no load report for {self._clock() - self._reported_at:.1f} s"
            return None
        if report.state != vision_pb2.VisionLoad.READY:
            self.refusal = f"state {vision_pb2.VisionLoad.State.Name(report.state)}"
            return None
        return EncoderLoad(
            address=self.address,
            patches=report.patches_queued + self._sent_since,
            a_ms=report.a_ms,
            b_ms=report.b_ms_per_patch,
        )

    def note_sent(self, patches: int) -> None:
        """An image is on its way there; reports do not show it yet."""
        self._sent_since += patches

    def note_lost(self, why: str) -> None:
        """A call found it gone; usable again with its next report."""
        self.refusal = why
        self._report = None

    async def watch(self) -> None:
        """Follows its identity and load, without end."""
        pause = _BACK_OFF_SECONDS[0]
        while True:
            try:
                await self._follow()
                pause = _BACK_OFF_SECONDS[0]
                why = "its load stream ended"
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
            except ValueError as error:
                why = str(error)
                if why != self.refusal:
                    logger.error("encoder refused", extra={"encoder": self.address, "detail": why})
            self.note_lost(why)
            self._changed()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _BACK_OFF_SECONDS[1])

    async def identify(self) -> int:
        """Asks it who it is; its epoch. Raises ValueError: its rows are not for this model."""
        info = await self.stub.GetInfo(vision_pb2.VisionInfoRequest(), timeout=_CALL_SECONDS)
        if info.vision_digest != self._digest:
            digests = f"vision_digest {info.vision_digest.hex()[:16]}, expected {self._digest.hex()[:16]}"
            raise ValueError(
                f"{digests}: another tower, or other arithmetic; its numerics_class is {info.numerics_class or 'not told'}, "
                "vision.numerics_class says which one is expected here"
            )
        if info.columns != self._columns or info.dtype != "bf16":
            raise ValueError(f"rows of {info.columns} {info.dtype} values, expected {self._columns} bf16")
        return int(info.epoch)

    async def close(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._channel.close(None)

    async def _follow(self) -> None:
        epoch = await self.identify()
        request = vision_pb2.VisionWatchRequest()
        request.period.FromMilliseconds(100)
        async for report in self.stub.WatchLoad(request):
            if report.epoch != epoch:
                epoch = await self.identify()
            was_usable = self._report is not None
            self._report, self._reported_at, self._sent_since = report, self._clock(), 0
            if not was_usable:
                logger.info("encoder found", extra={"encoder": self.address, "epoch": report.epoch})
            self._changed()
