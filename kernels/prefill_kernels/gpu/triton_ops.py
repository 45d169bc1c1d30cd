"""The Triton op set: the launchers of this package, bound to one chip. The only module that knows all of them."""

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor

from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.combine_experts import combine_experts
from prefill_kernels.gpu.embed_tokens import embed_tokens
from prefill_kernels.gpu.engram import engram_gate, engram_hash, engram_lookup
from prefill_kernels.gpu.experts import routed_experts, shared_expert
from prefill_kernels.gpu.grouped_linear import grouped_linear
from prefill_kernels.gpu.index_rows import index_query, index_values, load_index, store_index
from prefill_kernels.gpu.index_select import index_select
from prefill_kernels.gpu.main_entries import load_main, store_main
from prefill_kernels.gpu.matmul import linear, linear_pair, lm_head
from prefill_kernels.gpu.mhc import mhc_expand, mhc_input, mhc_mean, mhc_turn
from prefill_kernels.gpu.norm_rows import norm_rows, quantise_rows, rms_norm
from prefill_kernels.gpu.pool_pairs import pool_pairs
from prefill_kernels.gpu.route import route
from prefill_kernels.gpu.rows import gather_rows, scatter_rows
from prefill_kernels.gpu.sparse_attention import sparse_attention
from prefill_kernels.gpu.window_rows import decode_window, window_rows
from prefill_kernels.numerics import PRODUCTION, Numerics
from prefill_kernels.ops import Ops

_LAUNCHERS: tuple[Callable[..., Any], ...] = (
    combine_experts,
    decode_window,
    engram_gate,
    engram_hash,
    engram_lookup,
    gather_rows,
    grouped_linear,
    index_query,
    index_select,
    index_values,
    linear,
    linear_pair,
    lm_head,
    load_index,
    load_main,
    mhc_expand,
    mhc_input,
    mhc_mean,
    mhc_turn,
    norm_rows,
    pool_pairs,
    quantise_rows,
    rms_norm,
    route,
    routed_experts,
    scatter_rows,
    shared_expert,
    sparse_attention,
    store_index,
    store_main,
    window_rows,
)


def triton_ops(chip: Chip) -> Ops:
    """Every op, its configuration chosen for `chip`. The first op of a step refuses any numerics but production (C21)."""
    bound = {launcher.__name__: _bind(launcher, chip) for launcher in _LAUNCHERS}
    return cast(Ops, SimpleNamespace(embed_tokens=_embed_tokens, **bound))


def _bind(launcher: Callable[..., Any], chip: Chip) -> Callable[..., Any]:
    return partial(launcher, chip=chip) if "chip" in inspect.signature(launcher).parameters else launcher


def _embed_tokens(weight_VD: Tensor, token_ids_N: Tensor, *, numerics: Numerics) -> Tensor:
    """Raises ValueError: numerics other than bf16 activations with quantised caches."""
    if numerics != PRODUCTION:
        raise ValueError(f"Triton ops compute with {PRODUCTION}, not with {numerics}; op set 'ref' does both")
    return embed_tokens(weight_VD, token_ids_N, numerics=numerics)
