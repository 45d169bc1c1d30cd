"""plan_step: which rows of which attempts the next step computes. Called by the rank's loop before every step; pure.

    budget (rows, ms) -> overdue attempts -> floors of lower classes -> classes in order, each by deficit round robin

Candidates are the attempts that hold KV (admission.py); whether their next rows can run is the caller's knowledge.
State goes in and comes out; keep the last one and nothing else. The trap: the returned state takes the step as
computed. Rows that were not (another rank was shorter, a fault) are given back with refund().
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from prefill_engine.chunk_cut import Candidate, Work, ample_rows
from prefill_engine.cost_model import CostModel
from prefill_engine.fairness import (
    ClassSecond,
    KeyShare,
    KeyTurn,
    add_class_step,
    build_turns,
    count_skips,
    fill_class,
    open_shares,
    overdue_attempts,
    owed_ms,
)
from prefill_engine.step_budget import BudgetRule, StepBudget, step_budget
from prefill_engine.step_sheet import ChunkCut, ChunkRule, StepSheet
from prefill_plan.config import SchedulerConfig
from prefill_plan.errors import ConfigError
from prefill_plan.layer_spec import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """What one step leaves for the next. Start with SchedulerState().

    shares: fairness keys with work left, in the order of their turns. class_seconds: milliseconds by class in the last
    10 s. skips: (attempt_id, consecutive steps in which it was runnable and left out), sorted.
    """

    shares: tuple[KeyShare, ...] = ()
    class_seconds: tuple[ClassSecond, ...] = ()
    skips: tuple[tuple[bytes, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision:
    """One rank's step. No chunks: nothing can run.

    budget_ms: limit in milliseconds, the model's residual p95 included; predicted_ms: the model's expectation, without
    it. work: rows in the terms of CostModel and StepSample. why: what sized the step.
    """

    chunks: tuple[ChunkCut, ...]
    budget_ms: float
    predicted_ms: float
    work: Work
    why: BudgetRule

    @property
    def encoder_rows(self) -> int:
        """All rows, new and replayed."""
        return self.work.encoder_rows

    @property
    def decoder_rows(self) -> int:
        return self.work.decoder_rows

    @property
    def replay_rows(self) -> int:
        return sum(chunk.replay_rows for chunk in self.chunks)


IDLE_STEP = StepDecision(chunks=(), budget_ms=0.0, predicted_ms=0.0, work=Work(), why=BudgetRule.IDLE)


def plan_step(
    candidates: Sequence[Candidate], *, state: SchedulerState, config: SchedulerConfig, cost: CostModel, now: float
) -> tuple[StepDecision, SchedulerState]:
    """Decides the chunks of the next step. The order of candidates does not matter.

    Guarantees: rows, replayed ones included, never exceed the row cap. The predicted time stays within the budget
    unless a single smallest chunk already exceeds it. If any candidate has a legal chunk, one runs. With at most 50
    candidates none is skipped in more than 50 consecutive steps while runnable; with more, as long as steps have room
    for n / 50 small chunks.

    Args:
        candidates: admitted attempts with rows left; attempt ids are unique.
        now: seconds, same clock as arrival_seconds.

    Raises:
        ValueError: an attempt id occurs twice.
    """
    if len({candidate.attempt_id for candidate in candidates}) < len(candidates):
        raise ValueError(f"attempt ids of {len(candidates)} candidates are not unique")
    runnable = sorted(
        (each for each in candidates if each.usable_end(min_tokens=config.min_chunk_tokens) > each.next_row),
        key=lambda each: each.attempt_id,
    )
    if not runnable:
        return IDLE_STEP, replace(state, shares=(), skips=())
    budget = step_budget(runnable, config=config, cost=cost)
    sheet = StepSheet(budget, cost=cost, min_tokens=config.min_chunk_tokens)
    turns = build_turns(runnable, shares=state.shares, config=config, cost=cost, now=now)
    skips = dict(state.skips)
    _add_overdue(sheet, overdue_attempts(runnable, skips=skips), turns=turns)
    _add_floors(sheet, turns, class_seconds=state.class_seconds, now=now)
    for class_turns in turns.values():
        fill_class(sheet, class_turns, limit_ms=math.inf, why=ChunkRule.ORDER)
    if not sheet.chunks:
        first = next(iter(turns.values()))[0]
        _force(sheet, first.attempts[0], turn=first)
    served_ms: defaultdict[int, float] = defaultdict(float)
    for chunk in sheet.chunks:
        served_ms[chunk.priority] += _rows_ms(cost, chunk.work)
    return _decision(sheet.chunks, budget=budget, cost=cost), SchedulerState(
        shares=open_shares(sheet, turns),
        class_seconds=add_class_step(state.class_seconds, now=now, contested=turns, served_ms=served_ms),
        skips=count_skips(runnable, skips=skips, advanced=[chunk.attempt_id for chunk in sheet.chunks]),
    )


def refund(state: SchedulerState, *, planned: StepDecision, computed: Iterable[ChunkCut]) -> SchedulerState:
    """Gives fairness keys back what they paid for rows that were planned but not computed (serving.md 2.4).

    Args:
        planned: the decision that came with this state or an earlier one.
        computed: the chunks as they were computed: shortened or missing ones make the difference.
    """
    kept_ms = {chunk.attempt_id: chunk.charged_ms for chunk in computed}
    lost_ms: defaultdict[tuple[int, str], float] = defaultdict(float)
    for chunk in planned.chunks:
        lost_ms[chunk.priority, chunk.fairness_key] += chunk.charged_ms - kept_ms.get(chunk.attempt_id, 0.0)
    shares = (
        replace(share, deficit_ms=share.deficit_ms + lost_ms.get((share.priority, share.fairness_key), 0.0))
        for share in state.shares
    )
    return replace(state, shares=tuple(shares))


def check_scheduler_config(config: SchedulerConfig) -> None:
    """Refuses settings under which some prompt could never run.

    Raises:
        ConfigError: names the key, the value and what was expected.
    """
    expectations = (
        ("chunk_cap_tokens", config.chunk_cap_tokens, 2 * BLOCK_TOKENS, "a replayed window and one block"),
        ("min_chunk_tokens", config.min_chunk_tokens, 1, "a row"),
        ("contended_chunk_tokens", config.contended_chunk_tokens, 2 * BLOCK_TOKENS, "a replayed window and one block"),
        ("floor_chunk_tokens", config.floor_chunk_tokens, 0, "nothing"),
    )
    for key, value, least, meaning in expectations:
        if value < least:
            raise ConfigError(f"scheduler.{key} = {value}, expected >= {least} ({meaning})")
    if config.age_seconds <= 0:
        raise ConfigError(f"scheduler.age_seconds = {config.age_seconds}, expected > 0")


def _add_overdue(sheet: StepSheet, overdue: Sequence[Candidate], *, turns: Mapping[int, Sequence[KeyTurn]]) -> None:
    """A small chunk for each, so that all find room; what is left of the step may make it longer."""
    for candidate in overdue:
        turn = next(each for each in turns[candidate.priority] if each.fairness_key == candidate.fairness_key)
        rows = ample_rows(sheet.min_tokens)
        added_ms = sheet.extend(candidate, limit_ms=math.inf, limit_rows=rows, why=ChunkRule.OVERDUE)
        if added_ms:
            turn.deficit_ms -= added_ms
            sheet.charge(candidate, added_ms)
        elif not sheet.chunks:
            _force(sheet, candidate, turn=turn)


def _add_floors(
    sheet: StepSheet, turns: Mapping[int, list[KeyTurn]], *, class_seconds: Sequence[ClassSecond], now: float
) -> None:
    """Lower classes first get what they lack to their floor."""
    planned_ms = max(0.0, sheet.budget.limit_ms - sheet.cost.step_ms(0, 0, 0)) if len(turns) > 1 else 0.0
    for priority, class_turns in list(turns.items())[1:]:
        lack_ms = owed_ms(class_seconds, priority=priority, planned_ms=planned_ms, now=now)
        fill_class(sheet, class_turns, limit_ms=lack_ms, why=ChunkRule.FLOOR)
        first = class_turns[0]
        if not sheet.chunks and sheet.least_ms(first.attempts[0]) <= lack_ms:
            _force(sheet, first.attempts[0], turn=first)


def _force(sheet: StepSheet, candidate: Candidate, *, turn: KeyTurn) -> None:
    added_ms = sheet.force(candidate)
    turn.deficit_ms -= added_ms
    sheet.charge(candidate, added_ms)


def _rows_ms(cost: CostModel, work: Work) -> float:
    return cost.rows_ms(work.encoder_rows, work.decoder_rows, work.row_context_products)


def _decision(chunks: tuple[ChunkCut, ...], *, budget: StepBudget, cost: CostModel) -> StepDecision:
    work = sum((chunk.work for chunk in chunks), Work())
    predicted_ms = cost.step_ms(work.encoder_rows, work.decoder_rows, work.row_context_products)
    limit_ms = budget.limit_ms if math.isfinite(budget.limit_ms) else predicted_ms + budget.margin_ms
    return StepDecision(chunks=chunks, budget_ms=limit_ms, predicted_ms=predicted_ms, work=work, why=budget.rule)
