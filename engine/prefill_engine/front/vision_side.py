"""Everything of the front that has to do with images, made when the ranks have said which tower their rows come from.

Made by serve.build_front when vision is configured; the front and its servicer call it. The trap: names of encoders are looked up
while the engine runs, so an engine without a single encoder is ready all the same: it serves text, and images wait their time.
"""

import asyncio
import logging
from collections.abc import Callable

from prefill_engine.front.attempt import Attempt
from prefill_engine.front.call import PrefillCall
from prefill_engine.front.image_desk import ImageDesk, Observer
from prefill_engine.front.local_encoder import LocalEncoder
from prefill_engine.front.served_model import ServedModel
from prefill_engine.image_messages import ImageRowsDone, ImagesWanted
from prefill_engine.messages import ToRank
from prefill_engine.rpc.status import Failure
from prefill_engine.vision.slab import Slab
from prefill_engine.vision_client.encoder_set import EncoderSet
from prefill_engine.vision_client.hold_renewal import HoldRenewal
from prefill_engine.vision_client.image_fetch import VALUE_BYTES, ImageFetcher
from prefill_engine.vision_client.slab_room import SlabRoom
from prefill_plan.config import VisionConfig, VisionMode
from prefill_plan.errors import ConfigError
from prefill_plan.model_spec import ModelSpec

logger = logging.getLogger(__name__)


class VisionSide:
    """local: the encoder of in-engine vision, run by serve.py. slab: ours from now on."""

    def __init__(
        self,
        config: VisionConfig,
        *,
        slab: Slab,
        local: LocalEncoder | None,
        send: Callable[[int, ToRank], None],
        fail: Callable[[Attempt, Failure], None],
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self.local = local
        self._config = config
        self._slab = slab
        self._send = send
        self._fail = fail
        self._observer = observer
        self._clock = clock
        self._desk: ImageDesk | None = None
        self._encoders: EncoderSet | None = None
        self._running: list[asyncio.Task[None]] = []

    def start(self, served: ServedModel) -> None:
        """The ranks are ready: encoders of their tower are looked for from now on. Call it inside the running loop."""
        encoders = EncoderSet(
            self._endpoints, digest=served.vision_digest, columns=served.hidden_size, clock=self._clock
        )
        fetcher = ImageFetcher(
            encoders,
            digest=served.vision_digest,
            columns=served.hidden_size,
            image_seconds=self._config.image_seconds,
            clock=self._clock,
        )
        room = SlabRoom(self._slab, patience_seconds=self._config.image_seconds, clock=self._clock)
        holds = HoldRenewal(encoders, clock=self._clock)
        self._desk = ImageDesk(
            fetcher,
            room,
            holds,
            columns=served.hidden_size,
            send=self._send,
            fail=self._fail,
            observer=self._observer,
            clock=self._clock,
        )
        self._encoders = encoders
        self._running = [asyncio.create_task(encoders.run()), asyncio.create_task(holds.run())]

    @property
    def num_encoders(self) -> int:
        """That take images now."""
        return self._encoders.num_usable if self._encoders is not None else 0

    @property
    def used_bytes(self) -> int:
        """Of the row slab."""
        return self._slab.used_bytes

    def check_room(self, call: PrefillCall) -> None:
        """Before a call is admitted. Raises ServingFailure: QUEUE_FULL."""
        if self._desk is not None:
            self._desk.check_room(sum(len(source.pixels) for source in call.sources))

    def open(self, attempt: Attempt) -> None:
        """A new attempt was handed to its rank."""
        if self._desk is not None and attempt.image_sources:
            self._desk.open(attempt)

    def receive(self, message: ImagesWanted | ImageRowsDone) -> None:
        """A rank's message about an attempt's images."""
        if self._desk is not None:
            self._desk.receive(message)

    def released(self, attempt_id: bytes) -> None:
        """A rank holds nothing of the attempt any more."""
        if self._desk is not None:
            self._desk.released(attempt_id)

    async def close(self) -> None:
        """Ends fetches and watches, and removes the slab."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._desk is not None:
            await self._desk.close()
        self._slab.close()

    def _endpoints(self) -> tuple[str, ...]:
        if self.local is None:
            return self._config.endpoints
        return (self.local.endpoint,) if self.local.endpoint else ()


def check_vision(vision: VisionConfig, spec: ModelSpec) -> None:
    """Raises ConfigError: no encoders to ask, an address that is none, no room for an image, a model without vision."""
    if vision.mode is VisionMode.NONE:
        return
    mode = f"vision.mode = {vision.mode}"
    if spec.vision is None:
        raise ConfigError(f"{mode}, but the model's config.json has no vision_config")
    is_remote = vision.mode is VisionMode.REMOTE
    if is_remote != bool(vision.endpoints):
        expected = "at least one host:port" if is_remote else "none, the engine runs its own"
        raise ConfigError(f"{mode} with vision.endpoints = {list(vision.endpoints)}, expected {expected}")
    if vision.numerics_class and not is_remote:
        raise ConfigError(f"{mode} with vision.numerics_class = {vision.numerics_class!r}, expected none, it is ours")
    for endpoint in vision.endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"vision.endpoints has {endpoint!r}, expected host:port")
    image_bytes = spec.vision.max_image_tokens * spec.hidden_size * VALUE_BYTES
    if vision.rows_bytes < image_bytes:
        raise ConfigError(f"vision.rows_bytes = {vision.rows_bytes}, expected at least one image of {image_bytes}")
