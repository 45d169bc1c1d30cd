"""Compares one run of a prompt, in one chunk or many, with every expected tensor of its case (golden README, first table)."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from prefill_engine.check.compare import Judge
from prefill_engine.check.golden_set import NotGolden
from prefill_engine.prompt_run import PromptRun, Recorder

# Names of expected tensors whose value is a row of the like-named observation.
_ROW_VALUES = (
    "stream",
    "premix",
    "attn_out",
    "engram_out",
    "engram_gate",
    "router_w",
    "emb",
    "main_hidden",
)
_ENTRY_VALUES = ("ckv_pre", "ckv_post", "index_k")
_IGNORED = ("crows", "topk_margin", "router_margin", "argmax")
_SUB_COLUMNS = 16


class Expected:
    """Expected tensors of one case under one prefix.

    Raises:
        NotGolden: the case has no prompt, or no list of stored rows.
    """

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        if missing := {"rows", "input_ids"} - tensors.keys():
            raise NotGolden(f"a case has no tensor {missing.pop()!r}; expected the golden format")
        self.tensors = tensors
        self.rows = tensors["rows"].tolist()
        self.num_tokens = len(tensors["input_ids"])
        start = prefix + "/"
        self.values = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}

    def positions(self, value: Tensor) -> list[int]:
        """Token positions of a row-wise tensor: all, `rows`, or the last ones."""
        if len(value) == self.num_tokens:
            return list(range(self.num_tokens))
        if len(value) == len(self.rows):
            return list(self.rows)
        return list(range(self.num_tokens - len(value), self.num_tokens))


def split_name(name: str) -> tuple[int, str]:
    """("L3.stream") -> (3, "stream"); draft layers count on behind the main ones as -2 - i; plain names have layer -1."""
    if match := re.fullmatch(r"L(\d+)\.(\w+)", name):
        return int(match[1]), match[2]
    if match := re.fullmatch(r"mtp(\d+)\.(\w+)", name):
        return -2 - int(match[1]), match[2]
    return -1, name


def sub_columns(logits: Tensor) -> Tensor:
    """The vocabulary columns of `logits_sub`."""
    return logits[:, :: logits.shape[1] // _SUB_COLUMNS]


def compare_run(judge: Judge, expected: Expected, run: PromptRun, recorder: Recorder) -> list[str]:
    """Adds a finding for each expected tensor.

    Returns:
        names that have no counterpart here and were not compared.
    """
    unknown = []
    for name, want in expected.values.items():
        if not _compare(judge, name, want, expected, run, recorder):
            unknown.append(name)
    if "argmax" in expected.values:
        everywhere = range(expected.num_tokens)
        best = recorder.at("logits", -1, everywhere).argmax(-1)
        judge.argmax("argmax", best, expected.values["argmax"])
    if "hash_ids" in expected.tensors:
        engram = run.model.spec.engram
        assert engram is not None, "hash ids for a model without Engram"
        for column, layer in enumerate(engram.layers):
            got = recorder.at("hash_ids", layer, range(expected.num_tokens))
            judge.exact("hash_ids", got, expected.tensors["hash_ids"][:, column])
    return unknown


def _compare(judge: Judge, name: str, want: Tensor, expected: Expected, run: PromptRun, recorder: Recorder) -> bool:
    layer, field = split_name(name)
    positions = expected.positions(want)
    if layer < -1:
        layer = run.model.spec.num_layers - 2 - layer
    if field in _IGNORED:
        return True
    if field in _ROW_VALUES:
        judge.values(field, recorder.at(field, layer, positions), want)
    elif field == "final_hidden":
        judge.final_hidden(field, recorder.at(field, -1, positions), want)
    elif field in _ENTRY_VALUES:
        _compare_entries(judge, field, layer, want, expected, recorder)
    elif field == "swa_last":
        last = range(expected.num_tokens - len(want), expected.num_tokens)
        judge.values(field, run.window_keys(layer, last), want)
    elif field in ("topk", "router_ids"):
        margin = expected.values.get(f"L{layer}.{field.removesuffix('_ids')}_margin")
        margin = None if margin is None else margin[positions]
        judge.sets(field, recorder.at(field, layer, positions), want, margin=margin)
    elif field == "candidate_positions":
        judge.sets(field, _candidate_positions(run, recorder, layer, positions, want), _mask_numbers(want))
    elif field == "logits":
        judge.logits(field, recorder.at(field, -1, range(expected.num_tokens - len(want), expected.num_tokens)), want)
    elif field == "logits_sub":
        judge.logits(field, sub_columns(recorder.at("logits", -1, positions)), want)
    else:
        return False
    return True


def _compare_entries(
    judge: Judge, field: str, layer: int, want: Tensor, expected: Expected, recorder: Recorder
) -> None:
    """Entries named by `crows`, or the last ones (C11). Latents come step by step, the rest is the cache's content at the end."""
    steps = recorder.steps(field, layer)
    got = torch.cat(steps) if field == "ckv_pre" else steps[-1]
    crows = expected.values.get(f"L{layer}.crows")
    judge.values(field, got[-len(want) :] if crows is None else got[crows.long()], want)


def _candidate_positions(run: PromptRun, recorder: Recorder, layer: int, positions: list[int], want: Tensor) -> Tensor:
    """[rows, T] entry numbers inside the candidate blocks that the row may see, -1 elsewhere."""
    block = run.model.spec.candidate_block
    numbers = torch.arange(want.shape[1])
    blocks = recorder.at("candidates", layer, positions)
    inside = ((numbers[None, :, None] // block) == blocks[:, None, :]).any(-1)
    visible = numbers[None, :] <= torch.tensor(positions)[:, None]
    return torch.where(inside & visible, numbers, -1)


def _mask_numbers(mask: Tensor) -> Tensor:
    return torch.where(mask != 0, torch.arange(mask.shape[1]), -1)
