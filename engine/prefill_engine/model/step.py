"""What the modules of the model hand to each other: fixed equipment, one step's inputs, the residual, the shared KV.

All of it is frozen. The cross-layer state of model.md 1.3 is SharedKv: a layer takes one and returns one, nothing is written
sideways; what outlives the step is in the KvCache and is written only through slots of the Batch.

Legend: N rows, D hidden, S residual streams, C head dim, I index head dim, K index top-k, E gathered entries.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from prefill_engine.batch import Batch
from prefill_engine.kv_cache import KvCache
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import IndexRows, MhcOutput, Ops

Observer = Callable[[str, int, Tensor], None]
"""Called as observe(name, layer, tensor) with intermediate values; the names are listed in flash.py. It must not keep a tensor
without cloning it."""


def ignore(_name: str, _layer: int, _tensor: Tensor) -> None:
    """The observer of production: none."""


def never_wait(_layer: int) -> None:
    """The gate of steps whose pages are all in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """The same for every module and every step. record_format: "fp4" or "fp8" main-KV records (ignored by a raw cache)."""

    ops: Ops
    numerics: Numerics
    record_format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward pass: its batch, the caches it reads and writes, and who watches.

    wait_source(layer) is called just before the pages of KV source `layer` are first read: entries of a hit may still be on
    their way into them. It never touches what the step itself writes.
    """

    batch: Batch
    cache: KvCache
    observe: Observer
    wait_source: Callable[[int], None] = never_wait

    @property
    def is_observed(self) -> bool:
        """Whether values that only an observer wants are worth their computation."""
        return self.observe is not ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Between two sub-layers, before the first one's output is spread over the streams: one pass does that, collapses and norms.

    streams: [N, S, D] act that the last sub-layer read. pre: [N, S] wide, collapses the new streams for the next one.
    output: of the last sub-layer; None: `streams` are new already.
    """

    streams: Tensor
    pre: Tensor
    output: MhcOutput | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKv:
    """What a layer reads of the nearest KV, index-key and top-k source at or before it (model.md 1.2).

    main_kv: [E, C] act, all visible entries of all sequences, decoded. index_keys: [E] rows, in the same order.
    selected: [N, K] int32 rows of main_kv, ascending, -1 padded. candidates: [N, candidate blocks] int32 block numbers within the
    sequence, ascending, -1 padded. None: no source has run yet.
    """

    main_kv: Tensor | None = None
    index_keys: IndexRows | None = None
    selected: Tensor | None = None
    candidates: Tensor | None = None
