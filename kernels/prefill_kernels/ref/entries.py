"""Compressed entries on their way into the cache pages and back (model.md 2.5, 2.6, 3.4).

The trap: entries are read back from the pages after they were written, so the step's own entries carry cache precision.
"""

# G groups, E entries, H index heads, C head dim, I index head dim
from torch import Tensor

from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import IndexRows
from prefill_kernels.ref.records import decode_index, decode_main, encode_index, encode_main, quantise_index_query
from prefill_kernels.ref.rms_norm import rms_norm
from prefill_kernels.ref.rope import rope
from prefill_kernels.ref.rows import gather_rows, scatter_rows


def store_main(
    latent_GC: Tensor,
    positions_G: Tensor,
    frequencies: Tensor,
    pages_ZER: Tensor,
    slots_G: Tensor,
    *,
    record_format: str,
    numerics: Numerics,
) -> None:
    """rope, encode_main, scatter_rows.

    Args:
        latent_GC: [G, C] act, normed. positions_G: [G] int32 first token of each group.
        pages_ZER: strided pages, written. slots_G: [G] int32, -1 writes nothing.
    """
    records = encode_main(rope(latent_GC, positions_G, frequencies), record_format=record_format, numerics=numerics)
    scatter_rows(pages_ZER, slots_G, records)


def load_main(pages_ZER: Tensor, slots_E: Tensor, *, record_format: str, numerics: Numerics) -> Tensor:
    """[E, C] act: gather_rows, decode_main; slot -1 gives zeros."""
    return decode_main(gather_rows(pages_ZER, slots_E), record_format=record_format, numerics=numerics)


def store_index(
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
    """rms_norm, rope, encode_index, scatter_rows into both sections.

    Args:
        key_GI: [G, I] act, projected from the normed latent before its RoPE.
    """
    key_GI = rope(rms_norm(key_GI, norm_weight_I, eps=eps), positions_G, frequencies)
    data, scales = encode_index(key_GI, numerics=numerics)
    scatter_rows(data_pages_ZER, slots_G, data)
    scatter_rows(scale_pages_ZES, slots_G, scales)


def load_index(data_pages_ZER: Tensor, scale_pages_ZES: Tensor, slots_E: Tensor, *, numerics: Numerics) -> IndexRows:
    """Keys as the scorer sees them, data [E, I] act; slot -1 gives zeros."""
    data, scales = gather_rows(data_pages_ZER, slots_E), gather_rows(scale_pages_ZES, slots_E)
    return IndexRows(data=decode_index(data, scales, numerics=numerics))


def index_query(query_NHI: Tensor, positions_N: Tensor, frequencies: Tensor, *, numerics: Numerics) -> IndexRows:
    """rope, quantise_index_query; data [N, H, I] act."""
    return IndexRows(data=quantise_index_query(rope(query_NHI, positions_N, frequencies), numerics=numerics))


def index_values(rows: IndexRows, *, numerics: Numerics) -> Tensor:  # noqa: ARG001 - other kernel sets decode
    """[.., I] act. `ref` always holds values."""
    assert rows.scales is None, "packed index rows belong to another kernel set"
    return rows.data
