"""The reference op set: exactly the names of the `Ops` protocol, in plain torch, for any device."""

from prefill_kernels.ref.embed_tokens import embed_tokens
from prefill_kernels.ref.engram import engram_gate, engram_hash, engram_lookup
from prefill_kernels.ref.entries import index_query, index_values, load_index, load_main, store_index, store_main
from prefill_kernels.ref.experts import combine_experts, routed_experts, shared_expert
from prefill_kernels.ref.index_select import index_select
from prefill_kernels.ref.linear import grouped_linear, linear, linear_pair, lm_head
from prefill_kernels.ref.mhc import mhc_expand, mhc_input, mhc_mean, mhc_turn
from prefill_kernels.ref.pool_pairs import pool_pairs
from prefill_kernels.ref.records import decode_window
from prefill_kernels.ref.rms_norm import norm_rows, quantise_rows, rms_norm
from prefill_kernels.ref.route import route
from prefill_kernels.ref.rows import gather_rows, scatter_rows
from prefill_kernels.ref.sparse_attention import sparse_attention
from prefill_kernels.ref.window_rows import window_rows

__all__ = [
    "combine_experts",
    "decode_window",
    "embed_tokens",
    "engram_gate",
    "engram_hash",
    "engram_lookup",
    "gather_rows",
    "grouped_linear",
    "index_query",
    "index_select",
    "index_values",
    "linear",
    "linear_pair",
    "lm_head",
    "load_index",
    "load_main",
    "mhc_expand",
    "mhc_input",
    "mhc_mean",
    "mhc_turn",
    "norm_rows",
    "pool_pairs",
    "quantise_rows",
    "rms_norm",
    "route",
    "routed_experts",
    "scatter_rows",
    "shared_expert",
    "sparse_attention",
    "store_index",
    "store_main",
    "window_rows",
]
