"""`prefill-engine check`: runs every case of golden data through our model (and our vision tower) and compares every tensor.

One model per regime, weights loaded once; cold runs are kept, since replays are compared with them. Called by the CLI and
by tests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prefill_engine.batch import AttemptRows, SpanEmbeddings
from prefill_engine.check.compare import Finding, Judge, Limits
from prefill_engine.check.dequantised import compare_dequantised
from prefill_engine.check.golden_set import ChunkedEntry, DecoderReplayEntry, EncoderReplayEntry, GoldenSet, find_sets
from prefill_engine.check.one_shot import Expected, compare_run, sub_columns
from prefill_engine.check.regimes import REGIMES, Regime
from prefill_engine.check.replays import (
    at_prefix,
    bounds_of,
    compare_chunk_state,
    compare_decoder_replay,
    compare_encoder_replay,
    compare_hit_variants,
    replay_logits_only,
)
from prefill_engine.check.units import check_quantisers
from prefill_engine.check.vision_golden import VISION_REGIMES, VisionCheck
from prefill_engine.check.vision_set import VisionSet, is_vision_manifest
from prefill_engine.model.engram_tables import build_engram_tables
from prefill_engine.model.flash import DeepseekV41Flash
from prefill_engine.model.weights import load_parameters
from prefill_engine.prompt_run import AttemptTerms, PromptRun, Recorder
from prefill_kernels.ops import Ops
from prefill_kernels.vision_ops import VisionOps
from prefill_plan.config import RecordFormat, Truncation
from prefill_plan.model_spec import load_model_spec

# README: the logits of a chunked run equal the single-shot ones to 1e-4.
_CHUNKED = Limits(value=5e-4, logits=1e-4)
_ROLLBACK_TOKENS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenReport:
    """findings: every comparison made. unknown: expected tensors that have no counterpart, as set/case/name."""

    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return bool(self.findings) and not self.unknown and all(finding.passed for finding in self.findings)


def check_golden(
    path: Path,
    *,
    ops: Ops,
    vision_ops: VisionOps,
    regimes: Sequence[str] = (),
    on_case: Callable[[str], None] = lambda _name: None,
) -> GoldenReport:
    """Runs every case found.

    Args:
        path: a golden set of the text model or of the vision tower, or a directory of sets.
        regimes: names of the regimes to run; none = all that a set has values for.
        on_case: called with "set regime case" before each.

    Raises:
        NotGolden: no golden data there.
        ValueError: a regime that no set there has values for.
        CheckpointError: the set's checkpoint cannot be loaded.
    """
    paths = find_sets(path)
    texts = [GoldenSet(place) for place in paths if not is_vision_manifest(place)]
    towers = [VisionSet(place) for place in paths if is_vision_manifest(place)]
    available = {regime.name for golden in texts for regime in REGIMES if regime.prefix in golden.regimes()}
    available |= VISION_REGIMES.keys() if towers else set()
    if missing := [name for name in regimes if name not in available]:
        raise ValueError(f"regime {missing[0]!r}: expected one of {', '.join(sorted(available))}")
    findings: list[Finding] = [] if regimes else check_quantisers(path)
    unknown: list[str] = []
    for golden in texts:
        check = _SetCheck(golden, ops=ops, on_case=on_case)
        chosen = [r for r in REGIMES if r.prefix in golden.regimes() and (not regimes or r.name in regimes)]
        for regime in chosen:
            check.run(regime)
        findings += check.findings
        unknown += check.unknown
    for tower in towers:
        vision = VisionCheck(tower, ops=vision_ops, on_case=on_case)
        for name in VISION_REGIMES:
            if not regimes or name in regimes:
                vision.run(name)
        findings += vision.findings
        unknown += vision.unknown
    return GoldenReport(findings=tuple(findings), unknown=tuple(unknown))


class _SetCheck:
    """Checks one set, regime by regime."""

    def __init__(self, golden: GoldenSet, *, ops: Ops, on_case: Callable[[str], None]) -> None:
        self.findings: list[Finding] = []
        self.unknown: list[str] = []
        self._golden = golden
        self._ops = ops
        self._on_case = on_case
        self._device = torch.device("cpu")
        self._spec = load_model_spec(golden.path)
        self._parameters = load_parameters(
            golden.path, self._spec, device=self._device, expert_range=range(self._spec.num_experts)
        )
        self._tables = build_engram_tables(self._spec, golden.path / "tokenizer.json")
        replays = (*golden.manifest.decoder_replay.values(),)
        self._keep = max((entry.keep for entry in replays), default=self._spec.window_tokens + _ROLLBACK_TOKENS)

    def run(self, regime: Regime) -> None:
        model = DeepseekV41Flash(
            self._spec,
            self._parameters,
            ops=self._ops,
            numerics=regime.numerics,
            engram_tables=self._tables,
            record_format=RecordFormat.FP4,
        )
        cold = {name: self._one_shot(regime, model, name) for name in self._golden.manifest.cases}
        if regime.name == "w_fp32":
            self._dequantised(regime)
        if regime.runs_replays and regime.limits is not None:
            self._replays(regime, regime.limits, model, cold)

    def _one_shot(self, regime: Regime, model: DeepseekV41Flash, name: str) -> PromptRun:
        self._on_case(f"{self._golden.name} {regime.name} {name}")
        expected = Expected(self._golden.tensors(name), regime.prefix)
        run, recorder = self._start(model, name), Recorder(self._spec)
        run.prefill([0, run.num_tokens], AttemptTerms(), recorder=recorder)
        if regime.limits is not None:
            judge = self._judge(regime.limits, regime, "one shot", name)
            self._note_unknown(name, compare_run(judge, expected, run, recorder))
        elif regime.gross is not None:
            judge = self._judge(_CHUNKED, regime, "one shot", name)
            logits = recorder.at("logits", -1, range(run.num_tokens))
            want, best = expected.values["logits_sub"], expected.values["argmax"]
            judge.statistics(sub_columns(logits), want, logits.argmax(-1), best, regime.gross)
        self.findings += judge.findings
        return run

    def _replays(self, regime: Regime, limits: Limits, model: DeepseekV41Flash, cold: dict[str, PromptRun]) -> None:
        manifest = self._golden.manifest
        if limits.rows == 1.0:
            for name, plan in manifest.chunked.items():
                self._chunked(regime, model, name, plan)
            self._chunk_states(regime, limits, model)
        for name, decoder in manifest.decoder_replay.items():
            self._on_case(f"{self._golden.name} {regime.name} {name}")
            self._decoder_replay(self._judge(limits, regime, "decoder replay", name), name, decoder, model, cold)
        for name, encoder in manifest.encoder_replay.items():
            self._on_case(f"{self._golden.name} {regime.name} {name}")
            self._encoder_replay(self._judge(limits, regime, "encoder replay", name), name, encoder, model)

    def _decoder_replay(
        self,
        judge: Judge,
        name: str,
        entry: DecoderReplayEntry,
        model: DeepseekV41Flash,
        cold: dict[str, PromptRun],
    ) -> None:
        expected = at_prefix(self._golden.tensors("decoder_replay"), name)
        whole = [cold[entry.prompt].num_tokens]
        ways = [(Truncation.COMPACT, whole)]
        if judge.limits.rows == 1.0:
            ways += [(Truncation.MASK, whole), *((Truncation.COMPACT, plan) for plan in entry.plans())]
        else:
            expected = replay_logits_only(expected, judge.regime)
        start = self._starter(model, entry.prompt)
        if expected:
            compare_decoder_replay(judge, entry, expected, ways=ways, start=start, cold=cold[entry.prompt])
        self.findings += judge.findings

    def _encoder_replay(self, judge: Judge, name: str, entry: EncoderReplayEntry, model: DeepseekV41Flash) -> None:
        expected = at_prefix(self._golden.tensors("encoder_replay"), name)
        is_exact = judge.limits.rows == 1.0
        if not is_exact:
            expected = replay_logits_only(expected, judge.regime)
        if expected:
            run = self._start(model, entry.prompt)
            run.prefill([0, entry.hit], AttemptTerms())
            compare_encoder_replay(judge, entry, expected, run=run)
            if is_exact:
                compare_hit_variants(judge, entry, expected, run=run, cold=self._start(model, entry.prompt))
        self.findings += judge.findings

    def _chunked(self, regime: Regime, model: DeepseekV41Flash, name: str, entry: ChunkedEntry) -> None:
        case = self._golden.case_of_length(sum(entry.plan))
        self._on_case(f"{self._golden.name} {regime.name} {name}")
        judge = self._judge(_CHUNKED, regime, "chunked", name)
        run, recorder = self._start(model, case), Recorder(self._spec)
        run.prefill(bounds_of(entry.plan), AttemptTerms(), recorder=recorder)
        self._note_unknown(name, compare_run(judge, Expected(self._golden.tensors(case), regime.prefix), run, recorder))
        for step, state in enumerate(entry.states):
            for layer, want in state.compressed.items():
                got = sum(len(latents) for latents in recorder.steps("ckv_pre", int(layer))[: step + 1])
                ratio = self._spec.compress_ratios[int(layer)]
                judge.count("finished groups", got, want)
                judge.count("open tokens", state.n - ratio * got, state.tail[layer])
        self.findings += judge.findings

    def _chunk_states(self, regime: Regime, limits: Limits, model: DeepseekV41Flash) -> None:
        tensors = self._golden.tensors("chunk_state")
        for name in sorted({key.split("/")[0] for key in tensors}):
            case, length = name.split("@")
            judge = self._judge(limits, regime, "chunk state", name)
            compare_chunk_state(judge, int(length), at_prefix(tensors, name), start=self._starter(model, case))
            self.findings += judge.findings

    def _dequantised(self, regime: Regime) -> None:
        judge = self._judge(_CHUNKED, regime, "weights", "dequant_samples")
        samples = self._golden.tensors("dequant_samples")
        compare_dequantised(judge, samples, self._parameters, ops=self._ops)
        self.findings += judge.findings

    def _judge(self, limits: Limits, regime: Regime, group: str, case: str) -> Judge:
        return Judge(limits, regime=regime.name, group=group, case=case)

    def _note_unknown(self, case: str, names: Sequence[str]) -> None:
        self.unknown += [f"{self._golden.name}/{case}/{name}" for name in names]

    def _starter(self, model: DeepseekV41Flash, case: str) -> Callable[[Truncation], PromptRun]:
        return lambda truncation: self._start(model, case, truncation)

    def _start(self, model: DeepseekV41Flash, case: str, truncation: Truncation = Truncation.COMPACT) -> PromptRun:
        return PromptRun(
            model,
            attempt_rows(self._golden.tensors(case)),
            ops=self._ops,
            keep_tokens=self._keep,
            rollback_tokens=_ROLLBACK_TOKENS,
            truncation=truncation,
            num_state_slots=5,
        )


def attempt_rows(tensors: dict[str, Tensor]) -> AttemptRows:
    """The inputs of a case; image rows get their given embeddings."""
    token_ids = tensors["input_ids"].numpy().astype(np.int32)
    if "token_types" not in tensors:
        return AttemptRows(token_ids=token_ids)
    is_image = tensors["token_types"].numpy() >= 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_image, [False]]).astype(np.int8)))
    spans = [SpanEmbeddings(start=int(a), data=tensors["embeds"][a:b]) for a, b in edges.reshape(-1, 2)]
    return AttemptRows(token_ids=token_ids, is_image=is_image, embeddings=tuple(spans))
