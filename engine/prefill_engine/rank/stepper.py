"""One real step: chunks of running attempts through the model, then what each finished chunk and prompt leaves behind.

Called by the step loop; owner of nothing but the way from a decision to its commit. The trap: logits are checked before any
block of a finishing chunk is published, so that a step gone wrong never reaches the pool or the store.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prefill_engine.batch import AttemptRows
from prefill_engine.messages import ChunkFinished, Computed, FirstTokenReady, FromRank, Started
from prefill_engine.rank.attempt import Attempt, AttemptPhase
from prefill_engine.rank.engine import RankEngine
from prefill_engine.rank.kv_keeper import KvKeeper
from prefill_engine.rank.model_runner import ModelRunner, StepResult
from prefill_engine.rank.sampling import sample_token
from prefill_engine.scheduler import StepDecision
from prefill_engine.step_plan import ChunkPlan
from prefill_plan.kv_layout import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """seconds: of the whole pass, stall_seconds of them at layer gates. poisoned: attempts whose rows were discarded (C18)."""

    step_id: int
    seconds: float
    stall_seconds: float
    poisoned: frozenset[bytes]


class Stepper:
    """Runs decisions and commits their results."""

    def __init__(
        self, *, engine: RankEngine, kv: KvKeeper, runner: ModelRunner, send: Callable[[FromRank], None]
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._runner = runner
        self._send = send

    def run(self, decision: StepDecision, *, on_layer: Callable[[int, int], None]) -> StepOutcome:
        """Computes the chunks of a decision (none: a placeholder step) and commits them."""
        attempts = [self._engine.attempts[cut.attempt_id] for cut in decision.chunks]
        chunks = tuple(
            _chunk_plan(attempt, start=cut.start, end=cut.end)
            for attempt, cut in zip(attempts, decision.chunks, strict=True)
        )
        rows = {
            attempt.attempt_id: AttemptRows(
                token_ids=attempt.token_ids,
                is_image=attempt.is_image if attempt.spans else None,
                embeddings=tuple(attempt.embeddings.values()),
            )
            for attempt in attempts
        }
        for attempt in attempts:
            if attempt.rows_computed == 0:
                self._kv.prepare_state(attempt)
                if not attempt.poisoned:
                    self._send(Started(attempt_id=attempt.attempt_id, at_ns=time.monotonic_ns()))
        gate = self._kv.gate(attempts)
        result = self._runner.run(chunks, rows, on_layer=on_layer, wait_source=gate.wait)
        for attempt in attempts:
            if attempt.attempt_id in gate.poisoned:
                self._engine.requeue(attempt)
        # Hits whose last group came in during the step become whole before anything that builds on them is published.
        self._engine.collect()
        finished = iter(result.logits)
        for attempt, chunk in zip(attempts, chunks, strict=True):
            logits_V = next(finished) if chunk.is_last else None
            if attempt.attempt_id not in gate.poisoned:
                self._commit(attempt, chunk, result, logits_V)
        return StepOutcome(
            step_id=result.step_id,
            seconds=result.seconds,
            stall_seconds=gate.stall_seconds,
            poisoned=gate.poisoned,
        )

    def _commit(self, attempt: Attempt, chunk: ChunkPlan, result: StepResult, logits_V: Tensor | None) -> None:
        if logits_V is not None and not bool(torch.isfinite(logits_V).all()):
            text = (
                f"the logits of prompt token {chunk.prompt_tokens - 1} are not finite; nothing of this chunk was kept"
            )
            self._engine.fail(attempt, reason="NONFINITE_OUTPUT", retry="ONCE_THEN_FAIL", phase="COMPUTE", message=text)
            return
        if attempt.rows_computed == 0:
            self._kv.finish_first_chunk(attempt)
        attempt.next_row = chunk.end
        self._engine.images.drop_computed(attempt)
        self._publish(attempt, end_block=chunk.end // BLOCK_TOKENS)
        self._send(
            ChunkFinished(
                attempt_id=attempt.attempt_id,
                rows_done=attempt.rows_computed,
                rows_total=chunk.prompt_tokens - attempt.plan.compute_start,
                chunk_rows=chunk.end - chunk.start,
                step_seconds=result.seconds,
                step_id=result.step_id,
                at_ns=time.monotonic_ns(),
            )
        )
        if logits_V is not None:
            self._finish(attempt, chunk, logits_V)

    def _publish(self, attempt: Attempt, *, end_block: int) -> None:
        """Newly complete blocks become findable in the pool and go to the store in chain order."""
        first_block = attempt.num_published
        self._kv.publish(attempt, upto_blocks=end_block)
        self._kv.start_storing(attempt, range(first_block, end_block))

    def _finish(self, attempt: Attempt, chunk: ChunkPlan, logits_V: Tensor) -> None:
        """The prompt is computed: first token, snapshots, hand-over."""
        attempt.phase = AttemptPhase.COMPUTED
        if attempt.submit.sampling.sample or attempt.submit.sampling.forced_token >= 0:
            sampled = sample_token(logits_V, attempt.submit.sampling)
            attempt.first_token = sampled.token
            self._send(
                FirstTokenReady(
                    attempt_id=attempt.attempt_id,
                    token=sampled.token,
                    logprob=sampled.logprob,
                    alt_tokens=sampled.alt_tokens,
                    alt_logprobs=sampled.alt_logprobs,
                    at_ns=time.monotonic_ns(),
                )
            )
        self._kv.take_snapshots(attempt, chunk.snapshot_positions)
        regions = self._kv.export(attempt)
        plan = attempt.plan
        self._send(
            Computed(
                attempt_id=attempt.attempt_id,
                kv_tokens=attempt.prompt_tokens,
                regions=regions,
                cached_tokens=plan.hit_tokens,
                computed_tokens=plan.new_tokens,
                replayed_tokens=plan.replay_tokens,
                image_tokens=int(attempt.is_image.sum()),
                provenance=attempt.provenance,
                stored_block_keys=b"".join(attempt.keys) if attempt.submit.store_only else b"",
                at_ns=time.monotonic_ns(),
            )
        )
        self._engine.report_store(attempt)
        self._engine.free_if_done(attempt)


def _chunk_plan(attempt: Attempt, *, start: int, end: int) -> ChunkPlan:
    plan = attempt.plan
    is_last = end == plan.prompt_tokens
    return ChunkPlan(
        attempt_id=attempt.attempt_id,
        start=start,
        end=end,
        hit_tokens=plan.hit_tokens,
        window_floor=plan.window_floor,
        decoder_floor=plan.decoder_floor,
        prompt_tokens=plan.prompt_tokens,
        block_slots=attempt.block_slots,
        state_slot=attempt.state_slot,
        snapshot_positions=plan.snapshots if is_last else (),
        is_last=is_last,
    )
