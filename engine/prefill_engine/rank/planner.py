"""Plans of a rank: hands attempt records to the pure functions (admission, scheduler, wait_estimate) and keeps their state.

Owner of SchedulerState, AdmissionState and CostModel of the rank; called by the step loop and, for refusals and estimates, by
the engine.
"""

import math
import time
from collections.abc import Iterable

from prefill_engine.admission import AdmissionDecision, AdmissionState, PoolView, WaitingAttempt, admit
from prefill_engine.chunk_cut import Candidate, chunk_work
from prefill_engine.cost_model import CostModel, StepSample
from prefill_engine.lockstep import equalise
from prefill_engine.queue_limits import Refusal, budget_refusal
from prefill_engine.rank.attempt import Attempt, AttemptPhase
from prefill_engine.rank.kv_keeper import KvKeeper
from prefill_engine.scheduler import SchedulerState, StepDecision, plan_step, refund
from prefill_engine.wait_estimate import PendingWork, WaitEstimate, estimate_wait
from prefill_plan.config import KvConfig, SchedulerConfig, Truncation


class RankPlanner:
    """Decisions about the attempts of one rank. The records are read, never changed."""

    def __init__(self, *, scheduler: SchedulerConfig, kv: KvConfig, truncation: Truncation, cost: CostModel) -> None:
        self.cost = cost
        self._scheduler = scheduler
        self._kv_config = kv
        self._masks = truncation is Truncation.MASK
        self._state = SchedulerState()
        self._admission = AdmissionState()

    def admit(self, attempts: Iterable[Attempt], kv: KvKeeper) -> AdmissionDecision:
        """Who gets KV memory now."""
        waiting, ticket_blocks = [], 0
        for attempt in attempts:
            if attempt.phase is AttemptPhase.COMPUTED:
                ticket_blocks += attempt.num_blocks
            elif attempt.phase is AttemptPhase.WAITING and not attempt.ended:
                waiting.append(
                    WaitingAttempt(
                        attempt_id=attempt.attempt_id,
                        priority=attempt.submit.priority,
                        arrival_seconds=attempt.arrival_seconds,
                        prompt_tokens=attempt.prompt_tokens,
                        pinned_hit_blocks=len(attempt.resident_slots),
                    )
                )
        pool = PoolView(
            num_blocks=kv.blocks.num_blocks,
            reserve_blocks=kv.blocks.reserve_blocks,
            free_blocks=kv.blocks.num_free,
            ticket_blocks=ticket_blocks,
            free_state_slots=kv.states.num_free_states,
        )
        decision = admit(waiting, pool=pool, state=self._admission, config=self._kv_config, now=time.monotonic())
        self._admission = decision.state
        return decision

    def plan(self, attempts: Iterable[Attempt], *, now: float) -> StepDecision:
        """The next step of this rank; its rows count as served. An attempt that is held back is not in it, and holds up no other.
        now: CLOCK_MONOTONIC seconds."""
        candidates = [self._candidate(each) for each in _runnable(attempts) if not each.is_held_back(now)]
        decision, self._state = plan_step(
            candidates, state=self._state, config=self._scheduler, cost=self.cost, now=now
        )
        return decision

    def next_due(self, attempts: Iterable[Attempt], *, now: float) -> float:
        """When the first attempt that is held back may begin without what it waits for; inf = none is."""
        return min((each.snapshot_due for each in _runnable(attempts) if each.is_held_back(now)), default=math.inf)

    def agree(self, decision: StepDecision, all_rows: list[int]) -> StepDecision:
        """The decision after all ranks have said how many rows they want."""
        shortened = equalise(decision, all_rows, cost=self.cost)
        if shortened is not decision:
            self._state = refund(self._state, planned=decision, computed=shortened.chunks)
        return shortened

    def forget(self, decision: StepDecision, discarded: frozenset[bytes]) -> None:
        """Gives back what attempts paid for rows of a step that were thrown away."""
        if discarded:
            kept = [cut for cut in decision.chunks if cut.attempt_id not in discarded]
            self._state = refund(self._state, planned=decision, computed=kept)

    def observe(self, decision: StepDecision, seconds: float) -> None:
        """Refines the cost model with a measured step."""
        work = decision.work
        sample = StepSample(
            step_ms=seconds * 1e3,
            encoder_rows=work.encoder_rows,
            decoder_rows=work.decoder_rows,
            row_context_products=work.row_context_products,
        )
        self.cost = self.cost.observe(sample)

    def estimate(self, attempt: Attempt, others: Iterable[Attempt]) -> WaitEstimate:
        """When a just resolved attempt will start and end."""
        return estimate_wait(
            self._pending(attempt),
            [self._pending(each) for each in others if each is not attempt and each.rows_left],
            cost=self.cost,
            config=self._scheduler,
            now=time.monotonic(),
            step_left_ms=0.0,
        )

    def refuse_budget(self, attempt: Attempt) -> Refusal | None:
        """Whether the attempt's own step cap is too small for its smallest chunk."""
        candidate = self._candidate(attempt)
        start, end = candidate.next_row, candidate.least_end
        work = chunk_work(start, end, decoder_floor=candidate.decoder_floor, prompt_tokens=candidate.prompt_tokens)
        return budget_refusal(
            candidate.step_cap_ms, least_rows=end - start, decoder_rows=work.decoder_rows, context=end, cost=self.cost
        )

    def _candidate(self, attempt: Attempt) -> Candidate:
        plan, submit = attempt.plan, attempt.submit
        return Candidate(
            attempt_id=attempt.attempt_id,
            priority=submit.priority,
            fairness_key=submit.fairness_key,
            weight=submit.weight,
            arrival_seconds=attempt.arrival_seconds,
            next_row=attempt.next_row,
            runnable_end=attempt.runnable_end,
            prompt_tokens=plan.prompt_tokens,
            hit_tokens=plan.hit_tokens,
            compute_start=plan.compute_start,
            decoder_floor=0 if self._masks else plan.decoder_floor,
            step_cap_ms=submit.step_cap_ms,
        )

    def _pending(self, attempt: Attempt) -> PendingWork:
        return PendingWork(
            attempt_id=attempt.attempt_id,
            priority=attempt.submit.priority,
            arrival_seconds=attempt.arrival_seconds,
            start=attempt.next_row,
            prompt_tokens=attempt.prompt_tokens,
            decoder_floor=0 if attempt.positions is None or self._masks else attempt.positions.decoder_floor,
        )


def _runnable(attempts: Iterable[Attempt]) -> Iterable[Attempt]:
    return (each for each in attempts if each.phase is AttemptPhase.RUNNING and not each.ended)
