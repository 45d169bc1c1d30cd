"""A life cycle without sockets or time: a hand-moved clock, recorded messages to ranks, rank reports as one-liners."""

import itertools
import math
from dataclasses import dataclass, field

from prefill_engine.front.attempt import Attempt
from prefill_engine.front.attempts import Attempts
from prefill_engine.front.call import PrefillCall
from prefill_engine.front.events import Event
from prefill_engine.front.grants import SinkCall
from prefill_engine.front.lifecycle import Lifecycle
from prefill_engine.front.tickets import Ticket, Tickets
from prefill_engine.messages import (
    AttemptFailed,
    ChunkFinished,
    Computed,
    FirstTokenReady,
    Region,
    Released,
    Resolved,
    Sampling,
    Started,
    StoreProgress,
    ToRank,
    Waiting,
)
from prefill_engine.rpc.status import Failure
from prefill_plan.config import ServerConfig


def call_of(
    name: str = "a",
    *,
    request_id: str = "r",
    attempt: int = 1,
    digest: bytes = b"d",
    num_tokens: int = 300,
    store: str = "best_effort",
    handoff: bool = True,
    sample: bool = True,
    queue_wait: float | None = None,
    ttft_target: float | None = None,
    fairness_key: str = "tenant",
) -> PrefillCall:
    """A call whose attempt id is `name`."""
    return PrefillCall(
        request_id=request_id,
        attempt=attempt,
        attempt_id=name.encode(),
        digest=digest,
        tokens=b"\0" * 4 * num_tokens,
        num_tokens=num_tokens,
        images=(),
        cache_scope=b"",
        priority=2,
        fairness_key=fairness_key,
        weight=1,
        offered_hit=None,
        step_cap_ms=None,
        ttft_target_seconds=ttft_target,
        max_queue_wait_seconds=queue_wait,
        max_compute_rows=None,
        sampling=Sampling(sample=sample),
        handoff=handoff,
        ticket_ttl_seconds=None,
        store=store,
        progress_gap_seconds=0.0,
        wants_timeline=True,
    )


@dataclass(slots=True)
class Ledger:
    """An observer that keeps what it is told."""

    admitted: list[Attempt] = field(default_factory=list)
    finished: list[Attempt] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)

    def attempt_admitted(self, attempt: Attempt) -> None:
        self.admitted.append(attempt)

    def attempt_accepted(self, attempt: Attempt, message: Resolved) -> None:
        pass

    def attempt_finished(self, attempt: Attempt) -> None:
        self.finished.append(attempt)

    def ticket_ended(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)


