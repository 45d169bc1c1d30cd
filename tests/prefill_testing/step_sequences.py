"""Whole step sequences from plan_step, for tables and properties: candidates by name, driven until nothing can run."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from prefill_engine.chunk_cut import Candidate
from prefill_engine.cost_model import SEED, CostModel, seed_model
from prefill_engine.scheduler import SchedulerState, StepDecision, plan_step
from prefill_plan.config import SchedulerConfig

LINEAR = seed_model(warmup_steps=0)
KEEP_TOKENS = 140


def attempt(
    name: str,
    prompt_tokens: int,
    *,
    priority: int = 1,
    key: str = "tenant",
    weight: int = 1,
    arrival: float = 0.0,
    hit: int = 0,
    replay: int = 0,
    runnable_end: int | None = None,
    step_cap_ms: float | None = None,
    keep: int = KEEP_TOKENS,
) -> Candidate:
    """A candidate before its first chunk; its attempt id is the name."""
    return Candidate(
        attempt_id=name.encode(),
        priority=priority,
        fairness_key=key,
        weight=weight,
        arrival_seconds=arrival,
        next_row=hit - replay,
        runnable_end=prompt_tokens if runnable_end is None else max(runnable_end, hit - replay),
        prompt_tokens=prompt_tokens,
        hit_tokens=hit,
        compute_start=hit - replay,
        decoder_floor=max(0, prompt_tokens - keep),
        step_cap_ms=step_cap_ms,
    )


@dataclass(slots=True)
class Bench:
    """One rank's loop without a machine: applies decisions, moves the clock by the predicted time."""

    candidates: list[Candidate]
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    cost: CostModel = LINEAR
    state: SchedulerState = field(default_factory=SchedulerState)
    now: float = 0.0

    def step(self) -> StepDecision:
        """Plans one step and takes it as computed; finished attempts leave."""
        decision, self.state = plan_step(
            self.candidates, state=self.state, config=self.config, cost=self.cost, now=self.now
        )
        self.now += decision.predicted_ms / 1e3
        ends = {chunk.attempt_id: chunk.end for chunk in decision.chunks}
        self.candidates = [
            each if each.attempt_id not in ends else replace(each, next_row=ends[each.attempt_id])
            for each in self.candidates
            if ends.get(each.attempt_id) != each.prompt_tokens
        ]
        return decision

    def run(self, *, most_steps: int = 1_000) -> list[StepDecision]:
        """Steps until nothing is left or nothing can run."""
        decisions: list[StepDecision] = []
        while self.candidates and len(decisions) < most_steps:
            decision = self.step()
            if not decision.chunks:
                break
            decisions.append(decision)
        return decisions


def chunk_table(decisions: Sequence[StepDecision]) -> list[list[tuple[str, int, int]]]:
    """Name, start and end of every chunk, step by step."""
    return [[(chunk.attempt_id.decode(), chunk.start, chunk.end) for chunk in each.chunks] for each in decisions]


def served_ms(decisions: Sequence[StepDecision], *, cost: CostModel = LINEAR) -> dict[tuple[int, str], float]:
    """Milliseconds of rows, by class and fairness key."""
    total: dict[tuple[int, str], float] = {}
    for decision in decisions:
        for chunk in decision.chunks:
            key = (chunk.priority, chunk.fairness_key)
            work = chunk.work
            total[key] = total.get(key, 0.0) + cost.rows_ms(
                work.encoder_rows, work.decoder_rows, work.row_context_products
            )
    return total


def model(*, a: float = SEED[0], enc: float = SEED[1], dec: float = SEED[2], ctx: float = SEED[3]) -> CostModel:
    """A cost model that says exactly this."""
    return replace(LINEAR, coefficients=(a, enc, dec, ctx))
