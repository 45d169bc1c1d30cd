"""The reference op set: exactly the names of the `Ops` protocol, in plain torch, for any device."""

from prefill_kernels.ref.embed_tokens import embed_tokens
from prefill_kernels.ref.engram import engram_gate, engram_hash, engram_lookup
from prefill_kernels.ref.experts import combine_experts, routed_experts, shared_expert
from prefill_kernels.ref.index_select import index_select
from prefill_kernels.ref.linear import grouped_linear, linear, lm_head
from prefill_kernels.ref.mhc import mhc_collapse, mhc_expand, mhc_mean, mhc_mixes
from prefill_kernels.ref.pool_pairs import pool_pairs
from prefill_kernels.ref.records import (
    decode_index,
    decode_main,
    decode_window,
    encode_index,
    encode_main,
    encode_window,
    quantise_index_query,
)
from prefill_kernels.ref.rms_norm import rms_norm
from prefill_kernels.ref.rope import rope
from prefill_kernels.ref.route import route
from prefill_kernels.ref.rows import gather_rows, scatter_rows
from prefill_kernels.ref.sparse_attention import sparse_attention

__all__ = [
    "combine_experts",
    "decode_index",
    "decode_main",
    "decode_window",
    "embed_tokens",
    "encode_index",
    "encode_main",
    "encode_window",
    "engram_gate",
    "engram_hash",
    "engram_lookup",
    "gather_rows",
    "grouped_linear",
    "index_select",
    "linear",
    "lm_head",
    "mhc_collapse",
    "mhc_expand",
    "mhc_mean",
    "mhc_mixes",
    "pool_pairs",
    "quantise_index_query",
    "rms_norm",
    "rope",
    "route",
    "routed_experts",
    "scatter_rows",
    "shared_expert",
    "sparse_attention",
]
