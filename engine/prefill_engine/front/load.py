"""What the ranks last said about their load and their progress, and the figures derived from it (serving.md 2.2, C48)."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefill_engine.front.health import EngineState, RankPulse, judge_state
from prefill_engine.messages import Beat, Progress, RankLoad, RankReady, StepModelReport

# A WatchLoad stream this many admissions behind is told the newest ones only.
_KEPT_ADMISSIONS = 4096
LOAD_STAGE = "load"
"""Progress.stage while weights are read."""
NO_STEP_MODEL = StepModelReport(
    a_ms=0.0, enc_ms_per_row=0.0, dec_ms_per_row=0.0, ctx_ms_per_mega=0.0, residual_p95_ms=0.0, samples=0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadView:
    """One load report in plain values. tickets_open: rank -> open tickets."""

    epoch: int
    state: EngineState
    ranks: tuple[RankLoad, ...]
    tickets_open: Mapping[int, int]
    step_model: StepModelReport
    step_counter: int
    last_step_age_seconds: float
    acked_attempts: int
    uptime_seconds: float
    backlog_seconds: float
    """Until the rank with the most rows before it is through with them: ranks step together."""
    weight_bytes_loaded: int
    weight_bytes_total: int
    """Of all ranks; 0 until each of them has told its part."""


def ms_per_row(model: StepModelReport, *, chunk_rows: int) -> float:
    """Cost of one encoder row inside a step of chunk_rows rows, the step's fixed cost shared by its rows."""
    return model.enc_ms_per_row + model.a_ms / max(1, chunk_rows)


def predicted_wait_seconds(load: RankLoad, *, chunk_rows: int) -> float:
    """Time until a rank is through with what it has; 0 when idle."""
    rows = load.waiting_rows + load.running_rows_left
    return rows * ms_per_row(load.step_model, chunk_rows=chunk_rows) / 1e3


def predicted_compute_seconds(model: StepModelReport, *, rows: int, context: int, chunk_rows: int) -> float:
    """Time to compute `rows` rows at this context in full chunks, by the rank's step model."""
    ms = rows * ms_per_row(model, chunk_rows=chunk_rows) + model.ctx_ms_per_mega * rows * context / 1e6
    return ms / 1e3


class LoadBoard:
    """Owner of the ranks' last reports. chunk_rows: rows of a full step. clock times are monotonic seconds."""

    def __init__(self, *, num_ranks: int, chunk_rows: int, epoch: int, started: float) -> None:
        self.ready: dict[int, RankReady] = {}
        self.lost: set[int] = set()
        self._num_ranks = num_ranks
        self._chunk_rows = chunk_rows
        self._epoch = epoch
        self._started = started
        self._last_step = started
        self._loads: dict[int, RankLoad] = {}
        self._beats: dict[int, Beat] = {}
        self._weights: dict[int, tuple[int, int]] = {}
        """By rank: bytes loaded, bytes in all."""
        self._admitted: deque[bytes] = deque(maxlen=_KEPT_ADMISSIONS)
        self.num_admitted = 0

    @property
    def is_ready(self) -> bool:
        """All ranks can take work."""
        return len(self.ready) == self._num_ranks and not self.lost

    def note_load(self, load: RankLoad) -> None:
        self._loads[load.rank] = load
        if load.step is not None:
            self._last_step = max(self._last_step, load.at_ns * 1e-9)

    def note_beat(self, beat: Beat) -> None:
        self._beats[beat.rank] = beat
        self._last_step = max(self._last_step, beat.at_ns * 1e-9)

    def note_progress(self, progress: Progress) -> None:
        if progress.stage == LOAD_STAGE and progress.unit == "bytes":
            self._weights[progress.rank] = (progress.done, progress.total)

    def note_admitted(self, attempt_id: bytes) -> None:
        self._admitted.append(attempt_id)
        self.num_admitted += 1

    def admitted_since(self, count: int) -> Sequence[bytes]:
        """Ids admitted after the first `count`; what is long past is left out."""
        newer = min(self.num_admitted - count, len(self._admitted))
        return list(self._admitted)[len(self._admitted) - newer :]

    def wait_seconds(self, rank: int) -> float:
        load = self._loads.get(rank)
        return 0.0 if load is None else predicted_wait_seconds(load, chunk_rows=self._chunk_rows)

    def step_model(self) -> StepModelReport:
        """Of the slowest rank: steps run in lockstep (serving.md 2.2)."""
        models = [load.step_model for load in self._loads.values()]
        return max(models, key=lambda model: ms_per_row(model, chunk_rows=self._chunk_rows), default=NO_STEP_MODEL)

    def pulses(self, working_since: Mapping[int, float]) -> list[RankPulse]:
        """working_since: rank -> since when it has had rows in steps; a rank that is absent is not working."""
        pulses = []
        for rank, since in working_since.items():
            beat = self._beats.get(rank)
            last = since if beat is None else max(since, beat.at_ns * 1e-9)
            layer_ms = 0.0 if beat is None else beat.predicted_layer_ms
            pulses.append(RankPulse(last_sign=last, predicted_layer_ms=layer_ms))
        return pulses

    def view(
        self, *, now: float, draining: bool, working_since: Mapping[int, float], tickets_open: Mapping[int, int]
    ) -> LoadView:
        """The report of this moment."""
        loads = tuple(self._loads[rank] for rank in sorted(self._loads))
        weights = list(self._weights.values()) if len(self._weights) == self._num_ranks else []
        state = judge_state(
            ready=self.is_ready,
            draining=draining,
            degraded=any(not load.store_ok for load in loads),
            pulses=self.pulses(working_since),
            now=now,
        )
        return LoadView(
            epoch=self._epoch,
            state=state,
            ranks=loads,
            tickets_open=tickets_open,
            step_model=self.step_model(),
            step_counter=max((load.step_counter for load in loads), default=0),
            last_step_age_seconds=max(0.0, now - self._last_step),
            acked_attempts=self.num_admitted,
            uptime_seconds=now - self._started,
            backlog_seconds=max((self.wait_seconds(load.rank) for load in loads), default=0.0),
            weight_bytes_loaded=sum(loaded for loaded, _ in weights),
            weight_bytes_total=sum(total for _, total in weights),
        )
