"""Counts and logs what happens to attempts, tickets and ranks: the Observer of the life cycle.

One INFO line per ended attempt holds all its stages. The trap: no prompt content, keys or ticket ids in lines, no request ids
in metrics.
"""

import logging

from prefill_engine.front.attempt import Attempt
from prefill_engine.front.call import PRIORITY_NAMES
from prefill_engine.front.health import EngineState
from prefill_engine.front.kv_counters import KvCounters
from prefill_engine.front.load import LOAD_STAGE, LoadBoard, LoadView
from prefill_engine.front.served_model import COMPONENT_LABELS, ServedModel
from prefill_engine.front.tickets import Ticket, TicketState
from prefill_engine.kv.transport.rdma import rdma_label
from prefill_engine.log import bind
from prefill_engine.messages import Progress, RankLoad, RankReady, Resolved, StepModelReport
from prefill_engine.metrics import Metrics
from prefill_engine.rpc.status import Failure

logger = logging.getLogger(__name__)

_STAGE_LABELS = {
    "QUEUE": "queue",
    "IMAGES": "images",
    "SWAP_IN": "swap_in",
    "COMPUTE": "compute",
    "STORE": "store",
    "HANDOFF": "handoff",
}
_REPLAY_REASONS = {"peer": "pull", "local": "lost"}
"""Resolved.swa_source of a prompt that was replayed after all -> label; "none": there was no snapshot to begin with."""


