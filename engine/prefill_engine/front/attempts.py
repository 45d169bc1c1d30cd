"""All attempts this engine knows: living ones, kept outcomes, tombstones of cancels that came first (serving.md 1.1 "Identity").

Same id and same content = join; same id and other content = conflict; a higher attempt of a request makes lower ones void.
"""

from collections.abc import Iterable

from prefill_engine.front.attempt import Attempt
from prefill_engine.front.call import PrefillCall
from prefill_engine.rpc.status import Failure, ServingFailure, refuse

TOMBSTONE_SECONDS = 60.0  # C45
MAX_KEPT_RESULTS = 100_000  # serving.md 1.1


class Attempts:
    """Owner of the attempt records. result_seconds: how long an outcome is kept for joiners."""

    def __init__(self, *, result_seconds: float) -> None:
        self._result_seconds = result_seconds
        self._live: dict[bytes, Attempt] = {}
        self._finished: dict[bytes, Attempt] = {}
        self._tombstones: dict[bytes, float] = {}
        self._by_request: dict[str, dict[bytes, Attempt]] = {}

    def find(self, attempt_id: bytes) -> Attempt | None:
        return self._live.get(attempt_id) or self._finished.get(attempt_id)

    def live(self) -> list[Attempt]:
        return list(self._live.values())

    def unreleased(self) -> Iterable[Attempt]:
        """Finished attempts whose rank still holds something."""
        return [attempt for attempt in self._finished.values() if not attempt.released]

    def known(self, call: PrefillCall, *, now: float) -> Attempt | None:
        """The attempt that this call repeats, None if it is new.

        Raises:
            ServingFailure: IDEMPOTENCY_CONFLICT (other content under this id, or another id under this attempt number),
                CALLER_CANCELLED (its cancel came first), ATTEMPT_SUPERSEDED (a higher attempt is already here).
        """
        attempt = self.find(call.attempt_id)
        if attempt is not None:
            if attempt.call.digest != call.digest:
                refuse(
                    "IDEMPOTENCY_CONFLICT", "this attempt id was used before with other content; the first one stands"
                )
            return attempt
        if now < self._tombstones.get(call.attempt_id, now):
            raise ServingFailure(
                Failure(reason="CALLER_CANCELLED", public_message="the attempt was cancelled before it came")
            )
        for other in self._by_request.get(call.request_id, {}).values():
            number = other.call.attempt
            if number > call.attempt:
                refuse("ATTEMPT_SUPERSEDED", f"attempt {number} of this request came before attempt {call.attempt}")
            if number == call.attempt and other.is_live:
                refuse("IDEMPOTENCY_CONFLICT", f"attempt {number} of this request runs under another attempt id")
        return None

    def lower_than(self, call: PrefillCall) -> list[Attempt]:
        """Living, unclaimed attempts that this call supersedes."""
        others = self._by_request.get(call.request_id, {}).values()
        return [
            other for other in others if other.is_live and not other.is_claimed and other.call.attempt < call.attempt
        ]

    def add(self, attempt: Attempt) -> None:
        self._live[attempt.call.attempt_id] = attempt
        self._by_request.setdefault(attempt.call.request_id, {})[attempt.call.attempt_id] = attempt

    def settle(self, attempt: Attempt) -> None:
        """Moves an attempt that has an outcome to the kept results."""
        self._live.pop(attempt.call.attempt_id, None)
        self._finished[attempt.call.attempt_id] = attempt

    def bury(self, attempt_id: bytes, *, now: float) -> None:
        """An unknown attempt was cancelled: it must not start within the next 60 s."""
        self._tombstones[attempt_id] = now + TOMBSTONE_SECONDS

    def prune(self, *, now: float) -> None:
        """Forgets tombstones and outcomes that are over; outcomes are kept in order of their end."""
        while self._tombstones:
            attempt_id, expiry = next(iter(self._tombstones.items()))
            if now < expiry:
                break
            del self._tombstones[attempt_id]
        while self._finished:
            attempt_id, attempt = next(iter(self._finished.items()))
            if len(self._finished) <= MAX_KEPT_RESULTS and now - attempt.finished < self._result_seconds:
                break
            del self._finished[attempt_id]
            siblings = self._by_request[attempt.call.request_id]
            del siblings[attempt_id]
            if not siblings:
                del self._by_request[attempt.call.request_id]
