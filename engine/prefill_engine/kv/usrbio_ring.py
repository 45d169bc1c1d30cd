"""A USRBIO ring and its two threads: one prepares and submits, one waits (kv.md 3.1).

Reads and writes of many threads meet here; each hands in batches and waits for them with a deadline of its own. The trap: a
completion may never come, or come after we gave up; the memory of such an IO stays its own until it does, so a batch that is
abandoned names what to do then.
"""

import errno
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefill_engine.kv.usrbio_library import Cqe, Ior, Iov, UsrbioLibrary

logger = logging.getLogger(__name__)

# Longest stay in a call that can't be interrupted; stopping a ring takes as long.
_WAIT_SECONDS = 0.1
_CQES_PER_WAIT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RingIo:
    """One contiguous transfer between a registered file and registered memory."""

    iov: Iov
    address: int
    fd: int
    offset: int
    num_bytes: int


class Batch:
    """IOs that one caller waits for. results: bytes or negative errors, in the order of the IOs, once it is complete."""

    def __init__(self, ios: Sequence[RingIo]) -> None:
        self.ios = tuple(ios)
        self.results = [0] * len(self.ios)
        self._num_left = len(self.ios)
        self._condition = threading.Condition()
        self._when_settled: Callable[[], None] | None = None

    @property
    def is_abandoned(self) -> bool:
        return self._when_settled is not None

    def complete(self, position: int, result: int) -> None:
        """Called by the ring's threads, once for each IO."""
        with self._condition:
            self.results[position] = result
            self._num_left -= 1
            if self._num_left:
                return
            when_settled = self._when_settled
            self._condition.notify_all()
        if when_settled is not None:
            when_settled()

    def wait(self, seconds: float | None) -> bool:
        """Whether it completed in time."""
        with self._condition:
            return self._condition.wait_for(lambda: self._num_left == 0, seconds)

    def abandon(self, when_settled: Callable[[], None]) -> bool:
        """Leaves the batch to itself; when_settled comes with its last completion, if ever. False: it is complete."""
        with self._condition:
            if self._num_left == 0:
                return False
            self._when_settled = when_settled
            return True


class UsrbioRing:
    """Made once per process and direction: 3FS leaks rings that have flags (kv.md 3.2)."""

    def __init__(self, library: UsrbioLibrary, mount: str, *, entries: int, for_read: bool, flags: int) -> None:
        """Raises OSError."""
        self._library = library
        self._ring: Ior = library.create_ring(mount, entries=entries, for_read=for_read, flags=flags)
        self._entries = entries
        self._batches: queue.SimpleQueue[Sequence[Batch] | None] = queue.SimpleQueue()
        self._condition = threading.Condition()
        # Userdata to IO; a number is never used twice, so a late completion finds its own batch or none.
        self._in_flight: dict[int, tuple[Batch, int]] = {}
        self._next_userdata = 1
        self._is_stopped = False
        kind = "read" if for_read else "write"
        self._submitter = threading.Thread(target=self._submit_batches, name=f"usrbio-{kind}-submit", daemon=True)
        self._waiter = threading.Thread(target=self._reap, name=f"usrbio-{kind}-wait", daemon=True)
        self._submitter.start()
        self._waiter.start()

    def start(self, ios: Sequence[RingIo]) -> Batch:
        """Hands the IOs to the submitting thread."""
        return self.start_together([ios])[0]

    def start_together(self, groups: Sequence[Sequence[RingIo]]) -> list[Batch]:
        """Batches that are waited for apart and submitted by one call, as far as the ring has room."""
        batches = [Batch(ios) for ios in groups]
        self._batches.put(batches)
        return batches

    def abandon(self, batch: Batch, when_settled: Callable[[], None]) -> bool:
        """As Batch.abandon; no IO of the batch is prepared after it."""
        with self._condition:
            return batch.abandon(when_settled)

    def close(self) -> bool:
        """Ends the threads; batches that are not prepared yet fail. False: IOs are still out; ring and memory must stay."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()
        self._batches.put(None)
        self._submitter.join()
        self._waiter.join()
        if self._in_flight:
            return False
        self._library.destroy_ring(self._ring)
        return True

    def _submit_batches(self) -> None:
        """Takes every batch that is there, prepares all their IOs, submits once."""
        while True:
            batches = self._batches.get()
            num_prepared = 0
            while batches is not None:
                for batch in batches:
                    for position in range(len(batch.ios)):
                        num_prepared = self._prepare(batch, position, num_prepared)
                if self._batches.empty():
                    break
                batches = self._batches.get()
            self._submit(num_prepared)
            if batches is None:
                return

    def _prepare(self, batch: Batch, position: int, num_prepared: int) -> int:
        """Puts one IO into the ring; while that is full, waits for completions. Returns how many IOs wait for a submit."""
        while (result := self._try_prepare(batch, position)) == -errno.EAGAIN:
            self._submit(num_prepared)
            num_prepared = 0
            with self._condition:
                self._condition.wait(_WAIT_SECONDS)
        if result >= 0:
            return num_prepared + 1
        batch.complete(position, result)
        return num_prepared

    def _try_prepare(self, batch: Batch, position: int) -> int:
        """As UsrbioLibrary.prepare; -ECANCELED where nobody waits for it any more."""
        io = batch.ios[position]
        with self._condition:
            if batch.is_abandoned or self._is_stopped:
                return -errno.ECANCELED
            if len(self._in_flight) >= self._entries:
                return -errno.EAGAIN
            userdata = self._next_userdata
            self._next_userdata += 1
            # Before the call: the daemon may be done before it returns.
            self._in_flight[userdata] = (batch, position)
            result = self._library.prepare(
                self._ring,
                io.iov,
                address=io.address,
                fd=io.fd,
                offset=io.offset,
                num_bytes=io.num_bytes,
                userdata=userdata,
            )
            if result < 0:
                del self._in_flight[userdata]
            else:
                self._condition.notify_all()
            return result

    def _submit(self, num_prepared: int) -> None:
        if num_prepared and (result := self._library.submit(self._ring)) < 0:
            # The daemon looks for prepared IOs by itself, too; whoever waits has a deadline.
            logger.warning("USRBIO submit failed", extra={"errno": -result, "num_ios": num_prepared})

    def _reap(self) -> None:
        cqes = (Cqe * _CQES_PER_WAIT)()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._in_flight or self._is_stopped)
                if self._is_stopped:
                    return
            count = self._library.wait(self._ring, cqes, timeout_seconds=_WAIT_SECONDS)
            if count < 0:
                logger.warning("USRBIO wait failed", extra={"errno": -count})
                with self._condition:
                    self._condition.wait_for(lambda: self._is_stopped, _WAIT_SECONDS)
                continue
            done = []
            with self._condition:
                for cqe in cqes[:count]:
                    entry = self._in_flight.pop(cqe.userdata or 0, None)
                    if entry is not None:
                        done.append((*entry, int(cqe.result)))
                self._condition.notify_all()
            for batch, position, result in done:
                batch.complete(position, result)
