"""Lifecycle: the one writer of attempts and tickets. Every call runs to its end without waiting, so each is atomic.

In: validated calls, rank messages, cancels, hand-off changes, time. Out: messages to ranks (`send`), events in the attempts'
logs, and the observer's account of finished attempts. The trap: each attempt must end in exactly one Cancel or Release (or the
rank's own end), else the rank holds its memory for ever; `_stop` and `handoff_changed` are the only places that send them.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from prefill_engine.front.attempt import Attempt, Progress
from prefill_engine.front.attempts import Attempts
from prefill_engine.front.binding import RankQueue, choose_rank, queue_refusal
from prefill_engine.front.call import PrefillCall
from prefill_engine.front.drain import Drain, DrainStatus
from prefill_engine.front.event_log import EventLog
from prefill_engine.front.grants import CallKind, Effect, Grants, SinkAnswer, SinkCall
from prefill_engine.front.tickets import Ticket, Tickets, TicketState
from prefill_engine.messages import (
    AttemptFailed,
    Cancel,
    PushReport,
    Release,
    Released,
    Resolved,
    StoreProgress,
    ToRank,
)
from prefill_engine.rpc.status import Failure, ServingFailure
from prefill_plan.config import ServerConfig

AttemptMessage = Progress | AttemptFailed | Released | PushReport


_ABANDON_GRACE_SECONDS = 1.0
"""After a drain's end: time for the decode peers that were pushed to to hear of it."""


class Observer(Protocol):
    """Who counts and logs."""

    def attempt_admitted(self, attempt: Attempt) -> None: ...
    def attempt_accepted(self, attempt: Attempt, message: Resolved) -> None: ...
    def attempt_finished(self, attempt: Attempt) -> None: ...
    def ticket_ended(self, ticket: Ticket) -> None: ...


