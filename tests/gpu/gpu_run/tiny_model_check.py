"""The golden tiny model on the GPU beside `ref` on the CPU, layer by layer.

What the op cases leave out (chunks, pages, candidates, pooled pairs, Engram hashes) meets real batches here.
"""

import torch
from gpu_run.sections import Bench
from torch import Tensor

from prefill_testing.tiny_comparison import compare_layers, run_observed
from prefill_testing.tiny_model import random_tokens


def check_tiny_model(bench: Bench) -> None:
    """Two chunks of one prompt; per observed tensor the relative L2 distance to `ref` goes into the results."""
    tokens = random_tokens(3, 300)
    expected = run_observed(bench.ref, torch.device("cpu"), tokens, chunk=160)
    actual = run_observed(bench.ops, bench.device, tokens, chunk=160)
    rows = compare_layers({key: _cpu(value) for key, value in actual.items()}, expected)
    bench.log.results["tiny_model"] = rows
    worst = max(rows, key=lambda row: row["distance"])
    bench.log.say(
        f"tiny model: worst of {len(rows)} tensors {worst['name']} of layer {worst['layer']}: {worst['distance']:.2e}"
    )


def _cpu(value: Tensor) -> Tensor:
    return value.cpu()
