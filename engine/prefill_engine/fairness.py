"""Who goes first: deficit round robin between fairness keys, aged cost inside a key, floors for lower classes, no
starvation.

The rules are serving.md 2.4 and C47; scheduler.py applies them. All milliseconds here are rows_ms of the cost model:
what rows add to a step, the constant part left out.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from prefill_engine.chunk_cut import Candidate, ample_rows, chunk_work
from prefill_engine.cost_model import CostModel
from prefill_engine.step_sheet import ChunkRule, StepSheet
from prefill_plan.config import SchedulerConfig

QUANTUM_MS = 100.0  # serving.md 2.4: predicted step time per visit and unit of weight
CLASS_FLOOR = 0.10  # serving.md 2.4: share of milliseconds of each lower class that has work
CLASS_WINDOW_SECONDS = 10  # C47
MOST_SKIPS = 50  # serving.md 2.4: consecutive steps a runnable attempt may be left out


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyShare:
    """A fairness key with work left in a class, and the milliseconds it may still use before the next key's turn."""

    priority: int
    fairness_key: str
    deficit_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSecond:
    """Milliseconds of one second of the scheduler's clock, by class 1, 2, 3.

    contested_ms: of all steps in which the class had runnable work. served_ms: of the class itself.
    """

    second: int
    contested_ms: tuple[float, float, float]
    served_ms: tuple[float, float, float]


@dataclass(slots=True)
class KeyTurn:
    """A KeyShare while a step is filled. attempts: in the order of aged cost."""

    fairness_key: str
    deficit_ms: float
    quantum_ms: float
    attempts: list[Candidate]


