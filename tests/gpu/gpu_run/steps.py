"""Whole steps of the released model with one EP8 rank's experts and random weights: 20 encoder layers, decoder replay, the fit.

The expert choice is biased to the experts held here, so the rank computes as many pairs as in a balanced EP8 group; the exchange
between GPUs is not there (one GPU) and not simulated.
"""

from collections.abc import Sequence
from typing import Any

import torch
from gpu_run.sections import SEED, Bench, show
from gpu_run.stopwatch import Timing
from torch import Tensor

from prefill_engine.kv_cache import KvCache
from prefill_engine.model.flash import DeepseekV41Flash
from prefill_engine.model.parameters import ModelParameters
from prefill_plan.model_spec import ModelSpec
from prefill_testing.released_step import (
    LOCAL_EXPERTS,
    StepShape,
    released_batch,
    released_cache,
    released_model,
    released_parameters,
    released_spec,
)

CONTEXT = 131_072
_ENGRAM_ROWS_PER_HEAD = 1_000_000
"""6.3 GB per layer; lookups are as random as with the real 101 GB."""


def build_model(bench: Bench) -> DeepseekV41Flash:
    """The released model on the device, every byte random but scales, which keep values near one."""
    spec = released_spec(engram_rows_per_head=_ENGRAM_ROWS_PER_HEAD)
    parameters = released_parameters(spec, bench.device)
    if not bench.is_dry:
        _fill(parameters, torch.Generator(device=bench.device).manual_seed(SEED))
    return released_model(spec, parameters, bench.ops)


def time_steps(bench: Bench, model: DeepseekV41Flash, rows: Sequence[int]) -> None:
    """Step times at the end of a 131,072-token context; encoder only, then with the decoder's replay of 140 rows."""
    table: list[dict[str, Any]] = bench.log.results.setdefault("steps", [])
    for num_rows in rows:
        for is_last in (False, True):
            name = f"step {num_rows} rows{' + replay' if is_last else ''}"
            if not bench.log.has_time(name, 20):
                continue
            timing = _time_step(bench, model, StepShape(rows=num_rows, context=CONTEXT, is_last=is_last))
            row = {"rows": num_rows, "replay": is_last, "ms": timing.median, "low": timing.low, "high": timing.high}
            row["tokens_per_s"] = None if timing.median is None else num_rows / timing.median * 1000
            table.append(row)
            bench.log.say(f"{name}: {show(timing.median)} ms, {show(row['tokens_per_s'])} tokens/s")


def _time_step(bench: Bench, model: DeepseekV41Flash, shape: StepShape) -> Timing:
    cache = filled_cache(bench, model, shape)
    batch = released_batch(model.spec, cache, shape, bench.device)

    def step() -> Tensor:
        with torch.inference_mode():
            return model.forward(batch, cache, on_layer=lambda _layer: None).logits

    return bench.watch.time(step, runs=3, warm=1)


def filled_cache(bench: Bench, model: DeepseekV41Flash, shape: StepShape) -> KvCache:
    """A cache of random entries. With zeros all scores of the context would tie: every row would select the same entries, and
    their keys would always come from L2."""
    cache = released_cache(model.spec, shape, bench.device)
    if not bench.is_dry:
        fill_cache(cache, model.spec, torch.Generator(device=bench.device).manual_seed(SEED))
    return cache


def fill_cache(cache: KvCache, spec: ModelSpec, generator: torch.Generator) -> None:
    """Random FP4 records, index keys and window records in place: any code but NaN, scales that keep values near one."""
    for source in cache.layout.sources:
        main = cache.main_pages(source.layer)
        main[..., : spec.head_dim // 2].random_(0, 256, generator=generator)
        main[..., spec.head_dim // 2 :].random_(0x28, 0x38, generator=generator)
        data, scales = cache.index_pages(source.layer)
        data.random_(0, 256, generator=generator)
        scales.random_(124, 128, generator=generator)
    for layer in range(cache.state.num_layers):
        ring = cache.window_ring(layer)
        ring[..., : spec.head_dim].random_(0, 0x78, generator=generator)
        ring[..., spec.head_dim :].random_(116, 120, generator=generator)


def fit_steps(bench: Bench) -> None:
    """step(ms) = a + b * tokens by least squares over the steps without replay; replay cost as the median difference."""
    table = [row for row in bench.log.results.get("steps", []) if row["ms"] is not None]
    plain = {row["rows"]: row["ms"] for row in table if not row["replay"]}
    replay = {row["rows"]: row["ms"] for row in table if row["replay"]}
    bench.log.results["fit"] = {
        **fit_line(list(plain.items())),
        "replay_ms": {rows: replay[rows] - plain[rows] for rows in plain.keys() & replay.keys()},
    }


def fit_line(points: Sequence[tuple[int, float]]) -> dict[str, float | None]:
    """a (ms) and b (microseconds per token); None with fewer than two points."""
    if len(points) < 2:
        return {"a_ms": None, "b_us_per_token": None}
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return {"a_ms": mean_y - slope * mean_x, "b_us_per_token": slope * 1000}


def _fill(parameters: ModelParameters, generator: torch.Generator) -> None:
    """Random values in place: e4m3 codes without NaN, exponents near 2 ** -9, small bf16, expert choice among those held."""
    for name, tensor in _tensors(parameters):
        if name.endswith("scale") and tensor.dtype == torch.uint8:
            tensor.random_(116, 120, generator=generator)
        elif tensor.dtype == torch.uint8:
            tensor.random_(0, 256, generator=generator)
        elif tensor.dtype == torch.float8_e4m3fn:
            codes = tensor.view(torch.uint8)
            codes.random_(0, 0x78, generator=generator)
        else:
            tensor.normal_(0, 0.02, generator=generator)
    for layer in parameters.layers:
        layer.moe.bias[LOCAL_EXPERTS:] = -1e9
        if layer.moe.image_bias is not None:
            layer.moe.image_bias[LOCAL_EXPERTS:] = -1e9


def _tensors(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Every tensor below a frozen record, with its field's name."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, tuple):
        return [pair for item in value for pair in _tensors(item, name)]
    fields = getattr(value, "__dataclass_fields__", {})
    return [pair for field in fields for pair in _tensors(getattr(value, field), field)]
