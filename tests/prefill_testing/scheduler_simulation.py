"""Steps of one or more lockstep ranks on a virtual clock: the real plan_step, a linear machine, no threads and no
sleeping.

Tests use it to compare orders of service (serving.md 2.3). A toy: Poisson arrivals, the fitted step time taken as the
truth, no hits, no images, KV for everybody.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefill_engine.chunk_cut import Candidate, Work
from prefill_engine.cost_model import CostModel
from prefill_engine.lockstep import equalise
from prefill_engine.scheduler import SchedulerState, StepDecision, plan_step, refund
from prefill_engine.step_budget import BudgetRule
from prefill_engine.step_sheet import ChunkCut, ChunkRule
from prefill_plan.config import SchedulerConfig

KEEP_TOKENS = 140
SHORT_ROWS = 8_192

Planner = Callable[[Sequence[Candidate], SchedulerState, float], tuple[StepDecision, SchedulerState]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    attempt_id: bytes
    at_seconds: float
    prompt_tokens: int
    priority: int = 1
    fairness_key: str = "tenant"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """decisions: one per rank, as computed."""

    start_seconds: float
    step_ms: float
    decisions: tuple[StepDecision, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """latency_ms: arrival to end of the last chunk, by attempt."""

    arrivals: tuple[Arrival, ...]
    latency_ms: dict[bytes, float]
    steps: tuple[SimulatedStep, ...]

    def latency_percentile(self, percent: int, *, is_short: bool) -> float:
        """Nearest-rank percentile of the latencies of prompts below SHORT_ROWS, or of the others, in milliseconds."""
        ranked = sorted(
            self.latency_ms[each.attempt_id] for each in self.arrivals if (each.prompt_tokens < SHORT_ROWS) == is_short
        )
        return ranked[max(0, -(-percent * len(ranked) // 100) - 1)]

    @property
    def lockstep_efficiency(self) -> float:
        """Rows computed / (ranks x rows of the largest rank), over all steps."""
        useful = sum(decision.encoder_rows for step in self.steps for decision in step.decisions)
        paid = sum(len(step.decisions) * max(each.encoder_rows for each in step.decisions) for step in self.steps)
        return useful / paid


@dataclass(slots=True)
class _Rank:
    state: SchedulerState = field(default_factory=SchedulerState)
    next_row: dict[bytes, int] = field(default_factory=dict)

    def rows_left(self, by_id: dict[bytes, Arrival]) -> int:
        return sum(by_id[attempt_id].prompt_tokens - row for attempt_id, row in self.next_row.items())


def poisson_mix(*, seed: int, seconds: float, rows_per_second: float) -> tuple[Arrival, ...]:
    """85 % short (1k-4k rows), 13 % of 8k-32k, 2 % of 120k-400k; exponential gaps (serving.md 2.3)."""
    generator = random.Random(seed)
    mean_rows = 0.85 * 2_500 + 0.13 * 20_000 + 0.02 * 260_000
    arrivals: list[Arrival] = []
    now = generator.expovariate(rows_per_second / mean_rows)
    while now < seconds:
        kind = generator.random()
        low, high = (1_000, 4_000) if kind < 0.85 else (8_192, 32_000) if kind < 0.98 else (120_000, 400_000)
        attempt_id = len(arrivals).to_bytes(16, "big")
        arrivals.append(Arrival(attempt_id=attempt_id, at_seconds=now, prompt_tokens=generator.randint(low, high)))
        now += generator.expovariate(rows_per_second / mean_rows)
    return tuple(arrivals)


def our_planner(config: SchedulerConfig, *, cost: CostModel) -> Planner:
    def plan(candidates: Sequence[Candidate], state: SchedulerState, now: float) -> tuple[StepDecision, SchedulerState]:
        return plan_step(candidates, state=state, config=config, cost=cost, now=now)

    return plan


def fcfs_planner(config: SchedulerConfig, *, cost: CostModel) -> Planner:
    """First come, first served up to the row cap; the last one in may be cut. What DeepInfer does (serving.md 2.1)."""

    def plan(candidates: Sequence[Candidate], state: SchedulerState, now: float) -> tuple[StepDecision, SchedulerState]:
        del now
        chunks: list[ChunkCut] = []
        room = config.chunk_cap_tokens
        for candidate in sorted(candidates, key=lambda each: (each.arrival_seconds, each.attempt_id)):
            end = min(candidate.prompt_tokens, candidate.next_row + room)
            if end > candidate.next_row:
                chunks.append(_whole_chunk(candidate, end))
                room -= end - candidate.next_row
        work = sum((chunk.work for chunk in chunks), Work())
        predicted_ms = cost.step_ms(work.encoder_rows, work.decoder_rows, work.row_context_products)
        decision = StepDecision(
            chunks=tuple(chunks), budget_ms=predicted_ms, predicted_ms=predicted_ms, work=work, why=BudgetRule.FULL
        )
        return decision, state

    return plan


def simulate(
    arrivals: Sequence[Arrival], *, planner: Planner, cost: CostModel, num_ranks: int = 1, is_equalised: bool = False
) -> SimulationResult:
    """Runs until every prompt is computed. Each is bound on arrival to the rank with the fewest rows left."""
    by_id = {arrival.attempt_id: arrival for arrival in arrivals}
    queue = sorted(arrivals, key=lambda each: (each.at_seconds, each.attempt_id), reverse=True)
    ranks = [_Rank() for _ in range(num_ranks)]
    latency_ms: dict[bytes, float] = {}
    steps: list[SimulatedStep] = []
    now = 0.0
    while queue or any(rank.next_row for rank in ranks):
        if not any(rank.next_row for rank in ranks):
            now = max(now, queue[-1].at_seconds)
        while queue and queue[-1].at_seconds <= now:
            least = min(ranks, key=lambda rank: rank.rows_left(by_id))
            least.next_row[queue.pop().attempt_id] = 0
        decisions = _plan_all(ranks, by_id, planner=planner, cost=cost, now=now, is_equalised=is_equalised)
        step_ms = max(decision.predicted_ms for decision in decisions)
        steps.append(SimulatedStep(start_seconds=now, step_ms=step_ms, decisions=decisions))
        now += step_ms / 1e3
        for rank, decision in zip(ranks, decisions, strict=True):
            for chunk in decision.chunks:
                rank.next_row[chunk.attempt_id] = chunk.end
                if chunk.end == chunk.prompt_tokens:
                    del rank.next_row[chunk.attempt_id]
                    latency_ms[chunk.attempt_id] = (now - by_id[chunk.attempt_id].at_seconds) * 1e3
    return SimulationResult(arrivals=tuple(arrivals), latency_ms=latency_ms, steps=tuple(steps))


def _plan_all(
    ranks: Sequence[_Rank],
    by_id: dict[bytes, Arrival],
    *,
    planner: Planner,
    cost: CostModel,
    now: float,
    is_equalised: bool,
) -> tuple[StepDecision, ...]:
    planned = []
    for rank in ranks:
        candidates = [_candidate(by_id[attempt_id], next_row=row) for attempt_id, row in rank.next_row.items()]
        decision, rank.state = planner(candidates, rank.state, now)
        planned.append(decision)
    if not is_equalised:
        return tuple(planned)
    rows = [decision.encoder_rows for decision in planned]
    computed = [equalise(decision, rows, cost=cost) for decision in planned]
    for rank, before, after in zip(ranks, planned, computed, strict=True):
        rank.state = refund(rank.state, planned=before, computed=after.chunks)
    return tuple(computed)


def _candidate(arrival: Arrival, *, next_row: int) -> Candidate:
    return Candidate(
        attempt_id=arrival.attempt_id,
        priority=arrival.priority,
        fairness_key=arrival.fairness_key,
        weight=1,
        arrival_seconds=arrival.at_seconds,
        next_row=next_row,
        runnable_end=arrival.prompt_tokens,
        prompt_tokens=arrival.prompt_tokens,
        hit_tokens=0,
        compute_start=0,
        decoder_floor=max(0, arrival.prompt_tokens - KEEP_TOKENS),
    )


def _whole_chunk(candidate: Candidate, end: int) -> ChunkCut:
    return ChunkCut(
        attempt_id=candidate.attempt_id,
        start=candidate.next_row,
        end=end,
        least_end=candidate.least_end,
        hit_tokens=candidate.hit_tokens,
        decoder_floor=candidate.decoder_floor,
        prompt_tokens=candidate.prompt_tokens,
        priority=candidate.priority,
        fairness_key=candidate.fairness_key,
        charged_ms=0.0,
        why=ChunkRule.ORDER,
    )
