"""The decode probe at model level: prefill in one cache, hand the bytes over, continue in another, compare (C4, C5).

Keep 24 and window 16 of the golden models: 140 would hide the decoder floor.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from prefill_engine.batch import AttemptRows, build_batch
from prefill_engine.decode_probe import DecodeProbe, HandedKv, join_components
from prefill_engine.kv_cache import KvCache
from prefill_engine.model.engram_tables import build_engram_tables
from prefill_engine.model.flash import DeepseekV41Flash
from prefill_engine.model.weights import load_parameters
from prefill_engine.rpc import common_pb2
from prefill_engine.step_plan import ChunkPlan, StepPlan
from prefill_kernels.numerics import PRODUCTION, Numerics
from prefill_kernels.op_sets import load_ops
from prefill_plan.config import RecordFormat, Truncation
from prefill_plan.errors import KvError
from prefill_plan.kv_layout import BLOCK_TOKENS, RequestRow, block_layout, state_layout
from prefill_plan.model_spec import load_model_spec
from prefill_plan.positions import decoder_floor, replay_start

GOLDEN = Path(__file__).parent.parent / "golden"
KEEP = 24
ROLLBACK = 6
FP32 = Numerics(activation=torch.float32, quantise_activations=False, quantise_cache=False)


@dataclass(frozen=True)
class Rig:
    """A model, its probe, and the pieces an engine would have."""

    model: DeepseekV41Flash
    probe: DecodeProbe
    cache: KvCache

    def prefill(
        self, tokens: Sequence[int], cuts: Sequence[int], *, hit: int = 0, start: int = 0, slot: int = 1
    ) -> int:
        """Rows [start, L) in chunks ending at the cuts and L; hit and start as the engine's plan has them. The first token."""
        window_floor = start if start < hit else 0
        bounds = [start, *(cut for cut in cuts if start < cut < len(tokens)), len(tokens)]
        tokens_out = [
            self._step(tokens, first, end, hit=hit, window_floor=window_floor, slot=slot)
            for first, end in itertools.pairwise(bounds)
        ]
        return tokens_out[-1]

    def hand_over(self, tokens: Sequence[int], first_token: int, *, window_floor: int = 0, slot: int = 1) -> HandedKv:
        num_tokens, floor = len(tokens), decoder_floor(len(tokens), keep_tokens=KEEP)
        slots = self.block_slots(num_tokens)
        if num_tokens % BLOCK_TOKENS:
            self.cache.zero_tail(slots[-1], num_tokens % BLOCK_TOKENS)
        oldest, middle, newest = [-1, -1, -1, *tokens][-3:]
        return HandedKv(
            blocks=b"".join(self.cache.block_view(block) for block in slots),
            state=self.cache.export_state(slot, num_tokens, first_valid=window_floor, decoder_floor=floor),
            row=RequestRow(
                prompt_tokens=num_tokens,
                decoder_floor=floor,
                window_floor=window_floor,
                last_tokens=(oldest, middle, newest),
                first_token=first_token,
            ),
        )

    def block_slots(self, num_tokens: int) -> tuple[int, ...]:
        """Not the probe's own order, so that nothing can depend on slot numbers."""
        return tuple(len(self.cache.blocks) - 1 - index for index in range(-(-num_tokens // BLOCK_TOKENS)))

    def _step(self, tokens: Sequence[int], start: int, end: int, *, hit: int, window_floor: int, slot: int) -> int:
        chunk = ChunkPlan(
            attempt_id=b"a" * 16,
            start=start,
            end=end,
            hit_tokens=hit,
            window_floor=window_floor,
            decoder_floor=decoder_floor(len(tokens), keep_tokens=KEEP),
            prompt_tokens=len(tokens),
            block_slots=self.block_slots(len(tokens)),
            state_slot=slot,
            snapshot_positions=(),
            is_last=end == len(tokens),
        )
        with torch.inference_mode():
            batch = build_batch(
                StepPlan(step_id=1, chunks=(chunk,)),
                {chunk.attempt_id: AttemptRows(token_ids=np.array(tokens, dtype=np.int32))},
                spec=self.model.spec,
                state=self.cache.state,
                truncation=Truncation.COMPACT,
                device=torch.device("cpu"),
            )
            output = self.model.forward(batch, self.cache, on_layer=ignore_layer)
        return int(output.logits[-1].argmax()) if chunk.is_last else -1


def ignore_layer(layer: int) -> None:
    del layer


@cache
def load(name: str, numerics: Numerics) -> DeepseekV41Flash:
    path = GOLDEN / name
    spec = load_model_spec(path)
    return DeepseekV41Flash(
        spec,
        load_parameters(path, spec, device=torch.device("cpu"), expert_range=range(spec.num_experts)),
        ops=load_ops("ref"),
        numerics=numerics,
        engram_tables=build_engram_tables(spec, path / "tokenizer.json"),
        record_format=RecordFormat.FP4,
    )


def rig(name: str, numerics: Numerics) -> Rig:
    model = load(name, numerics)
    layout = block_layout(model.spec, RecordFormat.FP4)
    state = state_layout(model.spec, keep_tokens=KEEP, rollback_tokens=ROLLBACK)
    return Rig(
        model=model,
        probe=DecodeProbe(model, load_ops("ref"), keep_tokens=KEEP, rollback_tokens=ROLLBACK),
        cache=KvCache(
            model.spec,
            layout=layout,
            state=state,
            num_blocks=5,
            num_state_slots=3,
            device=torch.device("cpu"),
            raw_dtype=None if numerics.quantise_cache else numerics.activation,
        ),
    )


def prompt(length: int) -> list[int]:
    generator = random.Random(f"prompt {length}")
    return [generator.randrange(15, 490) for _ in range(length)]


MODELS = pytest.mark.parametrize(
    ("name", "numerics", "tolerance"),
    [("tiny_quant", PRODUCTION, 0.0), ("tiny_dense", FP32, 1e-5)],
    ids=["quant-bf16", "dense-fp32"],
)


@MODELS
@pytest.mark.parametrize(
    ("length", "cuts"),
    [(1, ()), (7, ()), (23, (8,)), (25, (1, 2)), (128, ()), (129, (127,)), (200, (77, 150)), (301, (128, 299))],
    ids=lambda value: str(value),
)
def test_cold_hand_over_equals_one_shot_prefill(
    name: str, numerics: Numerics, tolerance: float, length: int, cuts: tuple[int, ...]
) -> None:
    engine = rig(name, numerics)
    tokens = prompt(length)
    first_token = engine.prefill(tokens, cuts)
    handed = engine.hand_over(tokens, first_token)
    report = engine.probe.verify(handed, tokens, replayed_hit=None, tolerance=tolerance)
    assert report.problems == ()
    assert report.max_abs_diff <= tolerance
    assert report.cold_kl == pytest.approx(0.0, abs=1e-6)


@MODELS
@pytest.mark.parametrize(("hit", "length"), [(128, 193), (256, 301)])
def test_hit_with_snapshot_equals_a_cold_run(
    name: str, numerics: Numerics, tolerance: float, hit: int, length: int
) -> None:
    engine = rig(name, numerics)
    tokens = prompt(length)
    engine.prefill(tokens[: hit + 5], (70,), slot=0)
    snapshot = engine.cache.take_snapshot(0, hit, first_valid=0)
    engine.cache.restore_snapshot(1, hit, snapshot)
    first_token = engine.prefill(tokens, (hit + 33,), hit=hit, start=hit, slot=1)
    handed = engine.hand_over(tokens, first_token)
    report = engine.probe.verify(handed, tokens, replayed_hit=None, tolerance=tolerance)
    assert report.problems == ()


@MODELS
@pytest.mark.parametrize(
    ("hit", "length", "cuts"), [(128, 193, ()), (128, 301, (120, 131)), (256, 281, (260,)), (100, 130, ())]
)
def test_replayed_hit_equals_a_replay_over_the_same_blocks(
    name: str, numerics: Numerics, tolerance: float, hit: int, length: int, cuts: tuple[int, ...]
) -> None:
    engine = rig(name, numerics)
    tokens = prompt(length)
    start = replay_start(hit, window_tokens=engine.model.spec.window_tokens)
    engine.prefill(tokens[:hit], (), slot=0)
    first_token = engine.prefill(tokens, cuts, hit=hit, start=start, slot=2)
    handed = engine.hand_over(tokens, first_token, window_floor=start, slot=2)
    report = engine.probe.verify(handed, tokens, replayed_hit=hit, tolerance=tolerance)
    assert report.problems == ()
    assert report.is_replayed


def test_replay_is_at_a_distance_from_a_cold_run() -> None:
    engine = rig("tiny_dense", FP32)
    tokens = prompt(193)
    engine.prefill(tokens[:128], (), slot=0)
    first_token = engine.prefill(tokens, (), hit=128, start=112, slot=2)
    handed = engine.hand_over(tokens, first_token, window_floor=112, slot=2)
    replayed = engine.probe.verify(handed, tokens, replayed_hit=128, tolerance=1e-5)
    as_if_cold = engine.probe.verify(handed, tokens, replayed_hit=None, tolerance=1e-5)
    assert replayed.cold_max_abs_diff == pytest.approx(as_if_cold.max_abs_diff)
    assert replayed.cold_max_abs_diff > 1e-3
    assert "request row: window_floor is 112, expected 0" in as_if_cold.problems


@pytest.fixture(scope="module")
def verified() -> tuple[Rig, list[int], HandedKv]:
    """A right hand-over with an open compressor pair and a partial last block."""
    engine = rig("tiny_quant", PRODUCTION)
    tokens = prompt(201)
    first_token = engine.prefill(tokens, (128,))
    return engine, tokens, engine.hand_over(tokens, first_token)


@pytest.mark.parametrize("part", ["encoder", "decoder", "draft", "compressor", "blocks", "tail"])
def test_damage_to_any_part_is_noticed(verified: tuple[Rig, list[int], HandedKv], part: str) -> None:
    engine, tokens, handed = verified
    layout = engine.cache.state
    state_end = layout.compress_state_offset + layout.compress_state_bytes
    half = len(handed.blocks) // 2
    places = {
        "encoder": ("state", 0, layout.decoder_offset),
        "decoder": ("state", layout.decoder_offset, layout.draft_offset),
        "draft": ("state", layout.draft_offset, layout.compress_state_offset),
        "compressor": ("state", layout.compress_state_offset, state_end),
        "blocks": ("blocks", 0, half),
        "tail": ("blocks", half, len(handed.blocks)),
    }
    field, first, end = places[part]
    data = bytearray(getattr(handed, field))
    data[first:end] = bytes(end - first)
    damaged = replace(handed, **{field: bytes(data)})
    report = engine.probe.verify(damaged, tokens, replayed_hit=None)
    assert report.problems != ()


@pytest.mark.parametrize(
    "row",
    [{"decoder_floor": 0}, {"window_floor": 190}, {"last_tokens": (1, 2, 3)}, {"first_token": 3}],
    ids=lambda row: next(iter(row)),
)
def test_a_wrong_request_row_is_noticed(
    verified: tuple[Rig, list[int], HandedKv], row: dict[str, int | tuple[int, int, int]]
) -> None:
    engine, tokens, handed = verified
    fields = {name: getattr(handed.row, name) for name in handed.row.__struct_fields__}
    wrong = replace(handed, row=RequestRow(**{**fields, **row}))
    report = engine.probe.verify(wrong, tokens, replayed_hit=None)
    assert any(problem.startswith(f"request row: {next(iter(row))}") for problem in report.problems)


def test_components_are_joined_in_hand_over_order(verified: tuple[Rig, list[int], HandedKv]) -> None:
    engine, _, handed = verified
    layout = engine.cache.state
    components = {
        common_pb2.COMPONENT_KIND_REQUEST_ROW: handed.row.encode(),
        common_pb2.COMPONENT_KIND_BLOCK_KV: handed.blocks,
        common_pb2.COMPONENT_KIND_COMPRESS_STATE: handed.state[
            layout.compress_state_offset : layout.compress_state_offset + layout.compress_state_bytes
        ],
        common_pb2.COMPONENT_KIND_DRAFT_SWA: handed.state[layout.draft_offset : layout.compress_state_offset],
        common_pb2.COMPONENT_KIND_SWA_DECODER: handed.state[layout.decoder_offset : layout.draft_offset],
        common_pb2.COMPONENT_KIND_SWA_ENCODER: handed.state[: layout.decoder_offset],
    }
    assert join_components(components, layout) == handed


def test_incomplete_components_are_refused(verified: tuple[Rig, list[int], HandedKv]) -> None:
    engine, _, handed = verified
    row = {common_pb2.COMPONENT_KIND_REQUEST_ROW: handed.row.encode()}
    with pytest.raises(KvError, match="hand-over state of 0 bytes"):
        join_components(row, engine.cache.state)
    with pytest.raises(KvError, match="expected REQUEST_ROW"):
        join_components({}, engine.cache.state)


def test_missing_blocks_and_a_missing_first_token_are_refused(verified: tuple[Rig, list[int], HandedKv]) -> None:
    engine, _, handed = verified
    with pytest.raises(KvError, match="bytes of blocks, expected 2 x"):
        engine.probe.next_logits(replace(handed, blocks=handed.blocks[:-1]))
    fields = {name: getattr(handed.row, name) for name in handed.row.__struct_fields__}
    with pytest.raises(KvError, match="no first token"):
        engine.probe.next_logits(replace(handed, row=RequestRow(**{**fields, "first_token": -1})))
