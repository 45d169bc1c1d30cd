"""Chunked, resumed and replayed cases: what must come out the same however a prompt is cut, and what a replay must give.

Expected values of the replays come from the golden data; that Block KV of the hit and of dropped rows stays bit for bit what the
cold run wrote is checked here against our own cold run (R3, model.md 5.3).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from torch import Tensor

from prefill_engine.check.compare import Judge
from prefill_engine.check.golden_set import DecoderReplayEntry, EncoderReplayEntry
from prefill_engine.check.one_shot import split_name
from prefill_engine.prompt_run import AttemptTerms, PromptRun, Recorder
from prefill_plan.config import Truncation

StartRun = Callable[[Truncation], PromptRun]


def bounds_of(plan: Sequence[int], *, start: int = 0) -> list[int]:
    """Chunk sizes -> successive bounds."""
    return list(accumulate(plan, initial=start))


def compare_decoder_replay(
    judge: Judge,
    entry: DecoderReplayEntry,
    expected: Mapping[str, Tensor],
    *,
    ways: Sequence[tuple[Truncation, Sequence[int]]],
    start: StartRun,
    cold: PromptRun,
) -> None:
    """The same replay in several ways: truncation mode and chunk sizes.

    Args:
        expected: this case's tensors without its prefix.
        start: a fresh run of the prompt.
        cold: the finished run of all rows.
    """
    terms = AttemptTerms(decoder_floor=entry.rect_lo)
    for truncation, plan in ways:
        run, recorder = start(truncation), Recorder(cold.model.spec)
        run.prefill(bounds_of(plan), terms, recorder=recorder)
        _compare_rows(judge, expected, recorder)
        judge.exact("block_kv_cold", run.cache.blocks, cold.cache.blocks)


def compare_encoder_replay(
    judge: Judge, entry: EncoderReplayEntry, expected: Mapping[str, Tensor], *, run: PromptRun
) -> None:
    """A hit without window keys, replayed in one chunk with the new rows, then in a chunk of its own.

    Args:
        run: its first `hit` tokens are computed in state slot 0; slots 1 and 2 are free. Entries above the hit are overwritten.
    """
    length, spec = run.num_tokens, run.model.spec
    for slot, bounds in enumerate(
        ([entry.swa_valid_start, length], [entry.swa_valid_start, entry.hit, length]), start=1
    ):
        terms = AttemptTerms(hit_tokens=entry.hit, window_floor=entry.swa_valid_start, state_slot=slot)
        recorder, before = Recorder(spec), _stored(run, entry.hit)
        run.prefill(bounds, terms, recorder=recorder)
        for page, kept_page in zip(_stored(run, entry.hit), before, strict=True):
            judge.exact("block_kv_hit", page, kept_page)
        _compare_rows(judge, expected, recorder)
        _compare_rebuilt(judge, entry, expected, run, recorder)


def compare_hit_variants(
    judge: Judge, entry: EncoderReplayEntry, expected: Mapping[str, Tensor], *, run: PromptRun, cold: PromptRun
) -> None:
    """The same hit with decoder truncation; with its snapshot; and with the windows of all layers kept.

    Args:
        run: as in compare_encoder_replay, with state slots 3 and 4 free; slot 0 goes on in the last variant.
        cold: a fresh run of the prompt.
    """
    hit, floor = entry.hit, entry.fp32.with_decoder_keep.rect_lo
    shortened = AttemptTerms(hit_tokens=hit, window_floor=entry.swa_valid_start, decoder_floor=floor, state_slot=3)
    _compare_logits(judge, "with_decoder_keep.logits", expected, run, entry.swa_valid_start, shortened)
    if hit <= floor:  # else the decoder needs windows that no snapshot holds
        run.cache.restore_snapshot(4, hit, run.cache.take_snapshot(0, hit, first_valid=0))
        terms = AttemptTerms(hit_tokens=hit, decoder_floor=floor, state_slot=4)
        got = run.step(hit, run.num_tokens, terms, wants_logits=True)
        want = cold.step(0, run.num_tokens, AttemptTerms(decoder_floor=floor), wants_logits=True)
        assert got is not None, "logits were asked for"
        assert want is not None, "logits were asked for"
        judge.exact("snapshot_hit.logits", got, want)
    _compare_logits(judge, "exact.logits", expected, run, hit, AttemptTerms(hit_tokens=hit))


def compare_chunk_state(judge: Judge, length: int, expected: Mapping[str, Tensor], *, start: StartRun) -> None:
    """State after the first `length` tokens: the open pair's projections and the window rings."""
    run = start(Truncation.COMPACT)
    run.prefill([0, length], AttemptTerms())
    for name, want in expected.items():
        layer, field = split_name(name)
        if field == "swa_last":
            judge.values(field, run.window_keys(layer, range(length - len(want), length)), want)
        else:
            rows = run.cache.compress_state(layer)
            pair = rows[0, (length - 1) % rows.shape[1]]
            judge.values(field, pair[0 if field == "tail_score" else 1][None], want)


def _stored(run: PromptRun, num_tokens: int) -> list[Tensor]:
    ratios = run.model.spec.compress_ratios
    return [page for layer in run.model.spec.kv_sources for page in run.hit_pages(layer, num_tokens // ratios[layer])]


def _compare_logits(
    judge: Judge, name: str, expected: Mapping[str, Tensor], run: PromptRun, start: int, terms: AttemptTerms
) -> None:
    """One chunk from `start` to the end; rows before it are the cold run's and not compared."""
    recorder = Recorder(run.model.spec)
    run.prefill([start, run.num_tokens], terms, recorder=recorder)
    computed = [row for row in expected["rows"].tolist() if row >= start]
    judge.logits(name, recorder.at("logits", -1, computed), expected[name][-len(computed) :])


def _compare_rows(judge: Judge, expected: Mapping[str, Tensor], recorder: Recorder) -> None:
    """Tensors at the case's `rows`, and window keys at `swa_pos`."""
    rows = expected["rows"].tolist()
    for name, want in expected.items():
        layer, field = split_name(name)
        if field in ("stream", "final_hidden"):
            judge.values(field, recorder.at(field, layer, rows), want)
        elif field == "topk":
            judge.sets(field, recorder.at(field, layer, rows), want)
        elif field == "swa":
            judge.values(field, recorder.at(field, layer, expected[f"L{layer}.swa_pos"].tolist()), want)
        elif name == "logits":
            judge.logits(field, recorder.at(field, -1, rows), want)


def _compare_rebuilt(
    judge: Judge, entry: EncoderReplayEntry, expected: Mapping[str, Tensor], run: PromptRun, recorder: Recorder
) -> None:
    """Rebuilt window keys of the last hit tokens, and the first entries that the new rows wrote."""
    for name, want in expected.items():
        layer, field = split_name(name)
        if field == "swa_replayed":
            judge.values(field, recorder.at("swa", layer, range(entry.hit - len(want), entry.hit)), want)
        elif field == "ckv_post_new":
            first = entry.hit // run.model.spec.compress_ratios[layer]
            judge.values(field, recorder.steps("ckv_post", layer)[-1][first : first + len(want)], want)


def at_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Tensors under `prefix/`, without it."""
    start = prefix + "/"
    return {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}


def replay_logits_only(expected: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The few values a replay has in a quantised regime: `<prefix>.logits`, at the same rows."""
    name = f"{prefix}.logits"
    return {"rows": expected["rows"], "logits": expected[name]} if name in expected else {}
