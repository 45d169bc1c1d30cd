"""Calls for images: admitted, joined, answered, cancelled, drained. What the service talks to; decides everything but batches.

Owner of the calls and of their time-outs; tickets, cache and flights are its parts. All in one event loop, nothing is locked. The
traps: an item id that comes twice is one item; a call that leaves must not take the flight of others with it; IMAGE_REJECTED is
the only failure that is remembered.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from prefill_engine.front.drain import Drain
from prefill_engine.rpc.status import Failure, ServingFailure, refuse
from prefill_engine.vision.content_key import content_key
from prefill_engine.vision.embedding_cache import EmbeddingCache, Rows
from prefill_engine.vision.encode_call import MAX_INLINE_BYTES, EncodeCall, Encoded, Outcome
from prefill_engine.vision.flights import Flight, Flights, FlightState
from prefill_engine.vision.image_intake import examine
from prefill_engine.vision.plan import ImagePlan
from prefill_engine.vision.remembered import Remembered
from prefill_engine.vision.tickets import Ticket, Tickets
from prefill_plan.encoder_config import EncoderConfig
from prefill_plan.errors import ImageRejected
from prefill_plan.model_parts import VisionSpec

_HASHED_IN_LOOP_BYTES = 256 * 1024
_MAX_REMEMBERED = 10_000


class Observer(Protocol):
    """Counts and logs (ve_telemetry.py)."""

    def looked_up(self, result: str) -> None:
        """hit, miss, joined or rejected."""

    def item_ended(self, item: "Item", outcome: Outcome, *, seconds: float) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class Item:
    """One image of one caller. num_calls: RPCs that wait for it. arrived: of the loop's clock."""

    call: EncodeCall
    key: bytes
    plan: ImagePlan
    arrived: float
    outcome: "asyncio.Future[Outcome]"
    flight: Flight | None = None
    timer: asyncio.TimerHandle | None = None
    num_calls: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A call that is in order, and the identity of its rows."""

    call: EncodeCall
    plan: ImagePlan
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeDrainStatus:
    patches_left: int
    tickets_open: int
    done: bool


@dataclass(slots=True, kw_only=True)
class EncodeQueue:
    """vision_digest: of the tower; b"" until it is ready. flights: set right after; it reports to flight_ended."""

    config: EncoderConfig
    spec: VisionSpec
    cache: EmbeddingCache
    tickets: Tickets
    observer: Observer
    clock: Callable[[], float]
    vision_digest: bytes = b""
    drain: Drain = field(default_factory=Drain)
    is_lost: bool = False
    image_bytes: int = 0
    """Of all calls that wait: each RPC keeps its request in memory, also where calls share an image."""
    _flights: Flights | None = None
    _items: dict[bytes, Item] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _rejected: Remembered[Failure] = field(init=False)
    _cancelled: Remembered[bool] = field(init=False)

    def __post_init__(self) -> None:
        seconds = self.config.rows.rejected_seconds
        self._rejected = Remembered(seconds=seconds, max_entries=_MAX_REMEMBERED)
        self._cancelled = Remembered(seconds=60.0, max_entries=_MAX_REMEMBERED)

    @property
    def flights(self) -> Flights:
        assert self._flights is not None
        return self._flights

    @flights.setter
    def flights(self, flights: Flights) -> None:
        self._flights = flights

    @property
    def num_items(self) -> int:
        return len(self._items)

    async def prepare(self, call: EncodeCall) -> "Prepared":
        """Everything about a call that does not depend on the queue: its plan and its key.

        Raises:
            ServingFailure: refused; the reason and a message with the values.
        """
        self._check_open()
        try:
            plan = examine(call.data, policy=call.policy, final=call.final, spec=self.spec).plan
        except ImageRejected as error:
            raise ServingFailure(Failure(reason=error.reason, public_message=error.message)) from None
        if call.tokens and call.tokens != plan.tokens:
            text = (
                f"image of final size {plan.width}x{plan.height} has {plan.tokens} tokens, {call.tokens} were declared"
            )
            refuse("IMAGE_TOKEN_MISMATCH", f"{text}; not encoded")
        if len(call.data) > _HASHED_IN_LOOP_BYTES:
            image_sha256 = await asyncio.to_thread(_sha256, call.data)
        else:
            image_sha256 = _sha256(call.data)
        key = content_key(
            image_sha256,
            final_width=plan.width,
            final_height=plan.height,
            vision_digest=self.vision_digest,
            policy=call.policy,
            cache_scope=call.cache_scope,
        )
        if call.content_key and call.content_key != key:
            refuse("MODEL_MISMATCH", "content_key is not what this encoder computes for the image; nothing was encoded")
        return Prepared(call=call, plan=plan, key=key)

    def admit(self, prepared: "Prepared") -> Item:
        """Takes a call in, or joins it to what is there already. Give it back with `leave`.

        Raises:
            ServingFailure: refused; PATCH_QUEUE_FULL may be tried again.
        """
        call, key = prepared.call, prepared.key
        self._check_open()
        if self._cancelled.get(call.parent_attempt_id, now=self.clock()):
            refuse("CALLER_CANCELLED", "the attempt that this image is for was cancelled")
        running = self._items.get(call.item_id)
        if running is not None:
            _check_same(running.key, key)
            running.num_calls += 1
            return running
        item = Item(
            call=call,
            key=key,
            plan=prepared.plan,
            arrived=self.clock(),
            outcome=asyncio.get_running_loop().create_future(),
        )
        held = self.tickets.of_item(call.item_id)
        if held is not None:
            _check_same(held.rows.key, key)
            self.tickets.renew(held.ticket_id, call.hold_seconds)
            item.outcome.set_result(_from_cache(held.rows, ticket=held))
            return item
        self._look_up(item)
        return item

    def leave(self, item: Item) -> None:
        """A call for the item is over, however it ended. The last one that goes cancels what has not ended."""
        item.num_calls -= 1
        if not item.num_calls and not item.outcome.done():
            self._answer(item, Failure(reason="CALLER_CANCELLED", public_message="the caller left", phase="IMAGES"))

    def release(self, ticket_id: bytes) -> bool:
        """Ack: the caller has the rows, or gave up. False: its hold had ended."""
        released = self.tickets.release(ticket_id)
        self._wake()
        return released

    def cancel(self, *, item_id: bytes, parent_attempt_id: bytes) -> tuple[int, bool]:
        """Ends items and frees tickets of an item, or of all items of an attempt, also of those that are still to come.

        Returns:
            How many, and whether none of them is in the encoder.
        """
        found = [
            item
            for item in self._items.values()
            if item.call.item_id == item_id or (parent_attempt_id and item.call.parent_attempt_id == parent_attempt_id)
        ]
        is_drained = not any(item.flight and item.flight.state is FlightState.ENCODING for item in found)
        for item in found:
            self._answer(item, Failure(reason="CALLER_CANCELLED", public_message="cancelled", phase="IMAGES"))
        freed = self.tickets.release_of(item_id=item_id, parent_attempt_id=parent_attempt_id)
        if parent_attempt_id:
            self._cancelled.put(parent_attempt_id, True, now=self.clock())
        self._wake()
        return len(found) + freed, is_drained

    def begin_drain(self, seconds: float) -> None:
        """No new images from now on; what is here is finished, for at most `seconds` (C43)."""
        deadline = self.drain.begin(now=self.clock(), seconds=seconds, finish_queued=True)
        self.tickets.end_by(deadline)
        self._wake()

    def drain_status(self) -> EncodeDrainStatus:
        return EncodeDrainStatus(
            patches_left=self.flights.patches,
            tickets_open=self.tickets.num_open,
            done=self.drain.is_draining and not self._items and not self.tickets.num_open,
        )

    def tick(self) -> None:
        """Ends holds and the drain when their time is over."""
        if self.tickets.expire():
            self._wake()
        if self.drain.is_over(self.clock()):
            self._fail_all(Failure(reason="DRAINING", public_message=_DRAINED, phase="IMAGES"))

    def lose_encoder(self) -> None:
        """Nothing here can be finished any more."""
        self.is_lost = True
        self._fail_all(Failure(reason="RANK_LOST", public_message="the encoder process was lost", phase="IMAGES"))

    def flight_ended(self, flight: Flight, failure: Failure | None) -> None:
        """Answers everyone who waits for it."""
        if failure is not None and failure.reason == "IMAGE_REJECTED":
            self._rejected.put(flight.key, failure, now=self.clock())
        for item in [item for item in self._items.values() if item.flight is flight]:
            self._answer(item, failure or self._encoded(item, flight.rows, flight=flight))
        self._wake()

    async def changed(self) -> None:
        """Returns when there may be room again, or something ended."""
        await self._changed.wait()

    def _check_open(self) -> None:
        if self.drain.is_draining:
            refuse("DRAINING", "this encoder drains and takes no new images")
        if self.is_lost:
            refuse("RANK_LOST", "the encoder process was lost")

    def _look_up(self, item: Item) -> None:
        """Cache, then a flight that is there, then a new one."""
        call, key = item.call, item.key
        rejected = self._rejected.get(key, now=self.clock())
        if rejected is not None:
            self.observer.looked_up("rejected")
            raise ServingFailure(replace(rejected, phase="ADMISSION"))
        rows = self.cache.find(key)
        if rows is not None:
            self.observer.looked_up("hit")
            self._answer(item, self._encoded(item, rows, flight=None))
            self.cache.unpin(rows)
            return
        limits, num_bytes = self.config.queue, len(call.data)
        if len(self._items) >= limits.max_calls:
            raise self.flights.full(f"{len(self._items)} calls wait here, limit {limits.max_calls}")
        if self.image_bytes + num_bytes > limits.max_image_bytes:
            what = f"{self.image_bytes} bytes of images wait here, limit {limits.max_image_bytes}"
            raise self.flights.full(f"{what}, the image has {num_bytes}")
        flight = self.flights.find(key)
        self.observer.looked_up("miss" if flight is None else "joined")
        if flight is None:
            deadline = self.clock() + self.config.image_seconds
            flight = self.flights.open(
                key, data=call.data, policy=call.policy, final=call.final, plan=item.plan, deadline=deadline
            )
        flight.num_waiting += 1
        item.flight = flight
        item.timer = asyncio.get_running_loop().call_at(call.deadline, self._time_out, item)
        self._items[call.item_id] = item
        self.image_bytes += num_bytes

    def _encoded(self, item: Item, rows: Rows, *, flight: Flight | None) -> Encoded:
        """Rows as the item asked for them: inline, or held by a ticket of its own."""
        call = item.call
        if call.inline and rows.region.length <= MAX_INLINE_BYTES:
            inline = self.cache.slab.read(rows.region, offset=0, num_bytes=rows.region.length)
            encoded = _from_cache(rows, inline_rows=inline)
        else:
            self.cache.pin(rows)
            ticket = self.tickets.open(
                rows,
                item_id=call.item_id,
                parent_attempt_id=call.parent_attempt_id,
                hold_seconds=call.hold_seconds,
            )
            encoded = _from_cache(rows, ticket=ticket)
        if flight is None:
            return encoded
        waited = max(0.0, flight.sent_at - item.arrived)
        return replace(
            encoded,
            from_cache=False,
            queued_seconds=max(0.0, waited - flight.decode_seconds),
            preprocess_seconds=flight.decode_seconds,
            gpu_seconds=flight.gpu_seconds,
        )

    def _answer(self, item: Item, outcome: Outcome) -> None:
        """The end of an item; takes it out of everything."""
        if item.timer is not None:
            item.timer.cancel()
        if self._items.pop(item.call.item_id, None) is not None:
            self.image_bytes -= len(item.call.data)
        flight, item.flight = item.flight, None
        item.outcome.set_result(outcome)
        self.observer.item_ended(item, outcome, seconds=self.clock() - item.arrived)
        if flight is not None and flight.state is not FlightState.ENDED:
            self.flights.leave(flight)

    def _time_out(self, item: Item) -> None:
        waited = self.clock() - item.arrived
        state = item.flight.state.name.lower() if item.flight is not None else "queued"
        text = f"image was not encoded in the {waited:.3f} s it had; it was {state}"
        self._answer(item, Failure(reason="ENCODER_TIMEOUT", public_message=text, phase="IMAGES"))
        self._wake()

    def _fail_all(self, failure: Failure) -> None:
        for item in list(self._items.values()):
            self._answer(item, failure)
        self.flights.fail_all(failure)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


_DRAINED = "this encoder ends and could not finish the image in time"


def _from_cache(rows: Rows, *, ticket: Ticket | None = None, inline_rows: bytes = b"") -> Encoded:
    return Encoded(
        rows=rows,
        ticket=ticket,
        inline_rows=inline_rows,
        from_cache=True,
        queued_seconds=0.0,
        preprocess_seconds=0.0,
        gpu_seconds=0.0,
    )


def _check_same(known: bytes, asked: bytes) -> None:
    if known != asked:
        refuse("IDEMPOTENCY_CONFLICT", "this item_id was used for another image, policy or tenant; not encoded")


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
