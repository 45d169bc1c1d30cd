"""Window KV of a step's rows, from projection to record and to the keys that attention reads (model.md 2.3, 3.4)."""

# N rows, C head dim, Z state slots, R ring rows
import torch
from torch import Tensor

from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import WindowRows
from prefill_kernels.ref.records import decode_window, encode_window
from prefill_kernels.ref.rms_norm import rms_norm
from prefill_kernels.ref.rope import rope
from prefill_kernels.ref.rows import gather_rows


def window_rows(
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
    """Records of the rows, and the keys of history and rows in cache precision.

    Args:
        kv_NC: [N, C] act, as projected.
        ring_ZRC: [Z, R, record] of this layer, only read: the step's rows overwrite history that its first rows still
            need, so the caller stores the records after attention (C25).
        history_slots: [..] int32 flat ring rows, -1 gives a zero key.
    """
    kv_NC = rope(rms_norm(kv_NC, norm_weight_C, eps=eps), positions_N, frequencies)
    records_NR = encode_window(kv_NC, numerics=numerics)
    history = gather_rows(ring_ZRC, history_slots)
    return WindowRows(records=records_NR, keys=decode_window(torch.cat([history, records_NR]), numerics=numerics))
