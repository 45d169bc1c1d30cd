"""The operations a prefill engine needs, as one protocol with two implementations: `ref` (plain torch, the definition
and the CPU backend) and `gpu` (Triton).

Models receive an `Ops` and call it; nothing else in the house knows which implementation runs. An op is what one launch
(or one fixed chain of launches) can do without a trip through memory that the hardware does not need (perf.md 6). The
contract of each op (formula, rounding points, source) is the docstring of `ref/`; here are the shapes. Legend:

    N rows of the step (all sequences back to back), B sequences (chunks), D hidden, S residual streams, H heads, C head
    dim, I index head dim, K index top-k, W window, E compressed entries of all sequences back to back, G groups that
    close in the step, V vocabulary, X experts

Ragged batches are described by `cu_rows_B1` ([B + 1] int32: rows of sequence b are cu_rows[b]..cu_rows[b+1]). Index
tensors are int32 (int64 where said), -1 is "none". "act" is numerics.activation. The trap: row results must not
depend on the other rows of the batch nor on where a chunk was cut (decisions 22, C10), so every reduction has a fixed
order and a fixed width.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from prefill_kernels.numerics import Numerics
from prefill_kernels.weights import DenseWeight, EngramTable, ExpertWeights, MhcWeights, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Activations as the next products read them. Products with dense weights and observers read `plain`, products with
    fp8 and fp4 weights the quantised form.

    plain: [N, D] act.
    seen: the quantised form where an op has already made it: [N, D] e4m3 codes with `scales`, or [N, D] bfloat16, the
        codes' exact values, without. None: the product quantises `plain` itself.
    scales: [N, D / 32] uint8 (ue8m0), or None.
    """

    plain: Tensor
    seen: Tensor | None = None
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MhcMixes:
    """Mixes of one sub-layer: pre [N, S], post [N, S], comb [N, S in, S out], all wide (fp32)."""

    pre: Tensor
    post: Tensor
    comb: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MhcOutput:
    """Output of a sub-layer that is not spread over the streams yet: y [N, D] act, with that sub-layer's post and comb."""

    y: Tensor
    post: Tensor
    comb: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MhcTurn:
    """streams [N, S, D] act after the last sub-layer; rows: normed input of the next one; mixes of the next one."""

    streams: Tensor
    rows: Rows
    mixes: MhcMixes


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRows:
    """records [N, C + C/32] uint8 (raw: [N, C]) of the step; keys [history + N, C] act, decoded, history first."""

    records: Tensor
    keys: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRows:
    """Index queries [N, H, ..] or keys [E, ..] after their quantiser.

    data: [.., I] act values, or with scales [.., I / 2] uint8 e2m1 pairs. scales: [.., I / 32] uint8 (ue8m0), or None.
    """

    data: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSelection:
    """Entries picked by an indexer.

    entries: [N, K] int32, positions within the row's own sequence, ascending, -1 padded at the end.
    rows: [N, K] int32, the same as rows of the key tensor (entries + key_start), -1 padded.
    candidates: [N, topk_blocks] int32 block numbers, ascending, -1 padded; None unless asked for.
    """

    entries: Tensor
    rows: Tensor
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

    def mhc_turn(
        self,
        streams_NSD: Tensor,
        pre_NS: Tensor,
        norm_weight_D: Tensor,
        *,
        output: MhcOutput | None,
        weights: MhcWeights,
        num_iters: int,
        hc_eps: float,
        rms_eps: float,
        numerics: Numerics,
    ) -> MhcTurn:
        """From one sub-layer to the next in one pass: spread the output (None: streams as they are), collapse with pre,
        norm and quantise, mixes of the new streams."""
        ...

    def mhc_input(
        self,
        streams_NSD: Tensor,
        pre_NS: Tensor,
        norm_weight_D: Tensor,
        *,
        output: MhcOutput | None,
        rms_eps: float,
        numerics: Numerics,
    ) -> Rows:
        """The rows of mhc_turn alone: no new streams, no mixes."""
        ...

    def mhc_expand(self, output: MhcOutput, streams_NSD: Tensor) -> Tensor:
        """[N, S, D] in the streams' dtype; a new tensor. Where nothing follows that mhc_turn could do as well."""
        ...

    def mhc_mean(self, streams_NSD: Tensor) -> Tensor:
        """[N, D] mean over streams (DSpark feature), in the streams' dtype."""
        ...

    def rms_norm(self, x_ND: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
        """[.., D] in x's dtype, one rounding at the end."""
        ...

    def norm_rows(self, x_ND: Tensor, weight_D: Tensor, *, eps: float, numerics: Numerics) -> Rows:
        """rms_norm, then the quantiser, in one pass."""
        ...

    def quantise_rows(self, x_ND: Tensor, *, numerics: Numerics) -> Rows:
        """x with its quantised form."""
        ...

    def linear(self, x: Rows, weight: Weight, *, numerics: Numerics, wide_output: bool = False) -> Tensor:
        """[N, out] = x . weight^T in act (or wide) dtype; x is read quantised when weight and numerics say so."""
        ...

    def linear_pair(
        self, x: Rows, first: Weight, second: Weight, *, numerics: Numerics, wide_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        """linear with two weights of one format in one launch."""
        ...

    def grouped_linear(self, x_NGK: Tensor, weight: Weight, *, numerics: Numerics) -> Rows:
        """[N, G * out_per_group]: group g of x times rows g of weight [G * out_per_group, K]; x is never quantised
        (profile R), the result is quantised for the product that follows."""
        ...

    def window_rows(
        self,
        kv_NC: Tensor,
        norm_weight_C: Tensor,
        positions_N: Tensor,
        frequencies: Tensor,
        ring_ZRC: Tensor,
        history_slots: Tensor,
        *,
        eps: float,
        numerics: Numerics,
    ) -> WindowRows:
        """Window KV of the step: norm, RoPE and records in one pass, beside the keys that history slots of the ring hold.
        The ring is read only (C25)."""
        ...

    def decode_window(self, records_NR: Tensor, *, numerics: Numerics) -> Tensor:
        """[N, C] act."""
        ...

    def pool_pairs(
        self,
        latent_NC: Tensor,
        score_NC: Tensor,
        norm_weight_C: Tensor,
        state_ZR2C: Tensor,
        state_slots_B: Tensor,
        starts_B: Tensor,
        cu_rows_B1: Tensor,
        *,
        num_groups: int,
        eps: float,
        numerics: Numerics,
    ) -> Tensor:
        """[G, C] act: one row per ratio-2 group that closes in the step, sequences in order, pooled and normed. Reads,
        then updates state in place; state slot -1 (placeholder): nothing is read or written. num_groups: G."""
        ...

    def store_main(
        self,
        latent_GC: Tensor,
        positions_G: Tensor,
        frequencies: Tensor,
        pages_ZER: Tensor,
        slots_G: Tensor,
        *,
        record_format: str,
        numerics: Numerics,
    ) -> None:
        """Rotates, encodes and writes main-KV records to rows slots of the pages (as scatter_rows); records: "fp4"
        C/2 + C/16 bytes, "fp8" C + C/32, or raw C."""
        ...

    def load_main(self, pages_ZER: Tensor, slots_E: Tensor, *, record_format: str, numerics: Numerics) -> Tensor:
        """[E, C] act: gathered and decoded; slot -1 gives zeros."""
        ...

    def store_index(
        self,
        key_GI: Tensor,
        norm_weight_I: Tensor,
        positions_G: Tensor,
        frequencies: Tensor,
        data_pages_ZER: Tensor,
        scale_pages_ZES: Tensor,
        slots_G: Tensor,
        *,
        eps: float,
        numerics: Numerics,
    ) -> None:
        """Norms, rotates, encodes and writes index keys to their two page sections."""
        ...

    def load_index(
        self, data_pages_ZER: Tensor, scale_pages_ZES: Tensor, slots_E: Tensor, *, numerics: Numerics
    ) -> IndexRows:
        """Index keys of the slots; slot -1 gives zeros."""
        ...

    def index_query(
        self, query_NHI: Tensor, positions_N: Tensor, frequencies: Tensor, *, numerics: Numerics
    ) -> IndexRows:
        """RoPE, then e2m1 with ue8m0 scales of 32 (nothing when the cache is not quantised)."""
        ...

    def index_values(self, rows: IndexRows, *, numerics: Numerics) -> Tensor:
        """[.., I] act: what the scorer sees. For observers."""
        ...

    def index_select(
        self,
        query: IndexRows,
        head_weight_NH: Tensor,
        keys: IndexRows,
        key_start_N: Tensor,
        num_visible_N: Tensor,
        *,
        topk: int,
        max_visible: int,
        numerics: Numerics,
        candidates_NB: Tensor | None = None,
        candidate_block: int = 0,
        num_candidate_blocks: int = 0,
    ) -> IndexSelection:
        """Best `topk` of the row's visible entries, which are keys[key_start : key_start + num_visible].

        max_visible: host-side bound of num_visible (sizes the launch; no sync). candidates given: only entries inside
        those blocks compete. num_candidate_blocks > 0: candidates are returned too (from all visible entries). Ties go to
        the lowest index.
        """
        ...

    def sparse_attention(
        self,
        query_NHC: Tensor,
        positions_N: Tensor,
        frequencies: Tensor,
        window_keys_MC: Tensor,
        window_index_NW: Tensor,
        entries_EC: Tensor | None,
        entry_index_NK: Tensor | None,
        sink_H: Tensor,
        *,
        scale: float,
        numerics: Numerics,
    ) -> Tensor:
        """[N, H, C] act: query rotated, softmax over window keys and selected entries with a per-head sink, K = V, result
        rotated back. Both index tensors are rows of their key tensor (already offset per sequence), -1 = empty slot.
        entries None: window only."""
        ...

    def gather_rows(self, x_MR: Tensor, index_N: Tensor) -> Tensor:
        """[N, R] bitwise copies of x's rows; an index outside [0, M) gives a zero row. x may be strided, and may be
        pages [Z, E, R]: then index z * E + e is row e of page z (pages are views of cache blocks that can't be
        flattened)."""
        ...

    def scatter_rows(self, x_MR: Tensor, index_N: Tensor, rows_NR: Tensor) -> None:
        """x[index[n]] = rows[n] in place, bitwise; index -1 writes nothing; indices are unique. x as in gather_rows."""
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
        x: Rows,
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

    def shared_expert(self, x: Rows, expert: ExpertWeights, *, swiglu_limit: float, numerics: Numerics) -> Tensor:
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

    def engram_lookup(self, table: EngramTable, rows_NR: Tensor, *, numerics: Numerics) -> Rows:
        """[N, R * head_dim], dequantised table rows concatenated."""
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
