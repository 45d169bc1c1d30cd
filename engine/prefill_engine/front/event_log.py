"""The events of one attempt and the cursors of the streams that read them (serving.md 1.1 "Streaming").

A number is given to an event when the fastest stream takes it; until then a newer progress event replaces an older one of its
kind (each layer group of a hit is a kind of its own: there are four, and each has its time). So a slow reader sees fewer events
but never a gap, and Attach(after_seq) is exact. The trap: what has a number is never changed or dropped again, because another
stream may have seen it.
"""

from dataclasses import dataclass

from prefill_engine.front.events import Body, ChunkDone, Event, Queued, StoreState, SwapIn

MAX_LAG_EVENTS = 256
# Beyond this many events, progress is thinned to one per second and kind, so that a long wait cannot fill the memory.
_THIN_AFTER_EVENTS = 1024
_THIN_GAP_SECONDS = 1.0
_Kind = tuple[type, int]
"""What a newer event must share to replace an older one."""
_PROGRESS = (Queued, SwapIn, ChunkDone, StoreState)


@dataclass(slots=True)
class Cursor:
    """Position of one stream: the next event it gets has seq `taken` + 1. joined_at: numbered events when it joined."""

    taken: int
    joined_at: int


class EventLog:
    """Owner of one attempt's events."""

    def __init__(self, *, progress_gap_seconds: float) -> None:
        self._gap = progress_gap_seconds
        self._newest = 0.0
        self._numbered: list[Event] = []
        self._pending: list[tuple[float, Body]] = []
        self._held: dict[_Kind, tuple[float, Body]] = {}
        self._last_progress: dict[_Kind, float] = {}

    def append(self, body: Body, *, since_accept_seconds: float) -> None:
        """Adds an event. A progress event replaces an unnumbered one of its kind, and waits while its kind's gap runs."""
        # The rank and the front stamp events, each at its own moment; a stream shows time going forward only.
        self._newest = max(self._newest, since_accept_seconds)
        entry = (self._newest, body)
        kind = _kind(body)
        if not isinstance(body, _PROGRESS):
            for held_kind, held in list(self._held.items()):
                self._put_progress(held_kind, held)
            self._pending.append(entry)
            return
        gap = max(self._gap, _THIN_GAP_SECONDS if len(self._numbered) >= _THIN_AFTER_EVENTS else 0.0)
        if since_accept_seconds - self._last_progress.get(kind, -gap) < gap:
            self._held[kind] = entry
        else:
            self._put_progress(kind, entry)

    def join(self, *, after_seq: int) -> Cursor:
        """A new reader that has seen the events up to after_seq.

        Raises:
            ValueError: after_seq lies beyond the last numbered event.
        """
        if after_seq > len(self._numbered):
            raise ValueError(f"after_seq {after_seq}, but only {len(self._numbered)} events were sent")
        return Cursor(taken=after_seq, joined_at=len(self._numbered))

    def take(self, cursor: Cursor) -> Event | None:
        """The reader's next event, numbered now if it is the first to take it; None when it has seen all."""
        if cursor.taken == len(self._numbered):
            if not self._pending:
                return None
            since, body = self._pending.pop(0)
            self._numbered.append(Event(seq=cursor.taken + 1, since_accept_seconds=since, body=body))
        event = self._numbered[cursor.taken]
        cursor.taken += 1
        return event

    def has_overrun(self, cursor: Cursor) -> bool:
        """True when faster streams are more than 256 events ahead of this one; what was there when it joined does not count."""
        return len(self._numbered) - max(cursor.taken, cursor.joined_at) > MAX_LAG_EVENTS

    def _put_progress(self, kind: _Kind, entry: tuple[float, Body]) -> None:
        self._held.pop(kind, None)
        self._last_progress[kind] = entry[0]
        self._pending = [old for old in self._pending if _kind(old[1]) != kind]
        self._pending.append(entry)


def _kind(body: Body) -> _Kind:
    return type(body), body.layers_ready if isinstance(body, SwapIn) else 0
