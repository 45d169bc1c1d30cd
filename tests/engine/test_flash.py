import dataclasses

import torch

from prefill_engine.batch import build_batch
from prefill_engine.check.golden import attempt_rows
from prefill_engine.kv_cache import KvCache
from prefill_engine.prompt_run import AttemptTerms
from prefill_engine.step_plan import ChunkPlan, StepPlan
from prefill_plan.config import RecordFormat, Truncation
from prefill_testing.tiny_model import CPU, prompt_run, random_tokens, run_step, tiny_cache, tiny_model


def cache_bytes(kv_cache: KvCache) -> list[torch.Tensor]:
    """Copies of every byte a step may write."""
    rings = [kv_cache.window_ring(layer).clone() for layer in range(kv_cache.state.num_layers)]
    pairs = [kv_cache.compress_state(s.layer).clone() for s in kv_cache.layout.sources if s.ratio == 2]
    return [kv_cache.blocks.clone(), *rings, *pairs]


def poison(kv_cache: KvCache, byte: int) -> None:
    kv_cache.blocks[:] = byte
    for layer in range(kv_cache.state.num_layers):
        kv_cache.window_ring(layer)[:] = byte
    for source in kv_cache.layout.sources:
        if source.ratio == 2:
            kv_cache.compress_state(source.layer).view(torch.uint8)[:] = byte


def lone_chunk(start: int, end: int, *, prompt_tokens: int, decoder_floor: int = 0) -> ChunkPlan:
    return ChunkPlan(
        attempt_id=b"a",
        start=start,
        end=end,
        hit_tokens=0,
        window_floor=0,
        decoder_floor=decoder_floor,
        prompt_tokens=prompt_tokens,
        block_slots=(1, 0),
        state_slot=1,
        snapshot_positions=(),
        is_last=end == prompt_tokens,
    )


def test_placeholder_step_writes_nothing_and_runs_every_layer() -> None:
    model = tiny_model()
    kv_cache = tiny_cache(model, num_blocks=2, num_state_slots=2)
    poison(kv_cache, 0xA5)
    before = cache_bytes(kv_cache)
    batch = build_batch(
        StepPlan(step_id=1, chunks=()),
        {},
        spec=model.spec,
        state=kv_cache.state,
        truncation=Truncation.COMPACT,
        device=CPU,
    )
    layers: list[int] = []
    output = model.forward(batch, kv_cache, on_layer=layers.append)
    assert layers == list(range(model.spec.num_layers))
    assert output.logits.shape == (0, model.spec.vocab_size)
    assert all(torch.equal(a, b) for a, b in zip(cache_bytes(kv_cache), before, strict=True))


def test_nothing_is_read_that_the_attempt_has_not_written() -> None:
    model, tokens = tiny_model(), random_tokens(1, 150)
    rows = {b"a": attempt_rows({"input_ids": torch.from_numpy(tokens)})}
    logits = []
    for byte in (0x00, 0xFF):  # 0xFF is NaN as e4m3, as ue8m0 and as float32
        kv_cache = tiny_cache(model, num_blocks=2, num_state_slots=2)
        poison(kv_cache, byte)
        run_step(model, kv_cache, [lone_chunk(0, 71, prompt_tokens=150, decoder_floor=126)], rows)
        logits.append(run_step(model, kv_cache, [lone_chunk(71, 150, prompt_tokens=150, decoder_floor=126)], rows))
    assert bool(logits[0].isfinite().all())
    assert torch.equal(logits[0], logits[1])


def test_logits_are_those_of_finished_prompts_in_chunk_order() -> None:
    model = tiny_model()
    tokens = [random_tokens(seed, 20) for seed in range(3)]
    rows = {bytes([i]): attempt_rows({"input_ids": torch.from_numpy(t)}) for i, t in enumerate(tokens)}
    chunks = [
        dataclasses.replace(lone_chunk(0, end, prompt_tokens=20), attempt_id=bytes([i]), block_slots=(i,), state_slot=i)
        for i, end in enumerate((20, 9, 20))
    ]
    logits = run_step(model, tiny_cache(model, num_blocks=3, num_state_slots=3), chunks, rows)
    alone = [prompt_run(model, rows[bytes([i])]).prefill([0, 20], AttemptTerms()) for i in (0, 2)]
    assert torch.equal(logits, torch.stack([row for row in alone if row is not None]))


def test_observing_does_not_change_the_result() -> None:
    model, tokens = tiny_model(), random_tokens(2, 40)
    rows = {b"a": attempt_rows({"input_ids": torch.from_numpy(tokens)})}
    chunk = lone_chunk(0, 40, prompt_tokens=40)
    kv_cache = tiny_cache(model, num_blocks=2, num_state_slots=2)
    batch = build_batch(
        StepPlan(step_id=1, chunks=(chunk,)),
        rows,
        spec=model.spec,
        state=kv_cache.state,
        truncation=Truncation.COMPACT,
        device=CPU,
    )
    seen: set[tuple[str, int]] = set()
    output = model.forward(batch, kv_cache, on_layer=lambda _layer: None, observe=lambda n, i, _t: seen.add((n, i)))
    assert torch.equal(output.logits, run_step(model, kv_cache, [chunk], rows))
    per_layer = {name for name, layer in seen if layer == model.spec.first_decoder_layer}
    assert per_layer == {
        "ckv_pre", "ckv_post", "index_k", "swa", "topk", "candidates", "attn_out", "router_ids", "router_w", "stream", "premix",
    }  # fmt: skip
    assert {name for name, layer in seen if layer == -1} == {"emb", "main_hidden", "final_hidden", "logits"}


def test_fp8_records_give_another_block_layout_and_close_logits() -> None:
    tokens = attempt_rows({"input_ids": torch.from_numpy(random_tokens(3, 140))})
    logits = []
    for record_format in RecordFormat:
        run = prompt_run(tiny_model(record_format=record_format), tokens)
        logits.append(run.prefill([0, 140], AttemptTerms()))
        assert run.cache.blocks.shape[1] == run.cache.layout.stride_bytes
    assert logits[0] is not None
    assert logits[1] is not None
    assert 0 < float((logits[0] - logits[1]).abs().max()) < 3.0  # fp4 noise of the tiny model, not another function