class Lifecycle:
    """Owner of the life of every attempt. clock: monotonic seconds. new_id: 16 random bytes. wait_of: rank -> predicted wait.
    call_sink: starts a call to a decode peer that is pushed to (with the ticket, for an offer); answered by sink_answered."""

    def __init__(
        self,
        *,
        limits: ServerConfig,
        ranks: Sequence[int],
        attempts: Attempts,
        tickets: Tickets,
        send: Callable[[int, ToRank], None],
        clock: Callable[[], float],
        new_id: Callable[[], bytes],
        wait_of: Callable[[int], float],
        observer: Observer,
        call_sink: Callable[[SinkCall, Ticket | None], None],
    ) -> None:
        self.attempts = attempts
        self.tickets = tickets
        self.grants = Grants()
        self.drain = Drain()
        self._limits = limits
        self._ranks = list(ranks)
        self._send = send
        self._clock = clock
        self.new_id = new_id
        self._wait_of = wait_of
        self._observer = observer
        self._call_sink = call_sink
        self._timers: list[tuple[float, bytes]] = []

    def submit(self, call: PrefillCall, *, deadline: float) -> tuple[Attempt, bool]:
        """Admits a call and hands it to a rank, or joins the attempt that it repeats (then the bool is True).

        Args:
            deadline: monotonic seconds, inf = none. A joiner can only extend the attempt's deadline.

        Raises:
            ServingFailure: conflict, superseded, cancelled before, draining, rank lost, queue full, tenant quota.
        """
        now = self._clock()
        known = self.attempts.known(call, now=now)
        if known is not None:
            known.deadline = max(known.deadline, deadline)
            self._watch_timer(known)
            return known, True
        if self.drain.is_draining:
            raise ServingFailure(Failure(reason="DRAINING", public_message="this engine drains and takes no new work"))
        if not self._ranks:
            raise ServingFailure(Failure(reason="RANK_LOST", public_message="this engine has lost a rank and ends"))
        for lower in self.attempts.lower_than(call):
            text = f"attempt {call.attempt} of this request replaced attempt {lower.call.attempt}"
            self._stop(lower, lower.failure("ATTEMPT_SUPERSEDED", text))
        queue = choose_rank(self._queues(call.fairness_key))
        refusal = queue_refusal(queue, self._limits, wait_seconds=self._wait_of(queue.rank))
        if refusal is not None:
            raise ServingFailure(refusal)
        attempt = Attempt(
            call=dataclasses.replace(call, tokens=b"", sources=()),
            image_sources=call.sources,
            rank=queue.rank,
            arrival=now,
            deadline=deadline,
            log=EventLog(progress_gap_seconds=call.progress_gap_seconds),
            rows_left=call.num_tokens - (call.offered_hit or 0),
            store_done=call.store == "skip",
        )
        self.attempts.add(attempt)
        self._watch_timer(attempt)
        if call.push is not None:
            key = (call.request_id, call.attempt, call.attempt_id)
            self.grants.open(call.push, key=key, kv_tokens=call.num_tokens, rank=queue.rank, now=now)
        self._send(queue.rank, call.submit_message(arrival_ns=round(now * 1e9)))
        self._observer.attempt_admitted(attempt)
        return attempt, False

    def apply(self, message: AttemptMessage) -> None:
        """Takes in a rank's message about an attempt. Late ones of ended attempts change nothing but `released`."""
        if isinstance(message, PushReport):
            self._push_reported(message)
            return
        attempt = self.attempts.find(message.attempt_id)
        if attempt is None:
            return
        match message:
            case Released():
                attempt.released = True
            case AttemptFailed() if attempt.is_live:
                failure = Failure(
                    reason=message.reason,
                    retry=message.retry,
                    phase=message.phase,
                    public_message=message.public_message,
                    operator_detail=message.operator_detail,
                    rows_computed=message.rows_computed,
                )
                self._end(attempt, failure)
            case AttemptFailed():
                pass
            case _ if attempt.is_live:
                self._progress(attempt, message)
            case _:
                return
        attempt.notify()

    def cancel(self, attempt_id: bytes) -> str:
        """Name of a CancelResponse.Result. Idempotent; an unknown id leaves a tombstone."""
        attempt = self.attempts.find(attempt_id)
        if attempt is None:
            self.attempts.bury(attempt_id, now=self._clock())
            return "UNKNOWN"
        if not attempt.is_live:
            cancelled = isinstance(attempt.outcome, Failure) and attempt.outcome.reason == "CALLER_CANCELLED"
            return "CANCELLED" if cancelled else "ALREADY_FINISHED"
        if attempt.is_claimed:
            return "TOO_LATE_TICKET_CLAIMED"
        self._stop(attempt, attempt.failure("CALLER_CANCELLED", "cancelled by its caller"))
        return "CANCELLED"

    def fail(self, attempt: Attempt, failure: Failure) -> None:
        """Ends a living attempt for a reason that its rank does not know, as an image that can't be had."""
        if attempt.is_live:
            self._stop(attempt, failure)

    def stream_lost(self, attempt: Attempt) -> None:
        """A stream of the attempt broke. The last one before a claim cancels it; after a claim it changes nothing (C41)."""
        if attempt.streams == 0 and attempt.is_live and not attempt.is_claimed:
            self._stop(attempt, attempt.failure("CALLER_CANCELLED", "the last stream of the attempt broke"))

    def handoff_changed(self, ticket: Ticket) -> None:
        """The ticket's state changed: tell the streams; an ended hand-off lets the rank free its part."""
        if not ticket.is_open:
            self._observer.ticket_ended(ticket)
            self._close_grant(ticket.attempt_id, delivered=ticket.state is TicketState.DELIVERED)
        attempt = self.attempts.find(ticket.attempt_id)
        if attempt is None or not attempt.is_live:
            return
        attempt.show_handoff(ticket, now=self._clock())
        if not ticket.is_open:
            self._send(attempt.rank, Release(attempt_id=ticket.attempt_id))
        self._finish_if_complete(attempt)
        attempt.notify()

    def sink_answered(self, call: SinkCall, answer: SinkAnswer) -> None:
        """A decode peer that is pushed to has answered, or has not in time."""
        now = self._clock()
        effect = self.grants.answer(call, answer, now=now)
        if effect is Effect.DELIVERED:
            ticket = self._ticket_of(call.grant.attempt_id)
            if ticket is not None and ticket.is_open:
                self.tickets.end_push(ticket, delivered=True, now=now)
                self.handoff_changed(ticket)
        elif effect is Effect.LOST:
            what = f"the decode peer no longer takes the push: {call.grant.detail or 'no answer'}"
            self._push_lost(call.grant.attempt_id, reason="DECODE_ABORTED", detail=what)

    def tick(self) -> None:
        """Fires what is due: deadlines, leases, the drain's end. Call at least every 20 ms."""
        now = self._clock()
        while self._timers and self._timers[0][0] <= now:
            _, attempt_id = heapq.heappop(self._timers)
            attempt = self.attempts.find(attempt_id)
            if attempt is not None and attempt.due() <= now:
                self._stop(attempt, attempt.timeout())
            elif attempt is not None:
                self._watch_timer(attempt)
        for ticket in self.tickets.expire_due(now=now):
            self.handoff_changed(ticket)
        for call in self.grants.due(now):
            self._start_sink_call(call, now)
        if self.drain.is_over(now):
            for attempt in self.attempts.live():
                self._stop(attempt, attempt.failure("DRAINING", "the engine's drain ended before the attempt did"))
        self.attempts.prune(now=now)

    def lose_rank(self, rank: int) -> None:
        """A rank process died: all that it had is answered UNAVAILABLE/RANK_LOST and nothing waits for it any more (C46)."""
        for attempt in self.attempts.live():
            if attempt.rank == rank:
                attempt.released = True
                self._end(attempt, attempt.failure("RANK_LOST", "a rank of this engine died; its work is lost"))
                attempt.notify()
        for attempt in self.attempts.unreleased():
            if attempt.rank == rank:
                attempt.released = True
                attempt.notify()
        self._ranks = [other for other in self._ranks if other != rank]

    def begin_drain(self, *, seconds: float, finish_queued: bool) -> None:
        """Starts or shortens the drain: leases are capped at its end; unless finish_queued, what waits is sent back."""
        end = self.drain.begin(now=self._clock(), seconds=seconds, finish_queued=finish_queued)
        self.tickets.cap_expiry(end)
        if self.drain.finish_queued:
            return
        for attempt in self.attempts.live():
            if not attempt.has_started:
                self.drain.sent_back += 1
                self._stop(attempt, attempt.failure("DRAINING", "this engine drains; the attempt had not started"))

    def drain_status(self) -> DrainStatus:
        """What is left; done when nothing is, so that the process may be ended."""
        live = self.attempts.live()
        running = sum(1 for attempt in live if attempt.has_started)
        tickets_open = len(self.tickets.open_tickets())
        return DrainStatus(
            running=running,
            waiting=len(live) - running,
            tickets_open=tickets_open,
            done=self.drain.is_draining
            and not live
            and tickets_open == 0
            and self.tickets.num_reads == 0
            and (self.grants.num_open == 0 or self.drain.is_over(self._clock() - _ABANDON_GRACE_SECONDS)),
            sent_back=self.drain.sent_back,
        )

    def can_admit(self, fairness_key: str) -> bool:
        """Whether a new attempt of this fairness key would be queued now."""
        queues = self._queues(fairness_key)
        return bool(queues) and queue_refusal(choose_rank(queues), self._limits, wait_seconds=0.0) is None

    def _progress(self, attempt: Attempt, message: Progress) -> None:
        if isinstance(message, Resolved):
            compute_seconds = message.predicted_finish_seconds - message.predicted_wait_seconds
            target = attempt.call.ttft_target_seconds
            if target is not None and compute_seconds > target:
                text = (
                    f"computing alone takes {compute_seconds:.3f} s, the target is {target:.3f} s; nothing was computed"
                )
                self._stop(attempt, attempt.failure("BUDGET_IMPOSSIBLE", text))
                return
            self._observer.attempt_accepted(attempt, message)
        attempt.apply(message)
        required = attempt.call.store == "required" or attempt.call.mode == "store_only"
        if isinstance(message, StoreProgress) and required and message.failed > 0:
            text = f"{message.failed} of {message.total} blocks could not be stored, and the store was required"
            self._stop(attempt, attempt.failure("STORE_WRITE_FAILED", text))
            return
        if attempt.needs_ticket:
            self._offer(attempt)
        self._finish_if_complete(attempt)

    def _offer(self, attempt: Attempt) -> None:
        assert attempt.computed is not None
        now = self._clock()
        ticket = self.tickets.offer(
            ids=(self.new_id(), self.new_id()),
            attempt_id=attempt.call.attempt_id,
            rank=attempt.rank,
            kv_tokens=attempt.computed.kv_tokens,
            regions=attempt.computed.regions,
            first_token=attempt.first_token,
            ttl_seconds=attempt.call.ticket_ttl_seconds,
            now=now,
            mode=attempt.call.mode,
            stored_block_keys=attempt.computed.stored_block_keys,
        )
        attempt.open_handoff(ticket, now=now)
        self.grants.offerable(attempt.call.attempt_id)

    def _push_reported(self, message: PushReport) -> None:
        grant = self.grants.find(message.attempt_id)
        ticket = self._ticket_of(message.attempt_id)
        if grant is not None and message.state == "landed":
            self.grants.landed(message.attempt_id, message.checks)
            grant.num_bytes = message.num_bytes
            if ticket is not None:
                ticket.bytes_read = message.num_bytes
        elif message.state == "failed":
            self._push_lost(message.attempt_id, reason=message.reason, detail=message.detail)
        elif message.state == "drained":
            self.grants.drained(message.attempt_id)

    def _push_lost(self, attempt_id: bytes, *, reason: str, detail: str) -> None:
        """The push cannot be finished. Before the ticket that fails the attempt, after it the stream ends as C7 says."""
        attempt = self.attempts.find(attempt_id)
        if attempt is None or not attempt.is_live:
            self.grants.give_up(attempt_id)
        elif attempt.ticket is not None and attempt.ticket.is_open:
            self.tickets.end_push(attempt.ticket, delivered=False, now=self._clock())
            self.handoff_changed(attempt.ticket)
        elif attempt.ticket is not None:
            self.grants.give_up(attempt_id)
        else:
            text = "the decode peer could not be given the KV; nothing was handed over"
            failure = dataclasses.replace(attempt.failure(reason, text, detail=detail), phase="HANDOFF")
            self._stop(attempt, failure)

    def _start_sink_call(self, call: SinkCall, now: float) -> None:
        ticket = self._ticket_of(call.grant.attempt_id)
        if call.kind is CallKind.OFFER and ticket is not None:
            self.tickets.begin_push_offer(ticket, engine_id=call.grant.plan.engine_id, now=now)
            ticket.bytes_read = call.grant.num_bytes
            ticket.transport = call.grant.plan.regions[0].transport
        self._call_sink(call, ticket)

    def _ticket_of(self, attempt_id: bytes) -> Ticket | None:
        attempt = self.attempts.find(attempt_id)
        return attempt.ticket if attempt is not None else None

    def _close_grant(self, attempt_id: bytes, *, delivered: bool) -> None:
        if delivered:
            self.grants.deliver(attempt_id)
        else:
            self.grants.give_up(attempt_id)

    def _stop(self, attempt: Attempt, failure: Failure) -> None:
        """Ends a living attempt from this side and tells its rank."""
        self._send(attempt.rank, Cancel(attempt_id=attempt.call.attempt_id))
        self._end(attempt, failure)
        attempt.notify()

    def _end(self, attempt: Attempt, failure: Failure) -> None:
        now = self._clock()
        if attempt.ticket is not None and attempt.ticket.is_open:
            self.tickets.abort(attempt.ticket.ticket_id, now=now)
            self._observer.ticket_ended(attempt.ticket)
        self._close_grant(attempt.call.attempt_id, delivered=False)
        attempt.fail(failure, now=now)
        self.attempts.settle(attempt)
        self._observer.attempt_finished(attempt)

    def _finish_if_complete(self, attempt: Attempt) -> None:
        if attempt.is_complete:
            attempt.complete(now=self._clock())
            self.attempts.settle(attempt)
            self._observer.attempt_finished(attempt)

    def _watch_timer(self, attempt: Attempt) -> None:
        due = attempt.due()
        if due < math.inf:
            heapq.heappush(self._timers, (due, attempt.call.attempt_id))

    def _queues(self, fairness_key: str) -> list[RankQueue]:
        live = self.attempts.live()
        queues = []
        for rank in self._ranks:
            mine = [attempt for attempt in live if attempt.rank == rank]
            waiting = [attempt for attempt in mine if not attempt.has_started]
            queues.append(
                RankQueue(
                    rank=rank,
                    outstanding_rows=sum(attempt.rows_left for attempt in mine),
                    waiting_requests=len(waiting),
                    waiting_rows=sum(attempt.rows_left for attempt in waiting),
                    tenant_rows=sum(a.rows_left for a in waiting if a.call.fairness_key == fairness_key),
                )
            )
        return queues