def remaining_ms(candidate: Candidate, *, cost: CostModel) -> float:
    """Predicted milliseconds of all rows left; their mean context stands for each."""
    start, end = candidate.next_row, candidate.prompt_tokens
    work = chunk_work(start, end, decoder_floor=candidate.decoder_floor, prompt_tokens=end)
    return cost.rows_ms(work.encoder_rows, work.decoder_rows, (end - start) * (start + end) // 2)


def aged_cost(cost_ms: float, *, arrival_seconds: float, now: float, age_seconds: float) -> float:
    """Shortest first, but waiting makes cheaper: short work is quick and long work is bounded (serving.md 2.3)."""
    return cost_ms / (1 + max(0.0, now - arrival_seconds) / age_seconds)


def build_turns(
    runnable: Sequence[Candidate],
    *,
    shares: Sequence[KeyShare],
    config: SchedulerConfig,
    cost: CostModel,
    now: float,
) -> dict[int, list[KeyTurn]]:
    """Keys of each class in the order of their turns: known ones as they were, new ones behind them by arrival.

    Returns:
        Classes with runnable work, highest first. A known key without runnable work has lost its deficit.
    """
    attempts: defaultdict[tuple[int, str], list[Candidate]] = defaultdict(list)
    for candidate in runnable:
        attempts[candidate.priority, candidate.fairness_key].append(candidate)
    known = {(share.priority, share.fairness_key): share.deficit_ms for share in shares}
    arrived = sorted(attempts, key=lambda key: (min(each.arrival_seconds for each in attempts[key]), key))
    turns: dict[int, list[KeyTurn]] = {priority: [] for priority in sorted({key[0] for key in attempts})}
    for key in [*(key for key in known if key in attempts), *(key for key in arrived if key not in known)]:
        quantum_ms = _quantum_ms(attempts[key], config=config, cost=cost)
        turns[key[0]].append(
            KeyTurn(
                fairness_key=key[1],
                deficit_ms=known.get(key, quantum_ms),
                quantum_ms=quantum_ms,
                attempts=sorted(attempts[key], key=lambda each: _order(each, config=config, cost=cost, now=now)),
            )
        )
    return turns


def fill_class(sheet: StepSheet, turns: list[KeyTurn], *, limit_ms: float, why: ChunkRule) -> None:
    """Fills the step from one class by deficit round robin; turns ends up in the order for the next step.

    A key is served up to its deficit, then gets a quantum and goes to the back. The last key with work takes what is
    left without paying: nobody else wants it.

    Args:
        limit_ms: most milliseconds added in all.
    """
    idle: set[str] = set()
    while limit_ms > 0 and not sheet.is_full:
        live = [turn for turn in turns if turn.fairness_key not in idle and any(map(sheet.has_room_in, turn.attempts))]
        if not live:
            return
        turn, is_lone = live[0], len(live) == 1
        served_ms = _serve(sheet, turn, limit_ms=limit_ms, is_lone=is_lone, why=why)
        limit_ms -= served_ms
        if served_ms > 0:
            continue
        if is_lone or turn.deficit_ms >= min(turn.quantum_ms, limit_ms):
            idle.add(turn.fairness_key)  # not its deficit but the step, or limit_ms, has no room for it
        else:
            turn.deficit_ms += turn.quantum_ms
            turns.remove(turn)
            turns.append(turn)


def open_shares(sheet: StepSheet, turns: Mapping[int, Sequence[KeyTurn]]) -> tuple[KeyShare, ...]:
    """The keys whose runnable work did not all get into the step, in the order of the next step's turns."""
    return tuple(
        KeyShare(priority=priority, fairness_key=turn.fairness_key, deficit_ms=turn.deficit_ms)
        for priority, class_turns in turns.items()
        for turn in class_turns
        if any(map(sheet.has_room_in, turn.attempts))
    )


def overdue_attempts(runnable: Sequence[Candidate], *, skips: Mapping[bytes, int]) -> list[Candidate]:
    """Attempts that this step must advance, so that none is ever skipped more than MOST_SKIPS times.

    With one such attempt per step from now on, the i-th most skipped would wait i steps more. As long as all can afford
    one more step without that, nobody is forced; with more attempts than steps, several are forced at once.
    """
    ranked = sorted(runnable, key=lambda each: (-skips.get(each.attempt_id, 0), each.arrival_seconds, each.attempt_id))
    counts = [skips.get(candidate.attempt_id, 0) for candidate in ranked]
    if all(count + 1 + rank <= MOST_SKIPS for rank, count in enumerate(counts)):
        return []
    for num_forced in range(1, len(ranked)):
        if all(count + rank // num_forced <= MOST_SKIPS for rank, count in enumerate(counts)):
            return ranked[:num_forced]
    return ranked


def owed_ms(seconds: Iterable[ClassSecond], *, priority: int, planned_ms: float, now: float) -> float:
    """What a lower class lacks to its floor, if the coming step takes planned_ms."""
    kept = _in_window(seconds, now=now)
    contested_ms = sum(second.contested_ms[priority - 1] for second in kept)
    served_ms = sum(second.served_ms[priority - 1] for second in kept)
    return max(0.0, CLASS_FLOOR * (contested_ms + planned_ms) - served_ms)


def add_class_step(
    seconds: Sequence[ClassSecond], *, now: float, contested: Iterable[int], served_ms: Mapping[int, float]
) -> tuple[ClassSecond, ...]:
    """The window after a step; seconds older than CLASS_WINDOW_SECONDS are dropped.

    Args:
        contested: classes with runnable work.
        served_ms: milliseconds of the step by class.
    """
    second = math.floor(now)
    kept = {each.second: each for each in _in_window(seconds, now=now)}
    last = kept.pop(second, ClassSecond(second=second, contested_ms=(0.0, 0.0, 0.0), served_ms=(0.0, 0.0, 0.0)))
    step_ms, present = sum(served_ms.values()), set(contested)
    contested_ms = [last.contested_ms[i] + (step_ms if i + 1 in present else 0.0) for i in range(3)]
    class_ms = [last.served_ms[i] + served_ms.get(i + 1, 0.0) for i in range(3)]
    last = replace(
        last,
        contested_ms=(contested_ms[0], contested_ms[1], contested_ms[2]),
        served_ms=(class_ms[0], class_ms[1], class_ms[2]),
    )
    return (*kept.values(), last)


def count_skips(
    runnable: Sequence[Candidate], *, skips: Mapping[bytes, int], advanced: Iterable[bytes]
) -> tuple[tuple[bytes, int], ...]:
    """Consecutive skips after a step, of runnable attempts only, zeros left out."""
    left_out = {candidate.attempt_id for candidate in runnable} - set(advanced)
    return tuple((attempt_id, skips.get(attempt_id, 0) + 1) for attempt_id in sorted(left_out))


def _in_window(seconds: Iterable[ClassSecond], *, now: float) -> list[ClassSecond]:
    return [each for each in seconds if now - CLASS_WINDOW_SECONDS < each.second <= now]


def _order(candidate: Candidate, *, config: SchedulerConfig, cost: CostModel, now: float) -> tuple[float, float, bytes]:
    aged = aged_cost(
        remaining_ms(candidate, cost=cost),
        arrival_seconds=candidate.arrival_seconds,
        now=now,
        age_seconds=config.age_seconds,
    )
    return aged, candidate.arrival_seconds, candidate.attempt_id


def _quantum_ms(attempts: Sequence[Candidate], *, config: SchedulerConfig, cost: CostModel) -> float:
    """The quantum of a key. On slow machines it is large enough for a chunk that satisfies every cutting rule."""
    rows = ample_rows(config.min_chunk_tokens)
    context = max(candidate.prompt_tokens for candidate in attempts)
    return max(QUANTUM_MS, cost.rows_ms(rows, rows, rows * context)) * max(candidate.weight for candidate in attempts)


def _serve(sheet: StepSheet, turn: KeyTurn, *, limit_ms: float, is_lone: bool, why: ChunkRule) -> float:
    """One visit: the key's attempts in order, up to its deficit unless it is alone. Returns milliseconds added."""
    allowed_ms = limit_ms if is_lone else min(limit_ms, turn.deficit_ms)
    served_ms = 0.0
    for candidate in turn.attempts:
        if served_ms >= allowed_ms or sheet.is_full:
            break
        added_ms = sheet.extend(candidate, limit_ms=allowed_ms - served_ms, limit_rows=candidate.rows_left, why=why)
        served_ms += added_ms
        if added_ms and not is_lone:
            turn.deficit_ms -= added_ms
            sheet.charge(candidate, added_ms)
    return served_ms
