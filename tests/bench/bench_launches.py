"""Launches of one step of the released model, and the host time to issue them, counted without a GPU.

    python tests/bench/bench_launches.py [--json] [--runs N]

The step runs on the "meta" device and Triton's launch is replaced by a note. Nothing is computed, so nothing can ask the host for
a value; what is timed is the Python of the model and of the launchers alone. The kernels' own time is a GPU's business.
"""

import argparse
import json
import platform
import statistics
import time
from collections import Counter
from typing import Any

import torch

from prefill_engine.batch import Batch
from prefill_engine.kv_cache import KvCache
from prefill_engine.model.flash import DeepseekV41Flash
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.triton_ops import triton_ops
from prefill_testing.launch_recorder import Launch, recorded_launches
from prefill_testing.released_step import (
    StepShape,
    released_batch,
    released_cache,
    released_model,
    released_parameters,
    released_spec,
)

SHAPES = (
    StepShape(rows=32768, context=131072, is_last=False),
    StepShape(rows=32768, context=131072, is_last=True),
    StepShape(rows=4096, context=131072, is_last=False),
)
META = torch.device("meta")


def count_launches(model: DeepseekV41Flash, shape: StepShape, *, runs: int) -> dict[str, Any]:
    """Launches by kernel and by layer, and host CPU milliseconds of `runs` steps after one untimed."""
    cache = released_cache(model.spec, shape, META)
    batch = released_batch(model.spec, cache, shape, META)
    millis = []
    launches, layer_ends = _step(model, batch, cache)  # the first one imports torch's meta kernels
    for _ in range(runs):
        begin = time.process_time()
        launches, layer_ends = _step(model, batch, cache)
        millis.append(1000 * (time.process_time() - begin))
    per_layer = [end - start for start, end in zip([0, *layer_ends], layer_ends, strict=False)]
    return {
        "rows": shape.rows,
        "replay": shape.is_last,
        "launches": len(launches),
        "per_layer": per_layer,
        "kernels": dict(Counter(launch.kernel for launch in launches).most_common()),
        "host_ms": statistics.median(millis),
        "host_ms_low": min(millis),
        "host_ms_high": max(millis),
    }


def _step(model: DeepseekV41Flash, batch: Batch, cache: KvCache) -> tuple[list[Launch], list[int]]:
    """Launches of one step, and how many there were at the end of each layer."""
    layer_ends: list[int] = []
    with recorded_launches() as launches, torch.inference_mode():
        model.forward(batch, cache, on_layer=lambda _layer: layer_ends.append(len(launches)))
    return launches, layer_ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="all counts, for tests")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="steps per shape")
    args = parser.parse_args()
    spec = released_spec()
    model = released_model(spec, released_parameters(spec, META), triton_ops(Chip.SM_90))
    found = [count_launches(model, shape, runs=args.runs) for shape in SHAPES]
    if args.json:
        print(json.dumps(found))
        return
    print(f"host: {platform.processor() or platform.machine()}, torch {torch.__version__}; sm_90 configuration")
    for row in found:
        encoder = row["per_layer"][:20]
        print(
            f"{row['rows']} rows{' + replay' if row['replay'] else ''}: {row['launches']} launches, "
            f"encoder layers {min(encoder)} to {max(encoder)}, "
            f"host CPU {row['host_ms']:.1f} ms ({row['host_ms_low']:.1f} to {row['host_ms_high']:.1f})"
        )
        for kernel, count in row["kernels"].items():
            print(f"  {count:5d}  {kernel}")


if __name__ == "__main__":
    main()
