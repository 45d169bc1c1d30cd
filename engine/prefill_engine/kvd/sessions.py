"""Ranks that talk to kvd, and those that stopped: connected, ready, in grace (kv.md 7.5). Pure but for the clock it is given.

Owned by the Keeper. The trap: a broken stream does not mean that the rank is dead. A frozen or busy process may still write into
slots it reserved, so its slots go only when the grace is over and the kernel says the process is gone.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prefill_engine.kv.pool_memory import MAX_RANKS, PoolGeometry
from prefill_plan.errors import ConfigError

_MOST_ABANDONED = 1024
"""A frozen kvd finds as many calls as its ranks make in the time of one answer, a few dozen."""


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """connection: number of its latest stream. grace_until: None while connected."""

    owner_epoch: int
    engine_id: str
    rank: int
    echo_index: int
    geometry: PoolGeometry | None
    connection: int = 0
    is_ready: bool = False
    grace_until: float | None = None
    abandoned: "deque[int]" = field(default_factory=lambda: deque(maxlen=_MOST_ABANDONED))
    """Latest calls whose answer the rank waits for no more: they get nothing, should they still be under way."""


class Sessions:
    """is_alive: whether the process that wrote an echo field still maps the pool. clock: monotonic seconds."""

    def __init__(self, *, grace_seconds: float, is_alive: Callable[[int], bool], clock: Callable[[], float]) -> None:
        self._grace_seconds = grace_seconds
        self._is_alive = is_alive
        self._clock = clock
        self._by_owner: dict[int, Session] = {}
        self._num_connections = 0

    def __len__(self) -> int:
        return len(self._by_owner)

    @property
    def num_ready(self) -> int:
        return sum(session.is_ready for session in self._by_owner.values())

    def find(self, owner_epoch: int) -> Session | None:
        """The session if it is ready for calls."""
        session = self._by_owner.get(owner_epoch)
        return session if session is not None and session.is_ready else None

    def connect(self, *, owner_epoch: int, engine_id: str, rank: int, geometry: PoolGeometry) -> Session:
        """A rank's stream said hello; a session in grace comes back to life.

        Raises:
            ConfigError: no echo field is left.
        """
        session = self._by_owner.get(owner_epoch)
        if session is None:
            session = self._by_owner[owner_epoch] = Session(
                owner_epoch=owner_epoch,
                engine_id=engine_id,
                rank=rank,
                echo_index=self._free_echo(),
                geometry=geometry,
            )
        self._num_connections += 1
        session.connection = self._num_connections
        session.engine_id, session.rank, session.geometry = engine_id, rank, geometry
        session.is_ready, session.grace_until = False, None
        return session

    def restore(self, *, owner_epoch: int, echo_index: int) -> None:
        """An owner of leases in kvd's former life; it has the grace to come back."""
        if owner_epoch not in self._by_owner:
            self._by_owner[owner_epoch] = Session(
                owner_epoch=owner_epoch,
                engine_id="",
                rank=-1,
                echo_index=echo_index,
                geometry=None,
                grace_until=self._clock() + self._grace_seconds,
            )

    def disconnect(self, session: Session, connection: int) -> bool:
        """A stream ended; False = another one has taken its place."""
        if session.connection != connection or self._by_owner.get(session.owner_epoch) is not session:
            return False
        session.is_ready = False
        session.grace_until = self._clock() + self._grace_seconds
        return True

    def pop_dead(self) -> list[Session]:
        """Sessions whose grace is over and whose process is gone; they are forgotten."""
        now = self._clock()
        dead = [
            session
            for session in self._by_owner.values()
            if session.grace_until is not None and now >= session.grace_until and not self._is_alive(session.echo_index)
        ]
        for session in dead:
            del self._by_owner[session.owner_epoch]
        return dead

    def connected(self) -> Iterable[Session]:
        return [session for session in self._by_owner.values() if session.grace_until is None]

    def _free_echo(self) -> int:
        used = {session.echo_index for session in self._by_owner.values()}
        for index in range(MAX_RANKS):
            if index not in used and not self._is_alive(index):
                return index
        raise ConfigError(f"{len(self._by_owner)} sessions: expected at most {MAX_RANKS}; this one is refused")