class LifecycleRig:
    """One life cycle. `sent` holds (rank, message) in order; `now` moves only by hand."""

    def __init__(self, *, ranks: int = 1, limits: ServerConfig | None = None) -> None:
        self.now = 100.0
        self.sent: list[tuple[int, ToRank]] = []
        self.ledger = Ledger()
        self.sink_calls: list[tuple[SinkCall, Ticket | None]] = []
        ids = itertools.count()
        self.lifecycle = Lifecycle(
            limits=limits or ServerConfig(),
            ranks=range(ranks),
            attempts=Attempts(result_seconds=600.0),
            tickets=Tickets(ttl_seconds=30.0, max_seconds=600.0, keep_seconds=600.0),
            send=lambda rank, message: self.sent.append((rank, message)),
            clock=lambda: self.now,
            new_id=lambda: next(ids).to_bytes(16, "big"),
            wait_of=lambda _rank: 0.25,
            observer=self.ledger,
            call_sink=lambda call, ticket: self.sink_calls.append((call, ticket)),
        )

    def submit(self, call: PrefillCall | None = None, *, deadline: float = math.inf) -> Attempt:
        attempt, joined = self.lifecycle.submit(call or call_of(), deadline=deadline)
        if not joined:
            attempt.streams += 1
        return attempt

    def kinds_sent(self, name: str = "a") -> list[str]:
        """Types of the messages sent about one attempt."""
        return [type(m).__name__ for _, m in self.sent if getattr(m, "attempt_id", None) == name.encode()]

    def at_ns(self) -> int:
        return round(self.now * 1e9)

    def resolve(self, name: str = "a", *, rows: int = 300, compute_seconds: float = 0.5) -> None:
        self.lifecycle.apply(
            Resolved(
                attempt_id=name.encode(),
                effective_hit=0,
                replay_rows=0,
                compute_rows=rows,
                swa_source="none",
                predicted_wait_seconds=0.1,
                predicted_finish_seconds=0.1 + compute_seconds,
                at_ns=self.at_ns(),
            )
        )
        self.lifecycle.apply(
            Waiting(attempt_id=name.encode(), ahead_requests=0, ahead_rows=0, waiting_for="queue", at_ns=self.at_ns())
        )

    def start(self, name: str = "a") -> None:
        self.lifecycle.apply(Started(attempt_id=name.encode(), at_ns=self.at_ns()))

    def chunk(self, name: str = "a", *, done: int, total: int = 300) -> None:
        self.lifecycle.apply(
            ChunkFinished(
                attempt_id=name.encode(),
                rows_done=done,
                rows_total=total,
                chunk_rows=done,
                step_seconds=0.0,
                step_id=1,
                at_ns=self.at_ns(),
            )
        )

    def token(self, name: str = "a") -> None:
        self.lifecycle.apply(
            FirstTokenReady(
                attempt_id=name.encode(), token=7, logprob=0.0, alt_tokens=(), alt_logprobs=(), at_ns=self.at_ns()
            )
        )

    def computed(self, name: str = "a") -> None:
        self.lifecycle.apply(
            Computed(
                attempt_id=name.encode(),
                kv_tokens=300,
                regions=(Region(kind=1, num_bytes=10),),
                cached_tokens=0,
                computed_tokens=300,
                replayed_tokens=0,
                image_tokens=0,
                provenance=0,
                at_ns=self.at_ns(),
            )
        )

    def stored(self, name: str = "a", *, failed: int = 0, done: bool = True) -> None:
        self.lifecycle.apply(
            StoreProgress(
                attempt_id=name.encode(),
                committed=2 - failed,
                total=2,
                failed=failed,
                snapshots=(),
                done=done,
                at_ns=self.at_ns(),
            )
        )

    def failed(self, name: str = "a", *, reason: str = "KERNEL_FAULT") -> None:
        self.lifecycle.apply(
            AttemptFailed(
                attempt_id=name.encode(),
                reason=reason,
                retry="ONCE_THEN_FAIL",
                phase="COMPUTE",
                public_message="failed",
                operator_detail="",
                rows_computed=5,
                at_ns=self.at_ns(),
            )
        )

    def released(self, name: str = "a") -> None:
        self.lifecycle.apply(Released(attempt_id=name.encode(), at_ns=self.at_ns()))

    def run_to_ticket(self, name: str = "a") -> Ticket:
        """From submitted to an offered ticket."""
        self.resolve(name)
        self.start(name)
        self.chunk(name, done=300)
        self.token(name)
        self.computed(name)
        attempt = self.lifecycle.attempts.find(name.encode())
        assert attempt is not None
        assert attempt.ticket is not None
        return attempt.ticket

    def claim(self, ticket: Ticket) -> None:
        self.lifecycle.tickets.claim(ticket.ticket_id, engine_id="d1", epoch=1, claim_id=b"c1", now=self.now)
        self.lifecycle.handoff_changed(ticket)

    def settle(self, ticket: Ticket, *, delivered: bool = True) -> None:
        self.lifecycle.tickets.settle(ticket.ticket_id, claim_id=b"c1", delivered=delivered, now=self.now)
        self.lifecycle.handoff_changed(ticket)


def events_of(attempt: Attempt) -> list[Event]:
    """All events from seq 1, as a joining stream gets them."""
    cursor = attempt.log.join(after_seq=0)
    events = []
    while (event := attempt.log.take(cursor)) is not None:
        events.append(event)
    return events


def kinds_of(attempt: Attempt) -> list[str]:
    return [type(event.body).__name__ for event in events_of(attempt)]


def reason_of(attempt: Attempt) -> str:
    """Reason of its failure; "" when it lives or ended well."""
    return attempt.outcome.reason if isinstance(attempt.outcome, Failure) else ""
