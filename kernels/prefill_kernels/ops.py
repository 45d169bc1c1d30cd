"""The operations a prefill engine needs, as one protocol with two implementations: `ref` (plain torch, the definition
and the CPU backend) and `gpu` (Triton).

Models receive an `Ops` and call it; nothing else in the house knows which implementation runs. The contract of each op
(formula, rounding points, source) is the docstring of `ref/<op>.py`; here are the shapes. Legend:

    N rows of the step (all sequences back to back), B sequences (chunks), D hidden, S residual streams, H heads, C
    head dim, I index head dim, K index top-k, W window, E compressed entries of all sequences back to back, V
    vocabulary, X experts

Ragged batches are described by `cu_rows_B1` ([B + 1] int32: rows of sequence b are cu_rows[b]..cu_rows[b+1]). Index
tensors are int32 (int64 where said), -1 is "none". "act" is numerics.activation. The trap: row results must not
depend on the other rows of the batch nor on where a chunk was cut (decisions 22, C10), so every reduction has a fixed
order and a fixed width.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from prefill_kernels.numerics import Numerics
from prefill_kernels.weights import DenseWeight, EngramTable, ExpertWeights, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class MhcMixes:
    """Mixes of one sub-layer: pre [N, S], post [N, S], comb [N, S in, S out], all wide (fp32)."""

    pre: Tensor
    post: Tensor
    comb: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSelection:
    """Entries picked by an indexer.

    entries: [N, K] int32, positions within the row's own sequence, ascending, -1 padded at the end.
    candidates: [N, topk_blocks] int32 block numbers, ascending, -1 padded; None unless asked for.
    """

    entries: Tensor
    candidates: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """expert_ids [N, top-k] int32 ascending by id; weights [N, top-k] fp32, normalised and scaled, in that order."""

    expert_ids: Tensor
    weights: Tensor


class Ops(Protocol):
    """Everything the forward pass of model.md sections 2 and 3 is made of."""

    def embed_tokens(self, weight_VD: Tensor, token_ids_N: Tensor, *, numerics: Numerics) -> Tensor:
        """[N, D] act; ids outside [0, V) give zero rows."""
        ...

    def mhc_mixes(
        self,
        streams_NSD: Tensor,
        fn_MF: Tensor,
        base_M: Tensor,
        scale_3: Tensor,
        *,
        num_iters: int,
        hc_eps: float,
        rms_eps: float,
    ) -> MhcMixes:
        """Mixes of one sub-layer from its input streams; fn [2S + S*S, S*D], base [2S + S*S], scale [3], all fp32."""
        ...

    def mhc_collapse(self, streams_NSD: Tensor, pre_NS: Tensor) -> Tensor:
        """[N, D] in the streams' dtype."""
        ...

    def mhc_expand(self, y_ND: Tensor, streams_NSD: Tensor, post_NS: Tensor, comb_NSS: Tensor) -> Tensor:
        """[N, S, D] in the streams' dtype; a new tensor."""
        ...

    def mhc_mean(self, streams_NSD: Tensor) -> Tensor:
        """[N, D] mean over streams (DSpark feature), in the streams' dtype."""
        ...

    def rms_norm(self, x_ND: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
        """[.., D] in x's dtype, one rounding at the end."""
        ...

    def linear(self, x_NK: Tensor, weight: Weight, *, numerics: Numerics, wide_output: bool = False) -> Tensor:
        """[N, out] = x . weight^T in act (or wide) dtype; quantises x first when weight and numerics say so."""
        ...

    def grouped_linear(self, x_NGK: Tensor, weight: Weight, *, numerics: Numerics) -> Tensor:
        """[N, G * out_per_group] act: group g of x times rows g of weight [G * out_per_group, K]; x is never
        quantised (profile R)."""
        ...

    def rope(self, x_NHC: Tensor, positions_N: Tensor, frequencies: Tensor, *, inverse: bool = False) -> Tensor:
        """x [N, .., C] with its last 2 * len(frequencies) channels rotated, rounded to x's dtype; a new tensor."""
        ...

    def pool_pairs(
        self,
        latent_NC: Tensor,
        score_NC: Tensor,
        state_ZR2C: Tensor,
        state_slots_B: Tensor,
        starts_B: Tensor,
        cu_rows_B1: Tensor,
        *,
        numerics: Numerics,
    ) -> Tensor:
        """[G, C] act: one row per ratio-2 group that closes in the step, sequences in order. Reads, then updates
        state in place; state slot -1 (placeholder): nothing is read or written."""
        ...

    def encode_window(self, kv_NC: Tensor, *, numerics: Numerics) -> Tensor:
        """Window records: [N, C + C/32] uint8, or [N, C] in x's dtype when the cache is not quantised (raw format)."""
        ...

    def decode_window(self, records_NR: Tensor, *, numerics: Numerics) -> Tensor:
        """[N, C] act."""
        ...

    def encode_main(self, kv_NC: Tensor, *, record_format: str, numerics: Numerics) -> Tensor:
        """Main-KV records: "fp4" [N, C/2 + C/16] uint8, "fp8" [N, C + C/32] uint8, or raw [N, C]."""
        ...

    def decode_main(self, records_NR: Tensor, *, record_format: str, numerics: Numerics) -> Tensor:
        """[N, C] act."""
        ...

    def encode_index(self, key_NI: Tensor, *, numerics: Numerics) -> tuple[Tensor, Tensor]:
        """Index-key (data [N, I/2], scales [N, I/32]) uint8; raw format: (key [N, I], empty [N, 0])."""
        ...

    def decode_index(self, data_NR: Tensor, scales_NS: Tensor, *, numerics: Numerics) -> Tensor:
        """[N, I] act."""
        ...

    def quantise_index_query(self, query_NHI: Tensor, *, numerics: Numerics) -> Tensor:
        """Round trip through e2m1 with ue8m0 scales of 32; identity when the cache is not quantised."""
        ...

    def gather_rows(self, x_MR: Tensor, index_N: Tensor) -> Tensor:
        """[N, R] bitwise copies of x's rows; an index outside [0, M) gives a zero row. x may be strided, and may be
        pages [Z, E, R]: then index z * E + e is row e of page z (pages are views of cache blocks that can't be
        flattened)."""
        ...

    def scatter_rows(self, x_MR: Tensor, index_N: Tensor, rows_NR: Tensor) -> None:
        """x[index[n]] = rows[n] in place, bitwise; index -1 writes nothing; indices are unique. x as in gather_rows."""
        ...

    def index_select(
        self,
        query_NHI: Tensor,
        head_weight_NH: Tensor,
        keys_EI: Tensor,
        key_start_N: Tensor,
        num_visible_N: Tensor,
        *,
        topk: int,
        numerics: Numerics,
        candidates_NB: Tensor | None = None,
        candidate_block: int = 0,
        num_candidate_blocks: int = 0,
    ) -> IndexSelection:
        """Best `topk` of the row's visible entries, which are keys[key_start : key_start + num_visible].

        candidates given: only entries inside those blocks compete. num_candidate_blocks > 0: candidates are returned
        too (from all visible entries). Ties go to the lowest index.
        """
        ...

    def sparse_attention(
        self,
        query_NHC: Tensor,
        window_keys_MC: Tensor,
        window_index_NW: Tensor,
        entries_EC: Tensor | None,
        entry_index_NK: Tensor | None,
        sink_H: Tensor,
        *,
        scale: float,
        numerics: Numerics,
    ) -> Tensor:
        """[N, H, C] act: softmax over window keys and selected entries with a per-head sink; K = V. Both index
        tensors are rows of their key tensor (already offset per sequence), -1 = empty slot. entries None: window
        only."""
        ...

    def route(
        self,
        x_ND: Tensor,
        gate_XD: Tensor,
        bias_X: Tensor,
        image_bias_X: Tensor | None,
        is_image_N: Tensor,
        *,
        topk: int,
        scaling: float,
        numerics: Numerics,
    ) -> Routing:
        """Experts of each row; is_image [N] bool rows use image_bias for the choice."""
        ...

    def routed_experts(
        self,
        x_ND: Tensor,
        routing: Routing,
        experts: ExpertWeights,
        *,
        first_expert: int,
        swiglu_limit: float,
        numerics: Numerics,
    ) -> Tensor:
        """[N, top-k, D] act, slot order of routing; slots of experts outside [first_expert, first_expert + local) are
        zero."""
        ...

    def shared_expert(self, x_ND: Tensor, expert: ExpertWeights, *, swiglu_limit: float, numerics: Numerics) -> Tensor:
        """[N, D] act."""
        ...

    def combine_experts(self, routed_NKD: Tensor, shared_ND: Tensor) -> Tensor:
        """[N, D]: sum over slots in order, then shared, accumulated wide, one rounding to the inputs' dtype."""
        ...

    def engram_hash(
        self,
        compressed_ids_N: Tensor,
        history_B3: Tensor,
        cu_rows_B1: Tensor,
        *,
        multipliers: Tensor,
        primes: Tensor,
        offsets: Tensor,
        pad_id: int,
    ) -> Tensor:
        """[N, num n-gram sizes * heads] int64 table rows. compressed_ids int64, -1 = image; history: the ids before
        each chunk, oldest first, -1 = image or before the start. primes [n-gram sizes, heads], offsets flat,
        multipliers [max n-gram]: int64."""
        ...

    def engram_lookup(self, table: EngramTable, rows_NR: Tensor, *, numerics: Numerics) -> Tensor:
        """[N, R * head_dim] act, dequantised rows concatenated."""
        ...

    def engram_gate(
        self,
        streams_NSD: Tensor,
        kv_ND5: Tensor,
        query_weight_SD: Tensor,
        key_weight_SD: Tensor,
        is_image_N: Tensor,
        *,
        rms_eps: float,
    ) -> tuple[Tensor, Tensor]:
        """(new streams [N, S, D], gates [N, S] wide); kv [N, (S + 1) * D] = k_0..k_{S-1}, v. Image rows: unchanged,
        gate 0."""
        ...

    def lm_head(self, h_ND: Tensor, weight: DenseWeight, *, numerics: Numerics) -> Tensor:
        """[N, V] logits, wide."""
        ...


def load_ops(name: str) -> Ops:
    """The one place that chooses an implementation: "ref" (any machine) or "triton" (CUDA; not built yet).

    "ref" pins torch to one CPU thread, process-wide: with another thread count some GEMM shapes differ in the last bit, and
    all processes that share KV must agree on every bit (decisions 22).

    Raises:
        ValueError: another name, with the choices.
    """
    match name:
        case "ref":
            import torch

            import prefill_kernels.ref as ref

            torch.set_num_threads(1)
            return ref
        case _:
            raise ValueError(
                f"ops {name!r} is not available: expected 'ref' (the Triton set 'triton' is not built yet)"
            )
