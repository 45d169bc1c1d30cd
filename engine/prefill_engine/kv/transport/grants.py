"""Which keys may be pushed into which memory. Owned by one transport, used on its loop.

The trap: a grant is used once, and what ends a write half-way leaves it open for another try until its owner revokes it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from prefill_engine.kv.transport.frame import check_key


@dataclass(slots=True, eq=False, kw_only=True)
class Grant:
    """stop: ends the write in flight and says whether nothing can be written any more; None = no write in flight."""

    key: bytes
    target: memoryview
    done: Callable[[], None]
    stop: Callable[[], bool] | None = None


class Grants:
    def __init__(self) -> None:
        self._open: dict[bytes, Grant] = {}

    def accept(self, key: bytes, target: memoryview, done: Callable[[], None]) -> Callable[[], bool]:
        """See Transport.accept. Raises ValueError for a key that has a grant, a bad key or a read-only target."""
        check_key(key)
        if target.readonly or key in self._open:
            raise ValueError(
                f"grant with a read-only target ({target.readonly}) or a key that has one already ({key in self._open})"
            )
        grant = Grant(key=key, target=target, done=done)
        self._open[key] = grant

        def revoke() -> bool:
            if self._open.get(key) is not grant:
                return grant.stop is None or grant.stop()
            if grant.stop is not None and not grant.stop():
                return False
            self._open.pop(key, None)
            return True

        return revoke

    def begin(self, key: bytes, stop: Callable[[], bool]) -> Grant | None:
        """The grant for this key, its write now in flight; None if there is none or another push is on it."""
        grant = self._open.get(key)
        if grant is None or grant.stop is not None:
            return None
        grant.stop = stop
        return grant

    def fail(self, grant: Grant) -> None:
        """The write ended half-way and nothing more comes."""
        grant.stop = None

    def finish(self, grant: Grant) -> None:
        """All bytes are there: tells the owner, once."""
        grant.stop = None
        if self._open.get(grant.key) is grant:
            del self._open[grant.key]
            grant.done()
