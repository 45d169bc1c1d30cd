"""Takes a finished prefill over as a decode peer would and holds the next token's logits against a reference.

Used by `prefill-engine request --probe`, the demo and the tests: the proof that a hand-over is complete and right (C4,
C5). The probe's state comes from the handed bytes alone: its cache starts empty, its ids are the request row's. The
reference never sees those bytes: it prefills prompt and first token in one chunk in a fresh cache. The trap: a
replayed request is not held against a cold run, from which it differs by design, but against a run that replays at the
same place over the same hit.

Legend: L prompt tokens, V vocabulary, M decoder rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from prefill_engine.batch import AttemptRows, Mask, SpanEmbeddings
from prefill_engine.kv_cache import KvCache
from prefill_engine.model.engram_tables import build_engram_tables
from prefill_engine.model.flash import DeepseekV41Flash
from prefill_engine.model.weights import load_parameters
from prefill_engine.probe_report import ProbeReport
from prefill_engine.prompt_run import AttemptTerms, PromptRun, Recorder
from prefill_engine.rpc import common_pb2
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.op_sets import load_ops
from prefill_kernels.ops import Ops
from prefill_plan.config import RecordFormat
from prefill_plan.errors import KvError
from prefill_plan.kv_layout import BLOCK_TOKENS, RequestRow, StateLayout, state_layout
from prefill_plan.model_spec import load_model_spec
from prefill_plan.positions import decoder_floor, num_full_blocks, replay_start

_STATE_KINDS = (
    common_pb2.COMPONENT_KIND_SWA_ENCODER,
    common_pb2.COMPONENT_KIND_SWA_DECODER,
    common_pb2.COMPONENT_KIND_DRAFT_SWA,
    common_pb2.COMPONENT_KIND_COMPRESS_STATE,
)
"""In the order of the hand-over state (kv.md 1.5)."""
_PREFIX_SLOT = 1
"""State slot of the run that only makes the hit's Block KV; the run that counts has slot 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedKv:
    """What crossed the wire. blocks: payloads of ceil(L / 128) blocks in order. state: hand-over state of kv.md 1.5."""

    blocks: bytes
    state: bytes
    row: RequestRow

    @property
    def num_bytes(self) -> int:
        return len(self.blocks) + len(self.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One-shot prefill of L + 1 tokens. logits_V: after the first token; first_token_logits_V: after the prompt.

    blocks: complete blocks of the prompt. state: what a hand-over of the prompt would carry; its compressor state has
    moved on by one token.
    """

    logits_V: Tensor
    first_token_logits_V: Tensor
    blocks: tuple[bytes, ...]
    state: bytes


def load_probe(path: Path, *, record_format: RecordFormat, keep_tokens: int, window_rows: int) -> "DecodeProbe":
    """A probe with the checkpoint of a directory on the CPU, production numerics.

    Args:
        record_format, window_rows: of the ticket's format; window_rows is window + rollback.
        keep_tokens: of the engine that is probed.

    Raises:
        ConfigError, CheckpointError: the directory is no checkpoint.
    """
    spec = load_model_spec(path)
    ops = load_ops("ref")
    device = torch.device("cpu")
    model = DeepseekV41Flash(
        spec,
        load_parameters(path, spec, device=device, expert_range=range(spec.num_experts)),
        ops=ops,
        numerics=PRODUCTION,
        engram_tables=build_engram_tables(spec, path / "tokenizer.json") if spec.engram is not None else None,
        record_format=record_format,
    )
    return DecodeProbe(model, ops, keep_tokens=keep_tokens, rollback_tokens=window_rows - spec.window_tokens)


def join_components(components: Mapping[int, bytes], state: StateLayout) -> HandedKv:
    """Components by pe.v1.ComponentKind, as read from a hand-off; kinds without bytes may be absent.

    Raises:
        KvError: no request row, or state of another length than the layout's.
    """
    if common_pb2.COMPONENT_KIND_REQUEST_ROW not in components:
        raise KvError(f"hand-over has component kinds {sorted(components)}, expected REQUEST_ROW among them; refused")
    handover = b"".join(components.get(kind, b"") for kind in _STATE_KINDS)
    content_bytes = state.compress_state_offset + state.compress_state_bytes
    if len(handover) != content_bytes:
        raise KvError(f"hand-over state of {len(handover)} bytes, expected {content_bytes}; refused")
    return HandedKv(
        blocks=components.get(common_pb2.COMPONENT_KIND_BLOCK_KV, b""),
        state=handover + bytes(state.handover_bytes - content_bytes),
        row=RequestRow.decode(components[common_pb2.COMPONENT_KIND_REQUEST_ROW]),
    )


class DecodeProbe:
    """A decode peer's first step and its references, on one loaded model. Makes a fresh cache for every run."""

    def __init__(self, model: DeepseekV41Flash, ops: Ops, *, keep_tokens: int, rollback_tokens: int) -> None:
        self.state = state_layout(model.spec, keep_tokens=keep_tokens, rollback_tokens=rollback_tokens)
        self._model = model
        self._ops = ops
        self._keep_tokens = keep_tokens
        self._rollback_tokens = rollback_tokens

    def next_logits(self, handed: HandedKv) -> Tensor:
        """[V] logits after the first token, from the handed bytes only.

        Raises:
            KvError: the blocks do not cover the prompt, or no first token was handed over.
        """
        row = handed.row
        if row.first_token < 0:
            raise KvError("the hand-over has no first token; expected one to continue from")
        run = self._new_run(_handed_tokens(row))
        _import_handed(handed, run.cache)
        terms = AttemptTerms(window_floor=row.window_floor, decoder_floor=row.decoder_floor)
        with torch.inference_mode():
            logits_V = run.prefill((row.prompt_tokens, row.prompt_tokens + 1), terms)
        assert logits_V is not None
        return logits_V

    def reference(
        self,
        prompt: Sequence[int],
        first_token: int,
        *,
        replayed_hit: int | None,
        images: tuple[SpanEmbeddings, ...] = (),
    ) -> Reference:
        """The run that a hand-over must equal (C4); its decoder floor stays at L - keep for the token after the prompt.

        Args:
            prompt: [L] token ids.
            replayed_hit: hit H whose window was rebuilt by replay: [0, H) is computed for its Block KV alone, then rows
                from H - window run without window history. None: no replay; an exact hit equals a cold run.
            images: input rows of every image span of the prompt.
        """
        num_tokens = len(prompt)
        floor = decoder_floor(num_tokens, keep_tokens=self._keep_tokens)
        token_ids = np.array([*prompt, first_token], dtype=np.int32)
        run = self._new_run(
            AttemptRows(token_ids=token_ids, is_image=_image_mask(num_tokens + 1, images), embeddings=images)
        )
        recorder = Recorder(self._model.spec)
        hit = replayed_hit or 0
        start = replay_start(hit, window_tokens=self.state.window_tokens)
        with torch.inference_mode():
            if hit:
                run.prefill((0, hit), AttemptTerms(decoder_floor=floor, state_slot=_PREFIX_SLOT))
            terms = AttemptTerms(hit_tokens=hit, window_floor=start, decoder_floor=floor)
            run.prefill((start, num_tokens + 1), terms, recorder=recorder)
        first_token_logits_V, logits_V = recorder.at("logits", -1, (num_tokens - 1, num_tokens)).unbind()
        return Reference(
            logits_V=logits_V,
            first_token_logits_V=first_token_logits_V,
            blocks=tuple(bytes(run.cache.block_view(slot)) for slot in range(num_full_blocks(num_tokens))),
            state=bytes(run.cache.export_state(0, num_tokens, first_valid=start, decoder_floor=floor)),
        )

    def verify(
        self,
        handed: HandedKv,
        prompt: Sequence[int],
        *,
        replayed_hit: int | None,
        tolerance: float = 0.0,
        images: tuple[SpanEmbeddings, ...] = (),
    ) -> ProbeReport:
        """Probe against reference, and the reference's distance to a cold run.

        Args:
            handed: of a greedy prefill of `prompt`.
            tolerance: largest absolute difference of the logits; 0 also asks for equal bytes of blocks and windows.
            images: as reference's.

        Raises:
            KvError: as next_logits.
        """
        row = handed.row
        probe_V = self.next_logits(handed)
        reference = self.reference(prompt, row.first_token, replayed_hit=replayed_hit, images=images)
        cold = reference
        if replayed_hit is not None:
            cold = self.reference(prompt, row.first_token, replayed_hit=None, images=images)
        differing = _differing_blocks(handed, reference)
        max_abs_diff = _max_abs_diff(probe_V, reference.logits_V)
        problems = _row_problems(row, self._expected_row(prompt, reference, replayed_hit, images))
        if not max_abs_diff <= tolerance:
            problems.append(f"logits differ from the reference by {max_abs_diff:.3g}, allowed {tolerance:.3g}")
        if differing and tolerance == 0.0:
            problems.append(f"{differing} of {len(reference.blocks)} complete blocks differ from the reference's")
        windows = slice(0, self.state.compress_state_offset)
        windows_equal = handed.state[windows] == reference.state[windows]
        if not windows_equal and tolerance == 0.0:
            problems.append("window KV differs from the reference's")
        return ProbeReport(
            prompt_tokens=len(prompt),
            first_token=row.first_token,
            next_token=int(probe_V.argmax()),
            num_bytes=handed.num_bytes,
            max_abs_diff=max_abs_diff,
            differing_blocks=differing,
            num_blocks=len(reference.blocks),
            windows_equal=windows_equal,
            is_replayed=replayed_hit is not None,
            cold_max_abs_diff=_max_abs_diff(probe_V, cold.logits_V),
            cold_kl=_kl_nats(cold.logits_V, probe_V),
            cold_same_token=bool(probe_V.argmax() == cold.logits_V.argmax()),
            problems=tuple(problems),
        )

    def _new_run(self, rows: AttemptRows) -> PromptRun:
        return PromptRun(
            self._model,
            rows,
            ops=self._ops,
            keep_tokens=self._keep_tokens,
            rollback_tokens=self._rollback_tokens,
            num_state_slots=2,
        )

    def _expected_row(
        self,
        prompt: Sequence[int],
        reference: Reference,
        replayed_hit: int | None,
        images: tuple[SpanEmbeddings, ...],
    ) -> RequestRow:
        is_image = _image_mask(len(prompt), images)
        ids = prompt if is_image is None else np.where(is_image, -1, prompt).tolist()
        oldest, middle, newest = [-1, -1, -1, *ids][-3:]
        return RequestRow(
            prompt_tokens=len(prompt),
            decoder_floor=decoder_floor(len(prompt), keep_tokens=self._keep_tokens),
            window_floor=replay_start(replayed_hit or 0, window_tokens=self.state.window_tokens),
            last_tokens=(oldest, middle, newest),
            first_token=int(reference.first_token_logits_V.argmax()),
        )


def _image_mask(num_tokens: int, images: Sequence[SpanEmbeddings]) -> Mask | None:
    if not images:
        return None
    mask = np.zeros(num_tokens, dtype=np.bool_)
    for span in images:
        mask[span.start : span.start + len(span.data)] = True
    return mask


def _import_handed(handed: HandedKv, cache: KvCache) -> None:
    block_bytes = len(cache.block_view(0))
    num_blocks = -(-handed.row.prompt_tokens // BLOCK_TOKENS)
    if len(handed.blocks) != num_blocks * block_bytes:
        raise KvError(
            f"hand-over has {len(handed.blocks)} bytes of blocks, expected {num_blocks} x {block_bytes} for "
            f"{handed.row.prompt_tokens} tokens; refused"
        )
    for slot in range(num_blocks):
        cache.block_view(slot)[:] = handed.blocks[slot * block_bytes : (slot + 1) * block_bytes]
    cache.import_state(0, handed.row.prompt_tokens, handed.state)


def _differing_blocks(handed: HandedKv, reference: Reference) -> int:
    return sum(
        handed.blocks[index * len(block) : (index + 1) * len(block)] != block
        for index, block in enumerate(reference.blocks)
    )


def _handed_tokens(row: RequestRow) -> AttemptRows:
    """Token ids at the only places the next row reads: itself and the three before it. All others are no ids."""
    num_tokens = row.prompt_tokens + 1
    known = [*row.last_tokens, row.first_token][-num_tokens:]
    token_ids = np.full(num_tokens, np.iinfo(np.int32).max, dtype=np.int32)
    token_ids[num_tokens - len(known) :] = known
    return AttemptRows(token_ids=token_ids)


def _row_problems(found: RequestRow, expected: RequestRow) -> list[str]:
    fields = ("prompt_tokens", "decoder_floor", "window_floor", "last_tokens", "first_token")
    pairs = zip(fields, msgspec.structs.astuple(found), msgspec.structs.astuple(expected), strict=True)
    return [f"request row: {name} is {value}, expected {wanted}" for name, value, wanted in pairs if value != wanted]


def _max_abs_diff(a_V: Tensor, b_V: Tensor) -> float:
    return float((a_V - b_V).abs().max())


def _kl_nats(p_V: Tensor, q_V: Tensor) -> float:
    """KL(softmax(p) || softmax(q))."""
    log_p_V, log_q_V = p_V.double().log_softmax(-1), q_V.double().log_softmax(-1)
    return max(0.0, float((log_p_V.exp() * (log_p_V - log_q_V)).sum()))
