"""A decode peer's memory while engines push into it: who may write, and when its pages are free again (serving.md 0 fact 5, 1.1).

    RESERVED -> ACCEPTED | QUARANTINED -> FREED
Plain state, no I/O. The trap: a lease that ran out, or an engine that gave up or died, only begins a quarantine. Its pages are
free when every key has been revoked, which our transport grants as soon as no write is in flight any more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prefill_engine.handoff_pieces import PieceRange, first_damaged

Revoke = Callable[[], bool]
"""Transport.accept's result: True = nothing can be written any more."""


class SinkState(StrEnum):
    RESERVED = "reserved"
    """Engines may write."""
    ACCEPTED = "accepted"
    """Complete and verified: the memory is the request's."""
    QUARANTINED = "quarantined"
    """Given up, but something may still be in flight into it."""
    FREED = "freed"


@dataclass(slots=True, kw_only=True)
class Room:
    """Memory of one component. offset: leading bytes of it that are not wanted. piece_bytes: how it is granted."""

    kind: int
    memory: bytearray
    offset: int
    piece_bytes: int
    pieces: tuple[PieceRange, ...]
    component_key: bytes = field(repr=False)


@dataclass(slots=True, kw_only=True)
class Reservation:
    """grant_id: a secret. expires: monotonic seconds. missing: pieces that have not come. revokes: of all granted pieces, while
    not all are revoked. is_drained: the engine says that nothing of its is in flight. ended: when it was given up, later when it
    was freed."""

    grant_id: bytes = field(repr=False)
    attempt_id: bytes
    kv_tokens: int
    rooms: Mapping[int, Room]
    ttl_seconds: float
    expires: float
    state: SinkState = SinkState.RESERVED
    missing: int = 0
    revokes: list[Revoke] = field(default_factory=list)
    first_token: int = -1
    is_drained: bool = False
    ended: float = 0.0

    @property
    def num_bytes(self) -> int:
        return sum(len(room.memory) for room in self.rooms.values())


@dataclass(slots=True)
class SinkGrants:
    """Owner of all reservations. keep_seconds: how long an ended one is remembered, so that late calls find it ended."""

    capacity_bytes: int
    keep_seconds: float = 600.0
    _by_id: dict[bytes, Reservation] = field(default_factory=dict)

    @property
    def free_bytes(self) -> int:
        """Quarantined memory is not free; accepted memory is the request's until `release`."""
        held = (SinkState.RESERVED, SinkState.QUARANTINED, SinkState.ACCEPTED)
        return self.capacity_bytes - sum(each.num_bytes for each in self._by_id.values() if each.state in held)

    def find(self, grant_id: bytes) -> Reservation | None:
        return self._by_id.get(grant_id)

    def of_attempt(self, attempt_id: bytes) -> Reservation | None:
        """The reservation that is open for an attempt: a repeated Reserve gets it again."""
        return next(
            (
                each
                for each in self._by_id.values()
                if each.attempt_id == attempt_id and each.state is SinkState.RESERVED
            ),
            None,
        )

    def add(self, reservation: Reservation) -> None:
        """The caller has seen to it that free_bytes suffices."""
        self._by_id[reservation.grant_id] = reservation

    def renew(self, grant_id: bytes, *, now: float) -> bool:
        """False: the reservation is over or unknown; a new one is not made."""
        each = self._by_id.get(grant_id)
        if each is None or each.state is not SinkState.RESERVED or now >= each.expires:
            return False
        each.expires = now + each.ttl_seconds
        return True

    def landed(self, reservation: Reservation) -> None:
        """One more piece is complete."""
        reservation.missing -= 1

    def offer(
        self,
        grant_id: bytes,
        *,
        attempt_id: bytes,
        checks: Mapping[int, bytes],
        kv_tokens: int,
        first_token: int,
        now: float,
    ) -> str:
        """Name of an OfferResponse.Verdict. Accepts only what is complete, in time and what the checksums say."""
        each = self._by_id.get(grant_id)
        if each is not None and each.state is SinkState.ACCEPTED:
            return "DUPLICATE"
        if each is None or each.state is not SinkState.RESERVED or now >= each.expires:
            return "REFUSED_EXPIRED"
        if (attempt_id, kv_tokens) != (each.attempt_id, each.kv_tokens):
            return "REFUSED_FORMAT"
        for kind, room in each.rooms.items():
            damaged = first_damaged(room.memory, checks.get(kind, b""), piece_bytes=room.piece_bytes)
            if each.missing or damaged is not None:
                return "REFUSED_CHECKSUM"
        each.state = SinkState.ACCEPTED
        each.first_token = first_token
        return "ACCEPTED"

    def abandon(self, grant_id: bytes, *, writes_drained: bool, now: float) -> bool:
        """The engine gave up; True = the pages are free. An accepted hand-over stays what it is.

        writes_drained is the engine's word that nothing of its is in flight. It is noted, not trusted: what frees is that our own
        transport has revoked every key, and a write that it still sees in flight keeps the pages.
        """
        each = self._by_id.get(grant_id)
        if each is None or each.state is SinkState.FREED:
            return True
        if each.state is SinkState.ACCEPTED:
            return False
        self._give_up(each, now)
        each.is_drained |= writes_drained
        is_free = self._is_revoked(each)
        if is_free:
            self._free(each, now)
        return is_free

    def sweep(self, *, now: float) -> list[Reservation]:
        """Ends what has run out, frees what is revoked, forgets what has long ended; returns the newly quarantined."""
        late = [each for each in self._by_id.values() if each.state is SinkState.RESERVED and now >= each.expires]
        for each in late:
            self._give_up(each, now)
        for each in list(self._by_id.values()):
            if each.state is SinkState.QUARANTINED and self._is_revoked(each):
                self._free(each, now)
            if each.state is SinkState.FREED and now - each.ended > self.keep_seconds:
                del self._by_id[each.grant_id]
        return late

    def is_stuck(self, *, now: float, seconds: float) -> bool:
        """Memory has been quarantined for longer than a write in flight may take: its engine is frozen or gone."""
        return any(each.state is SinkState.QUARANTINED and now - each.ended > seconds for each in self._by_id.values())

    def release(self, grant_id: bytes, *, now: float) -> None:
        """The request that an accepted hand-over belonged to has ended."""
        each = self._by_id.get(grant_id)
        if each is not None and each.state is SinkState.ACCEPTED:
            self._free(each, now)

    @staticmethod
    def _give_up(each: Reservation, now: float) -> None:
        if each.state is SinkState.RESERVED:
            each.state = SinkState.QUARANTINED
            each.ended = now

    @staticmethod
    def _is_revoked(each: Reservation) -> bool:
        each.revokes = [revoke for revoke in each.revokes if not revoke()]
        return not each.revokes

    @staticmethod
    def _free(each: Reservation, now: float) -> None:
        each.state = SinkState.FREED
        each.rooms = {}
        each.ended = now
