"""Whether the host leaves a step alone on the GPU: no synchronisation inside it, and all of it replayed as one CUDA graph.

A step on the "meta" device already shows that nothing asks for a value; a copy from pageable host memory, an allocation that
synchronises or a launch that a capture forbids only shows here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from gpu_run.sections import Bench
from gpu_run.steps import CONTEXT, filled_cache
from torch import Tensor

from prefill_engine.model.flash import DeepseekV41Flash
from prefill_testing.released_step import StepShape, released_batch

ROWS = 4096
_STATE_SLOT = 0
NAMES = ("step without host sync", "step as a CUDA graph")


def check_step(bench: Bench, model: DeepseekV41Flash) -> None:
    """Verdicts into the results' correctness; the replay's time, to stand beside the same step's, as graph_ms."""
    shape = StepShape(rows=ROWS, context=CONTEXT, is_last=True)
    cache = filled_cache(bench, model, shape)
    batch = released_batch(model.spec, cache, shape, bench.device)

    def step() -> Tensor:
        return model.forward(batch, cache, on_layer=lambda _layer: None).logits

    def from_the_start(run: Callable[[], Tensor]) -> Tensor:
        """A step overwrites the rings that its history is read from; with cleared ones it can be repeated."""
        cache.clear_state(_STATE_SLOT)
        return run().clone()

    with torch.inference_mode():
        if bench.is_dry:
            step()
            verdicts = dict.fromkeys(NAMES, "dry run")
        else:
            expected = from_the_start(step)  # compiles what is still missing
            checks = (lambda: _without_sync(step), lambda: _as_graph(bench, step, from_the_start, expected))
            verdicts = {name: _verdict(check) for name, check in zip(NAMES, checks, strict=True)}
    bench.log.results.setdefault("correctness", {}).update(verdicts)
    for name, verdict in verdicts.items():
        bench.log.say(f"{name}: {verdict}")


def _without_sync(step: Callable[[], Tensor]) -> str:
    with _syncs_are_errors():
        step()
    return "ok"


def _as_graph(
    bench: Bench, step: Callable[[], Tensor], from_the_start: Callable[[Callable[[], Tensor]], Tensor], expected: Tensor
) -> str:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    logits.zero_()
    if not torch.equal(from_the_start(replay), expected):
        return f"logits of {ROWS} rows differ from those of the same step without a graph"
    bench.log.results["graph_ms"] = bench.watch.time(replay, runs=3, warm=1).median
    return "ok"


def _verdict(check: Callable[[], str]) -> str:
    try:
        return check()
    except Exception as error:  # told, and the run goes on
        return f"{type(error).__name__}: {str(error)[:300]}"


@contextmanager
def _syncs_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
