"""Moving rows: pixels to patches, patches to cells, features to spans (vision.md 3, 5, 6). Values are copied, never computed."""

# N patches, P patch side, G cells, M patches per cell, D tower width, W text width, T rows of spans
import torch
from torch import Tensor


def vision_patches(pixels: Tensor, origins_N: Tensor, strides_N: Tensor, levels: Tensor, *, patch_size: int) -> Tensor:
    """Patches of the canvases, each as [channel, row, column], every byte replaced by its level.

    Args:
        pixels: flat uint8; canvases [height, width, 3] back to back.
        origins_N: [N] int64, byte of the patch's top left pixel. strides_N: [N] int32, bytes per row of its canvas.
        levels: [256], of prefill_kernels.pixel_levels, in any float dtype.

    Returns:
        [N, 3 * P * P] in levels' dtype.
    """
    side = torch.arange(patch_size, device=pixels.device)
    channel = torch.arange(3, device=pixels.device)
    rows_NP = origins_N.long()[:, None] + strides_N.long()[:, None] * side
    bytes_NCPP = rows_NP[:, None, :, None] + 3 * side + channel[:, None, None]
    return levels[pixels[bytes_NCPP].int()].flatten(1)


def vision_merge(x_ND: Tensor, index_GM: Tensor) -> Tensor:
    """Patches of each cell side by side, channel-major: value (g, c * M + m) is x[index[g, m], c].

    Args:
        x_ND: [N, D] act.
        index_GM: [G, M] int32 rows of x; -1, outside the image's patches, gives zeros.

    Returns:
        [G, D * M] act.
    """
    cells_GMD = x_ND[index_GM.long().clamp_min(0)]
    cells_GMD = torch.where((index_GM >= 0).unsqueeze(-1), cells_GMD, cells_GMD.new_zeros(()))
    return cells_GMD.transpose(1, 2).flatten(1)


def vision_spans(features_GW: Tensor, start_W: Tensor, newline_W: Tensor, end_W: Tensor, source_T: Tensor) -> Tensor:
    """Rows of the spans as they enter the text model.

    Args:
        features_GW: [G, W] act. start_W, newline_W, end_W: [W], cast to act.
        source_T: [T] int32: a row of features, or SPAN_START, SPAN_NEWLINE, SPAN_END (-1, -2, -3).

    Returns:
        [T, W] act.
    """
    # Negative sources count from the end.
    extra_3W = torch.stack([end_W, newline_W, start_W]).to(features_GW.dtype)
    return torch.cat([features_GW, extra_3W])[source_T.long()]