class Telemetry:
    """Owner of nothing but the metric values. started: monotonic seconds of the engine's start."""

    def __init__(self, metrics: Metrics, board: LoadBoard, *, started: float) -> None:
        self._metrics = metrics
        self._board = board
        self._started = started
        self._steps: dict[int, int] = {}
        self._step_rows: dict[int, int] = {}
        self._kv = KvCounters(metrics)
        self._window_plans: dict[bytes, str] = {}

    def attempt_admitted(self, attempt: Attempt) -> None:
        self._board.note_admitted(attempt.call.attempt_id)

    def attempt_accepted(self, attempt: Attempt, message: Resolved) -> None:
        source = message.swa_source if message.swa_source in ("local", "peer", "store", "replay") else None
        if source is not None:
            self._metrics.swa_source.labels(source).inc()
            self._window_plans[attempt.call.attempt_id] = source
        offered = attempt.call.offered_hit
        if offered is not None and message.effective_hit < offered:
            self._metrics.hit_shrunk.labels("resolved").inc()

    def attempt_finished(self, attempt: Attempt) -> None:
        metrics = self._metrics
        outcome = attempt.outcome
        reason = outcome.reason if isinstance(outcome, Failure) else ""
        name = ("cancelled" if reason == "CALLER_CANCELLED" else "failed") if reason else "completed"
        metrics.requests.labels(name, reason).inc()
        if reason and attempt.rows_done:
            metrics.wasted_rows.labels(reason).inc(attempt.rows_done)
        stages = {stage.phase: stage.length_seconds for stage in attempt.timeline(now=attempt.finished)}
        for phase, label in _STAGE_LABELS.items():
            if phase in stages:
                metrics.stage_seconds.labels(label).observe(stages[phase])
        if "STORE" in stages and not reason:
            metrics.store_commit_seconds.observe(stages["STORE"])
        computed = attempt.computed
        window_plan = self._window_plans.pop(attempt.call.attempt_id, "replay")
        if computed is not None:
            if computed.replayed_tokens:
                metrics.kv_replay.labels(_REPLAY_REASONS.get(window_plan, "none")).inc()
            metrics.prompt_tokens.labels("kv_hit").inc(computed.cached_tokens)
            metrics.prompt_tokens.labels("computed").inc(computed.computed_tokens)
            metrics.replayed_rows.inc(computed.replayed_tokens)
            metrics.image_tokens.inc(computed.image_tokens)
            ttft = computed.at_ns * 1e-9 - attempt.arrival
            metrics.ttft_seconds.labels(PRIORITY_NAMES[attempt.call.priority - 1]).observe(max(0.0, ttft))
        self._log_attempt(attempt, name, reason, stages)

    def ticket_ended(self, ticket: Ticket) -> None:
        metrics = self._metrics
        if ticket.state is TicketState.DELIVERED:
            start = ticket.created if ticket.mode == "push" else ticket.claimed_at
            metrics.kv_transfer_seconds.labels("out").observe(ticket.ended - start)
            metrics.handoff_seconds.labels(ticket.mode, ticket.transport).observe(ticket.ended - start)
            if ticket.transport != "grpc":
                for region in ticket.regions:
                    self.bytes_sent(COMPONENT_LABELS.get(region.kind, "other"), region.num_bytes)
        else:
            metrics.kv_transfer_failures.labels("out", ticket.state.value.lower()).inc()
        if ticket.state is TicketState.EXPIRED:
            metrics.ticket_expired.inc()

    def image_ended(self, outcome: str, *, seconds: float) -> None:
        """An image's rows are here ("ok"), or its attempt failed for this reason."""
        self._metrics.images.labels(outcome).inc()
        if outcome == "ok":
            self._metrics.image_seconds.observe(seconds)

    def vision(self, *, num_encoders: int, used_bytes: int) -> None:
        self._metrics.encoders_usable.set(num_encoders)
        self._metrics.image_rows_bytes.set(used_bytes)

    def bytes_sent(self, component: str, num_bytes: int) -> None:
        self._metrics.kv_transfer_bytes.labels("out", component).inc(num_bytes)

    def rank_progress(self, message: Progress) -> None:
        """A start-up stage moves on; shown in the log once per item by the rank itself, here as figures."""
        rank = str(message.rank)
        self._metrics.startup_seconds.labels(message.stage, rank).set(message.at_ns * 1e-9 - self._started)
        if message.stage == LOAD_STAGE and message.unit == "bytes":
            self._metrics.weight_load_bytes.labels(message.stage, rank).set(message.done)

    def rank_ready(self, message: RankReady) -> None:
        extra = {"dp_rank": message.rank, "kv_tokens": message.kv_tokens_total, "store": message.store_kind}
        logger.info("rank ready", extra=extra)
        if message.data_transport_kind:
            kind = message.data_transport_kind
            self._metrics.handoff_transport_info.labels(str(message.rank), kind, rdma_label(kind)).set(1)

    def engine_ready(self, served: ServedModel) -> None:
        identity = served.identity
        self._metrics.engine_info.labels(served.device, served.model_id, identity.build).set(1)
        self._metrics.epoch.set(identity.epoch)
        block = served.format.block_tokens
        layout = served.layout_digest.hex()[:16]
        self._metrics.cache_info.labels(str(block), str(served.kv_tokens // block), layout).set(1)

    def rank_load(self, load: RankLoad) -> None:
        metrics, rank = self._metrics, str(load.rank)
        metrics.attempts_waiting.labels(rank).set(load.waiting)
        metrics.attempts_running.labels(rank).set(load.running)
        total = max(1, load.kv_tokens_total)
        metrics.kv_usage_ratio.labels(rank).set(1 - load.kv_tokens_free / total)
        metrics.kv_ticket_ratio.labels(rank).set(load.kv_tokens_held_by_tickets / total)
        metrics.state_slots_free.labels(rank).set(load.state_slots_free)
        metrics.store_lag_blocks.labels(rank).set(load.store_lag_blocks)
        for name, count in self._kv.take(load.rank, load.counters).items():
            metrics.rank_events.labels(rank, name).set(count)
        metrics.steps.labels(rank).inc(max(0, load.step_counter - self._steps.get(load.rank, 0)))
        self._steps[load.rank] = load.step_counter
        step = load.step
        if step is not None:
            metrics.step_seconds.labels(step.kind).observe(step.seconds)
            self._step_rows[load.rank] = step.encoder_rows
            if step.kind == "real":
                metrics.step_rows.labels("encoder").observe(step.encoder_rows)
                metrics.step_rows.labels("decoder").observe(step.decoder_rows)
                metrics.step_rows.labels("replay").observe(step.replay_rows)

    def refresh(
        self, view: LoadView, *, rows_waiting: dict[tuple[int, int], int], wait_seconds: float, grants_open: int
    ) -> None:
        """Gauges that follow from the whole. rows_waiting: (rank, priority) -> uncomputed rows of all its attempts."""
        metrics = self._metrics
        for (rank, priority), rows in rows_waiting.items():
            metrics.rows_waiting.labels(str(rank), PRIORITY_NAMES[priority - 1]).set(rows)
        metrics.predicted_wait_seconds.set(wait_seconds)
        metrics.last_step_age_seconds.set(view.last_step_age_seconds)
        metrics.grants_open.set(grants_open)
        metrics.tickets_open.set(sum(view.tickets_open.values()))
        for state in EngineState:
            metrics.state.labels(state.value).set(1 if state is view.state else 0)
        fullest = max(self._step_rows.values(), default=0)
        if fullest:
            metrics.lockstep_efficiency_ratio.set(sum(self._step_rows.values()) / (len(self._step_rows) * fullest))
        _set_step_model(metrics, view.step_model)

    @staticmethod
    def _log_attempt(attempt: Attempt, outcome: str, reason: str, stages: dict[str, float]) -> None:
        call = attempt.call
        ids = {"request_id": call.request_id, "attempt": call.attempt, "attempt_id": call.attempt_id.hex()}
        extra: dict[str, object] = {
            "outcome": outcome,
            "reason": reason,
            "dp_rank": attempt.rank,
            "prompt_tokens": call.num_tokens,
            "hit_tokens": attempt.accepted.effective_hit if attempt.accepted else None,
            "replay_rows": attempt.accepted.replay_rows if attempt.accepted else None,
            "rows_done": attempt.rows_done,
            "handoff": attempt.ticket.state.value if attempt.ticket else None,
            "handoff_mode": call.mode if call.handoff else None,
            "handoff_transport": attempt.ticket.transport if attempt.ticket else None,
            "blocks_committed": attempt.store.blocks_committed,
            "blocks_failed": attempt.store.blocks_failed,
            "seconds": round(attempt.finished - attempt.arrival, 6),
            "stage_ms": {phase.lower(): round(length * 1e3, 3) for phase, length in stages.items()},
        }
        if isinstance(attempt.outcome, Failure):
            extra["phase"] = attempt.outcome.phase.lower()
            extra["detail"] = attempt.outcome.operator_detail
        bind(logger, ids).info("attempt ended", extra=extra)


def _set_step_model(metrics: Metrics, model: StepModelReport) -> None:
    terms = {
        "a": model.a_ms,
        "enc": model.enc_ms_per_row,
        "dec": model.dec_ms_per_row,
        "ctx": model.ctx_ms_per_mega,
        "residual_p95": model.residual_p95_ms,
    }
    for term, value in terms.items():
        metrics.step_model_ms.labels(term).set(value)
