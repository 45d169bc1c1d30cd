"""Random checkpoints behave like a model: finite, not saturated, routed evenly enough, and the answer depends on the prompt."""

import numpy as np
import pytest
import torch

from prefill_engine.batch import AttemptRows
from prefill_engine.model.checkpoint_texts import check_texts, read_preset
from prefill_engine.model.checkpoint_writer import write_checkpoint
from prefill_engine.model.engram_tables import build_engram_tables
from prefill_engine.model.flash import DeepseekV41Flash
from prefill_engine.model.random_weights import random_pieces
from prefill_engine.model.tensor_names import Rule, Storage
from prefill_engine.model.weights import load_parameters
from prefill_engine.prompt_run import AttemptTerms, PromptRun, Recorder
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.op_sets import load_ops
from prefill_plan.config import RecordFormat

NUM_TOKENS = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    texts = read_preset("tiny")
    spec = check_texts(texts, source="tiny")
    write_checkpoint(directory, spec, texts, seed=0, shard_bytes=1 << 30)
    parameters = load_parameters(directory, spec, device=torch.device("cpu"), expert_range=range(spec.num_experts))
    return DeepseekV41Flash(
        spec,
        parameters,
        ops=load_ops("ref"),
        numerics=PRODUCTION,
        engram_tables=build_engram_tables(spec, directory / "tokenizer.json"),
        record_format=RecordFormat.FP4,
    )


def prompt(seed):
    """Random text tokens; the last is always the same."""
    token_ids = np.random.default_rng(seed).integers(3, 499, size=NUM_TOKENS).astype(np.int32)
    token_ids[-1] = 17
    return token_ids


def run_cold(model, token_ids, recorder=None):
    run = PromptRun(model, AttemptRows(token_ids=token_ids), ops=load_ops("ref"), keep_tokens=24, rollback_tokens=6)
    return run.prefill([0, NUM_TOKENS], AttemptTerms(), recorder=recorder)


@pytest.fixture(scope="module")
def recorded(model):
    recorder = Recorder(model.spec)
    run_cold(model, prompt(0), recorder)
    return recorder


def test_logits_are_finite_and_of_sane_spread(recorded):
    logits = recorded.at("logits", -1, range(NUM_TOKENS))

    assert torch.isfinite(logits).all()
    assert 1 < logits.std() < 5


@pytest.mark.parametrize("layer", range(12))
def test_streams_stay_in_range(recorded, layer):
    streams = recorded.at("stream", layer, range(NUM_TOKENS)).float()

    assert 0.5 < streams.square().mean().sqrt() < 4


@pytest.mark.parametrize("layer", range(12))
def test_router_uses_its_experts(model, recorded, layer):
    experts = recorded.at("router_ids", layer, range(NUM_TOKENS)).long().flatten()

    share = torch.bincount(experts, minlength=model.spec.num_experts) / len(experts)

    assert share.max() < 0.5
    assert (share > 0).sum() >= model.spec.num_experts - 1


@pytest.mark.parametrize("layer", [1, 4])
def test_engram_gates_are_neither_open_nor_shut(recorded, layer):
    gates = recorded.at("engram_gate", layer, range(NUM_TOKENS)).float()

    assert 0.2 < gates.mean() < 0.8
    assert gates.std() > 0.05


def test_answer_depends_on_more_than_the_last_token(model):
    answers = {int(run_cold(model, prompt(seed)).argmax()) for seed in range(6)}

    assert len(answers) >= 3


def test_every_position_has_its_own_answer(recorded):
    assert recorded.at("logits", -1, range(NUM_TOKENS)).argmax(-1).unique().numel() > NUM_TOKENS / 4


def test_large_tensor_comes_in_blocks_of_whole_tiles():
    rule = Rule("engram.wkv.weight", Storage.FP8, ("U", "G"))

    sizes = [len(piece) for piece in random_pieces("x", rule, (1050, 1 << 15), seed=0)]

    assert sum(sizes) == 1050
    assert len(sizes) > 1
    assert all(size % 32 == 0 for size in sizes[:-1])


def test_values_depend_on_seed_and_name():
    rule = Rule("attn.wkv.weight", Storage.FP8, ("C", "D"))

    first, same, other_seed, other_name = (
        torch.cat(list(random_pieces(name, rule, (64, 64), seed=seed)))
        for name, seed in (("a", 0), ("a", 0), ("a", 1), ("b", 0))
    )

    assert torch.equal(first, same)
    assert not torch.equal(first, other_seed)
    assert not torch.equal(first, other_name)
