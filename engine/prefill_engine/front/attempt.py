"""One attempt at the front, from submission to its outcome (serving.md 1.2, C41, C45). Plain state: no I/O, no clock.

    ADMISSION (hit unknown) -> QUEUE -> COMPUTE -> [STORE if required] -> HANDOFF -> outcome
Only lifecycle.py changes it. The trap: after an outcome is set the rank may still hold memory; `released` says when it does not.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from prefill_engine.front.call import PrefillCall
from prefill_engine.front.event_log import EventLog
from prefill_engine.front.events import (
    Accepted,
    Body,
    ChunkDone,
    Completed,
    FirstToken,
    HandoffState,
    ImageState,
    Queued,
    Stage,
    StoreState,
    SwapIn,
    Usage,
)
from prefill_engine.front.tickets import Ticket
from prefill_engine.messages import (
    ChunkFinished,
    Computed,
    FirstTokenReady,
    Resolved,
    Started,
    StoreProgress,
    SwappedIn,
    Waiting,
)
from prefill_engine.rpc.status import Failure
from prefill_engine.vision_client.image_source import ImageSource

# C41: our own timers fire this long before the deadline, so that the caller gets a reason instead of a bare status.
DEADLINE_MARGIN_SECONDS = 0.1

Progress = Resolved | Waiting | Started | SwappedIn | ChunkFinished | FirstTokenReady | Computed | StoreProgress
NO_STORE = StoreState(blocks_committed=0, blocks_total=0, blocks_failed=0, swa_published=())


@dataclass(slots=True, kw_only=True)
class Attempt:
    """Times are monotonic seconds. deadline: of the caller, inf = none. outcome: None while it lives."""

    call: PrefillCall
    rank: int
    arrival: float
    deadline: float
    log: EventLog
    phase: str = "ADMISSION"
    outcome: Completed | Failure | None = None
    finished: float = 0.0
    released: bool = False
    streams: int = 0
    rows_left: int = 0
    rows_done: int = 0
    accepted: Accepted | None = None
    first_token: FirstToken | None = None
    computed: Computed | None = None
    store: StoreState = NO_STORE
    store_done: bool = False
    ticket: Ticket | None = None
    handoff_shown: str = ""
    image_sources: tuple[ImageSource, ...] = ()
    """By index; emptied when it ends, since they hold pixels."""
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Phase name -> (start, end); a running phase ends at inf."""
    watchers: set[Callable[[], None]] = field(default_factory=set)
    """Called after each change; streams and cancels that wait."""

    @property
    def has_started(self) -> bool:
        """A row of it has entered a step."""
        return "COMPUTE" in self.stages

    @property
    def working_since(self) -> float | None:
        """Since when the rank has had rows of it that a step could take; None: it has none. One that has begun and waits for an
        image is no sign of a rank that stands still."""
        if not self.has_started or self.computed is not None:
            return None
        _, images_end = self.stages.get("IMAGES", (0.0, 0.0))
        return None if images_end == math.inf else max(self.stages["COMPUTE"][0], images_end)

    @property
    def is_live(self) -> bool:
        return self.outcome is None

    @property
    def is_claimed(self) -> bool:
        return self.ticket is not None and self.ticket.claimant is not None

    @property
    def needs_ticket(self) -> bool:
        """Everything is there that a ticket stands for (first token included; with store REQUIRED the commit too)."""
        has_token = self.first_token is not None or not self.call.sampling.sample
        # A store-only ticket stands for blocks that the peer will look for in the store.
        stored = self.store_done or (self.call.store != "required" and self.call.mode != "store_only")
        return self.computed is not None and self.call.handoff and self.ticket is None and has_token and stored

    @property
    def is_complete(self) -> bool:
        handed_over = not self.call.handoff or (self.ticket is not None and not self.ticket.is_open)
        return self.is_live and self.computed is not None and self.store_done and handed_over

    def due(self) -> float:
        """When its next timer fires. The deadline covers the work up to the ticket (or up to the last row without one)."""
        if not self.is_live or self.ticket is not None or (self.computed is not None and not self.call.handoff):
            return math.inf
        due = self.deadline - DEADLINE_MARGIN_SECONDS
        wait = self.call.max_queue_wait_seconds
        return due if wait is None or self.has_started else min(due, self.arrival + wait)

    def timeout(self) -> Failure:
        """What to answer when its timer fired."""
        if not self.has_started:
            return self.failure("QUEUE_WAIT_EXCEEDED", "no step took it up in time; it was still waiting")
        return self.failure("COMPUTE_DEADLINE", f"the deadline passed after {self.rows_done} computed rows")

    def failure(self, reason: str, message: str, *, detail: str = "") -> Failure:
        """A failure at this point of its life."""
        return Failure(
            reason=reason,
            phase=self.phase,
            public_message=message,
            operator_detail=detail,
            rows_computed=self.rows_done,
        )

    def emit(self, body: Body, *, now: float) -> None:
        self.log.append(body, since_accept_seconds=max(0.0, now - self.arrival))

    def notify(self) -> None:
        for wake in list(self.watchers):
            wake()

    def apply(self, message: Progress) -> None:
        """Takes in what the rank reports; the caller then looks at needs_ticket and is_complete."""
        at = message.at_ns * 1e-9
        match message:
            case Resolved():
                self._resolve(message, at)
            case Waiting():
                waiting_for = "SWAP_IN" if message.waiting_for == "swap_in" else "QUEUE"
                queued = Queued(
                    ahead_requests=message.ahead_requests, ahead_rows=message.ahead_rows, waiting_for=waiting_for
                )
                self.emit(queued, now=at)
            case Started():
                self._start(at)
            case SwappedIn():
                self.stages["SWAP_IN"] = (at - message.took_seconds, at)
                swap_in = SwapIn(
                    layers_ready=message.layers_ready,
                    layers_total=message.layers_total,
                    num_bytes=message.num_bytes,
                    hit_shrunk_to=max(0, message.hit_shrunk_to),
                )
                self.emit(swap_in, now=at)
            case ChunkFinished():
                self._finish_chunk(message, at)
            case FirstTokenReady():
                self.first_token = FirstToken(
                    token=message.token,
                    logprob=message.logprob,
                    alt_tokens=message.alt_tokens,
                    alt_logprobs=message.alt_logprobs,
                )
                self.emit(self.first_token, now=at)
            case Computed():
                self._compute_done(message, at)
            case StoreProgress():
                self._store_progress(message, at)

    def complete(self, *, now: float) -> None:
        """Ends it well: Completed is the last event."""
        assert self.computed is not None
        handoff = self.ticket.handoff_state() if self.ticket is not None else None
        usage = Usage(
            prompt_tokens=self.call.num_tokens,
            cached_tokens=self.computed.cached_tokens,
            computed_tokens=self.computed.computed_tokens,
            replayed_tokens=self.computed.replayed_tokens,
            image_tokens=self.computed.image_tokens,
            kv_bytes_moved=handoff.bytes_done if handoff is not None else 0,
            already_cached_tokens=self.call.push.already_cached_tokens if self.call.push is not None else 0,
        )
        timeline = self.timeline(now=now) if self.call.wants_timeline else ()
        completed = Completed(usage=usage, timeline=timeline, handoff=handoff, store=self.store)
        self.phase = "SETTLED"
        self.emit(completed, now=now)
        self._end(completed, now)

    def fail(self, failure: Failure, *, now: float) -> None:
        """Ends it with a failure; its events stop where they are."""
        self._end(failure, now)

    def show_handoff(self, ticket: Ticket, *, now: float) -> None:
        """Tells the streams of a new hand-off state, once per state."""
        if self.is_live and self.handoff_shown != ticket.state.value:
            self.handoff_shown = ticket.state.value
            state: HandoffState = ticket.handoff_state()
            self.emit(state, now=now)
        if not ticket.is_open:
            self._close_stage("HANDOFF", now)

    def open_handoff(self, ticket: Ticket, *, now: float) -> None:
        self.ticket = ticket
        self.phase = "HANDOFF"
        self.handoff_shown = ticket.state.value
        self.stages["HANDOFF"] = (now, math.inf)
        self.emit(ticket.offer(now), now=now)

    def begin_images(self, *, now: float) -> None:
        """Rows of images are asked for; once more when a hit shrinks."""
        start, _ = self.stages.get("IMAGES", (now, now))
        self.stages["IMAGES"] = (start, math.inf)

    def image_ready(self, index: int, *, rows: int, took_seconds: float, is_last: bool, now: float) -> None:
        """The rank was told where the rows of an image are. is_last: no other is waited for."""
        self.emit(ImageState(index=index, ready=True, rows=rows, took_seconds=took_seconds), now=now)
        if is_last:
            self._close_stage("IMAGES", now)

    def timeline(self, *, now: float) -> tuple[Stage, ...]:
        """Its phases in order of their start."""
        spans = sorted((start, min(end, now), phase) for phase, (start, end) in self.stages.items())
        return tuple(
            Stage(phase=phase, start_seconds=start - self.arrival, length_seconds=max(0.0, end - start))
            for start, end, phase in spans
        )

    def _resolve(self, message: Resolved, at: float) -> None:
        self.stages["ADMISSION"] = (self.arrival, at)
        self.stages["QUEUE"] = (at, math.inf)
        self.phase = "QUEUE"
        self.rows_left = message.compute_rows + message.replay_rows
        self.accepted = Accepted(
            dp_rank=self.rank,
            effective_hit=message.effective_hit,
            replay_rows=message.replay_rows,
            compute_rows=message.compute_rows,
            predicted_wait_seconds=message.predicted_wait_seconds,
            predicted_finish_seconds=message.predicted_finish_seconds,
        )
        self.emit(self.accepted, now=at)

    def _start(self, at: float) -> None:
        if not self.has_started:
            self._close_stage("QUEUE", at)
            self.phase = "COMPUTE"
            self.stages["COMPUTE"] = (at, math.inf)

    def _finish_chunk(self, message: ChunkFinished, at: float) -> None:
        self._start(at - message.step_seconds)
        self.rows_done = message.rows_done
        self.rows_left = max(0, message.rows_total - message.rows_done)
        done = ChunkDone(
            rows_done=message.rows_done,
            rows_total=message.rows_total,
            chunk_rows=message.chunk_rows,
            step_seconds=message.step_seconds,
            step_id=message.step_id,
        )
        self.emit(done, now=at)

    def _compute_done(self, message: Computed, at: float) -> None:
        self._start(at)
        self._close_stage("COMPUTE", at)
        self.computed = message
        self.rows_left = 0
        self.phase = "STORE"

    def _store_progress(self, message: StoreProgress, at: float) -> None:
        self.stages.setdefault("STORE", (at, math.inf))
        self.store = StoreState(
            blocks_committed=message.committed,
            blocks_total=message.total,
            blocks_failed=message.failed,
            swa_published=message.snapshots,
        )
        self.emit(self.store, now=at)
        if message.done:
            self.store_done = True
            self._close_stage("STORE", at)

    def _close_stage(self, phase: str, at: float) -> None:
        start, end = self.stages.get(phase, (at, math.inf))
        self.stages[phase] = (start, min(end, at))

    def _end(self, outcome: Completed | Failure, now: float) -> None:
        self.outcome = outcome
        self.finished = now
        self.rows_left = 0
        self.stages = {phase: (start, min(end, now)) for phase, (start, end) in self.stages.items()}
