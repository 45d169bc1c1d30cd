"""Bounded replay: what it must never change, and what both truncation modes must share."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefill_engine.batch import AttemptRows
from prefill_engine.prompt_run import AttemptTerms, PromptRun
from prefill_plan.config import Truncation
from prefill_plan.positions import replay_start
from prefill_testing.tiny_model import KEEP_TOKENS, prompt_run, random_tokens, state_bytes, tiny_model

MAX_TOKENS = 260
SLOW_MODEL = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def stored_hit(run: PromptRun, hit: int) -> list[torch.Tensor]:
    """Records of every entry below the hit, by KV source: main KV, index data, index scales."""
    ratios = run.model.spec.compress_ratios
    return [page for layer in run.model.spec.kv_sources for page in run.hit_pages(layer, hit // ratios[layer])]


def replayed_run(tokens: int, hit: int, *, bounds: list[int], floor: int) -> tuple[PromptRun, torch.Tensor]:
    """Slot 1 computed the hit, slot 0 replays without a snapshot. (run, logits)."""
    run = prompt_run(tiny_model(), AttemptRows(token_ids=random_tokens(tokens, tokens)))
    run.prefill([0, hit], AttemptTerms(state_slot=1))
    before = stored_hit(run, hit)
    terms = AttemptTerms(hit_tokens=hit, window_floor=bounds[0], decoder_floor=floor)
    logits = run.prefill(bounds, terms)
    assert logits is not None
    assert all(torch.equal(a, b) for a, b in zip(stored_hit(run, hit), before, strict=True)), "the hit's bytes changed"
    return run, logits


@SLOW_MODEL
@given(st.integers(KEEP_TOKENS + 2, MAX_TOKENS), st.data())
def test_replay_leaves_the_hit_alone_and_does_not_depend_on_chunks(length: int, data: st.DataObject) -> None:
    floor = length - KEEP_TOKENS
    hit = 2 * data.draw(st.integers(1, floor // 2), label="hit / 2")
    start = replay_start(hit, window_tokens=tiny_model().spec.window_tokens)
    cuts = data.draw(st.sets(st.integers(start + 1, length), max_size=3), label="cuts")
    whole, expected = replayed_run(length, hit, bounds=[start, length], floor=floor)
    cut, logits = replayed_run(length, hit, bounds=[start, *sorted(cuts - {length}), length], floor=floor)
    assert torch.equal(logits, expected)
    assert torch.equal(cut.cache.blocks, whole.cache.blocks)
    assert torch.equal(state_bytes(cut.cache, 0), state_bytes(whole.cache, 0))


@SLOW_MODEL
@given(st.integers(1, MAX_TOKENS), st.sets(st.integers(1, MAX_TOKENS - 1), max_size=3))
def test_compact_equals_mask_bit_for_bit(length: int, cuts: set[int]) -> None:
    rows = AttemptRows(token_ids=random_tokens(length, length))
    terms = AttemptTerms(decoder_floor=max(0, length - KEEP_TOKENS))
    bounds = [0, *sorted(cut for cut in cuts if cut < length), length]
    runs = [prompt_run(tiny_model(), rows, truncation=truncation) for truncation in Truncation]
    logits = [run.prefill(bounds, terms) for run in runs]
    assert logits[0] is not None
    assert logits[1] is not None
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(runs[0].cache.blocks, runs[1].cache.blocks)
    # Rings of all layers, the draft's too: decoder rows below the floor are stored by neither mode.
    assert torch.equal(state_bytes(runs[0].cache, 0), state_bytes(runs[1].cache, 0))


@pytest.mark.parametrize("length", [25, 150, 260])
def test_decoder_replay_writes_the_block_kv_of_a_full_run(length: int) -> None:
    rows = AttemptRows(token_ids=random_tokens(7, length))
    full, kept = (prompt_run(tiny_model(), rows) for _ in range(2))
    full.prefill([0, length], AttemptTerms())
    kept.prefill([0, length], AttemptTerms(decoder_floor=length - KEEP_TOKENS))
    assert torch.equal(full.cache.blocks, kept.cache.blocks)


def test_decoder_replay_equals_the_full_run_up_to_keep_tokens() -> None:
    rows = AttemptRows(token_ids=random_tokens(8, KEEP_TOKENS))
    full, kept = (prompt_run(tiny_model(), rows) for _ in range(2))
    logits = full.prefill([0, KEEP_TOKENS], AttemptTerms())
    assert logits is not None
    expected = kept.prefill([0, KEEP_TOKENS], AttemptTerms(decoder_floor=0))
    assert expected is not None
    assert torch.equal(logits, expected)


def test_replay_is_an_approximation_of_the_cold_run() -> None:
    """If this fails, the tests above may compare two cold runs."""
    length, hit = 200, 128
    cold = prompt_run(tiny_model(), AttemptRows(token_ids=random_tokens(length, length)))
    expected = cold.prefill([0, length], AttemptTerms(decoder_floor=length - KEEP_TOKENS))
    assert expected is not None
    run, _ = replayed_run(length, hit, bounds=[hit - 16, length], floor=length - KEEP_TOKENS)
    assert not torch.equal(run.cache.blocks, cold.cache.blocks)
