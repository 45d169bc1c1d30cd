"""Bit for bit, in production numerics: a prompt's KV bytes, state and logits do not depend on what else is in its batches, where
its chunks were cut, or whether its start was a hit (decisions 22)."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from prefill_engine.batch import AttemptRows
from prefill_engine.check.golden import attempt_rows
from prefill_engine.check.golden_set import GoldenSet
from prefill_engine.prompt_run import AttemptTerms
from prefill_engine.step_plan import ChunkPlan
from prefill_plan.kv_layout import BLOCK_TOKENS
from prefill_testing.tiny_model import (
    GOLDEN,
    KEEP_TOKENS,
    prompt_run,
    random_tokens,
    run_step,
    state_bytes,
    tiny_cache,
    tiny_model,
)

MAX_TOKENS = 180
SLOW_MODEL = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Prompt:
    seed: int
    bounds: tuple[int, ...]
    """Chunk bounds, from 0 to the length."""

    @property
    def num_tokens(self) -> int:
        return self.bounds[-1]

    @property
    def rows(self) -> AttemptRows:
        return AttemptRows(token_ids=random_tokens(self.seed, self.num_tokens))

    @property
    def floor(self) -> int:
        return max(0, self.num_tokens - KEEP_TOKENS)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    length = draw(st.integers(1, MAX_TOKENS))
    cuts = draw(st.sets(st.integers(1, MAX_TOKENS), max_size=3))
    return Prompt(seed=draw(st.integers(0, 99)), bounds=(0, *sorted(c for c in cuts if c < length), length))


@dataclass(frozen=True)
class Outcome:
    logits: Tensor
    blocks: Tensor
    state: Tensor

    def equals(self, other: "Outcome") -> bool:
        pairs = ((self.logits, other.logits), (self.blocks, other.blocks), (self.state, other.state))
        return all(torch.equal(a, b) for a, b in pairs)


def run_alone(prompt: Prompt, bounds: tuple[int, ...]) -> Outcome:
    run = prompt_run(tiny_model(), prompt.rows)
    logits = run.prefill(bounds, AttemptTerms(decoder_floor=prompt.floor))
    assert logits is not None, "a run to the end gives logits"
    return Outcome(logits=logits, blocks=run.cache.blocks, state=state_bytes(run.cache, 0))


def run_together(group: list[Prompt]) -> list[Outcome]:
    """All prompts in one cache: step n holds the n-th chunk of each; block and state slots are handed out backwards."""
    model = tiny_model()
    num_blocks = [-(-prompt.num_tokens // BLOCK_TOKENS) for prompt in group]
    kv_cache = tiny_cache(model, num_blocks=sum(num_blocks), num_state_slots=len(group))
    free = list(range(sum(num_blocks)))
    slots = [tuple(free.pop() for _ in range(count)) for count in num_blocks]
    logits: dict[int, Tensor] = {}
    for step in range(max(len(prompt.bounds) for prompt in group) - 1):
        active = [i for i, prompt in enumerate(group) if step < len(prompt.bounds) - 1]
        chunks = [
            ChunkPlan(
                attempt_id=bytes([i]),
                start=group[i].bounds[step],
                end=group[i].bounds[step + 1],
                hit_tokens=0,
                window_floor=0,
                decoder_floor=group[i].floor,
                prompt_tokens=group[i].num_tokens,
                block_slots=slots[i],
                state_slot=len(group) - 1 - i,
                snapshot_positions=(),
                is_last=group[i].bounds[step + 1] == group[i].num_tokens,
            )
            for i in active
        ]
        output = run_step(model, kv_cache, chunks, {bytes([i]): group[i].rows for i in active})
        logits.update(zip([i for i, chunk in zip(active, chunks, strict=True) if chunk.is_last], output, strict=True))
    return [
        Outcome(
            logits=logits[i],
            blocks=kv_cache.blocks[list(slots[i])],
            state=state_bytes(kv_cache, len(group) - 1 - i),
        )
        for i in range(len(group))
    ]


@SLOW_MODEL
@given(st.lists(prompts(), min_size=1, max_size=4))
def test_a_prompt_computes_the_same_bytes_in_any_batch_and_chunking(group: list[Prompt]) -> None:
    for prompt, together in zip(group, run_together(group), strict=True):
        assert together.equals(run_alone(prompt, (0, prompt.num_tokens)))


@SLOW_MODEL
@given(prompts(), st.data())
def test_a_hit_with_its_snapshot_computes_the_same_bytes_as_a_cold_run(prompt: Prompt, data: st.DataObject) -> None:
    cold = run_alone(prompt, (0, prompt.num_tokens))
    hit = 2 * data.draw(st.integers(0, prompt.floor // 2), label="hit / 2")
    run = prompt_run(tiny_model(), prompt.rows)
    if hit:
        # Another attempt computed the hit, with another floor: only Block KV and the encoder's windows may matter.
        run.prefill([0, hit], AttemptTerms(state_slot=1))
        run.cache.restore_snapshot(0, hit, run.cache.take_snapshot(1, hit, first_valid=0))
    bounds = (hit, *(bound for bound in prompt.bounds if bound > hit))
    logits = run.prefill(bounds, AttemptTerms(hit_tokens=hit, decoder_floor=prompt.floor))
    assert logits is not None
    assert torch.equal(logits, cold.logits)
    assert torch.equal(run.cache.blocks, cold.blocks)
    handed = [run.cache.export_state(0, prompt.num_tokens, first_valid=0, decoder_floor=prompt.floor)]
    reference = prompt_run(tiny_model(), prompt.rows)
    reference.prefill([0, prompt.num_tokens], AttemptTerms(decoder_floor=prompt.floor))
    handed.append(reference.cache.export_state(0, prompt.num_tokens, first_valid=0, decoder_floor=prompt.floor))
    assert handed[0] == handed[1]


@pytest.mark.parametrize("cut", [1, 17, 30, 61, 91], ids=str)
def test_a_prompt_with_images_may_be_cut_anywhere(cut: int) -> None:
    """The dense model has vision parts; cuts fall before, into and between its images."""
    rows = attempt_rows(GoldenSet(GOLDEN / "tiny_dense").tensors("image"))
    runs = [prompt_run(tiny_model("tiny_dense"), rows) for _ in range(2)]
    whole = runs[0].prefill([0, len(rows.token_ids)], AttemptTerms())
    parts = runs[1].prefill([0, cut, len(rows.token_ids)], AttemptTerms())
    assert whole is not None
    assert parts is not None
    assert torch.equal(whole, parts)
    assert torch.equal(runs[0].cache.blocks, runs[1].cache.blocks)
