"""The vision tower: canvases of a batch of images -> their span rows, as they enter the text model (vision.md 4 to 6, 8).

Called by the encoder process, by a rank with in-engine vision and by `check`. Immutable, and nothing is kept between calls. The
trap: its norms have eps 1e-6, the text model's 1e-20.

observe(name, tensor) sees, over the whole batch: patches [N, 3 * P * P], patch_embed, block0, block1, .. and vit_out [N, D],
downsampled [G, 9 * D], aligner_out [G, columns], span [T, columns].

Legend: N patches, D width of the tower, G cells, T span rows, P patch side.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefill_engine.vision.patches import PackedImages, pack_images
from prefill_engine.vision.plan import ImagePlan
from prefill_engine.vision.weights import VisionBlock, VisionParameters
from prefill_kernels.pixel_levels import pixel_levels
from prefill_kernels.rope_tables import rope_frequencies
from prefill_kernels.vision_ops import VisionOps
from prefill_plan.model_spec import VisionSpec

NORM_EPS = 1e-6
TowerObserver = Callable[[str, Tensor], None]


class VisionTower:
    """One loaded tower on one device."""

    def __init__(
        self, spec: VisionSpec, parameters: VisionParameters, *, ops: VisionOps, activation: torch.dtype
    ) -> None:
        """activation: bfloat16 in production, float32 in checks; patches are rounded to bfloat16 in both."""
        self.spec = spec
        self.device = parameters.norm.device
        self._parameters = parameters
        self._ops = ops
        self._levels = pixel_levels().to(self.device, activation)
        head_dim = spec.hidden_size // spec.num_heads
        frequencies = rope_frequencies(rope_dim=head_dim // 2, theta=spec.rope_theta, yarn=None)
        self._frequencies = frequencies.to(self.device)

    @property
    def columns(self) -> int:
        """Width of a span row: the text model's hidden size."""
        return self._parameters.image_start.shape[0]

    @torch.inference_mode()
    def encode(
        self, canvases: Sequence[Tensor], plans: Sequence[ImagePlan], *, observe: TowerObserver | None = None
    ) -> list[Tensor]:
        """Rows of every image of the batch; on `ref`, an image alone and in any batch give the same bits.

        Args:
            canvases: uint8 [plan.height, plan.width, 3], on any device; not kept.
            plans: one per canvas.

        Returns:
            [tokens, columns] act per image, views of one tensor of this call.

        Raises:
            ValueError: a canvas that is not its plan's.
        """
        for number, (canvas, plan) in enumerate(zip(canvases, plans, strict=True)):
            if canvas.dtype != torch.uint8 or canvas.shape != (plan.height, plan.width, 3):
                raise ValueError(
                    f"canvas {number} is {canvas.dtype} {list(canvas.shape)}, expected uint8 {[plan.height, plan.width, 3]}"
                )
        if not plans:
            return []
        see = observe or _ignore
        packed = pack_images(plans, self.spec)
        x_ND = self._blocks(self._embed(canvases, packed, see), packed, see)
        rows_TW = self._spans(x_ND, packed, see)
        return [rows_TW[start:end] for start, end in pairwise(packed.cu_tokens)]

    def _embed(self, canvases: Sequence[Tensor], packed: PackedImages, see: TowerObserver) -> Tensor:
        parameters = self._parameters
        pixels = torch.cat([canvas.to(self.device, non_blocking=True).reshape(-1) for canvas in canvases])
        patches = self._ops.vision_patches(
            pixels,
            self._place(packed.origins),
            self._place(packed.strides),
            self._levels,
            patch_size=self.spec.patch_size,
        )
        see("patches", patches)
        x_ND = self._ops.vision_linear(patches, parameters.patch_weight, parameters.patch_bias)
        see("patch_embed", x_ND)
        return x_ND

    def _blocks(self, x_ND: Tensor, packed: PackedImages, see: TowerObserver) -> Tensor:
        ops = self._ops
        positions, cu_rows = self._place(packed.positions), self._place(packed.cu_rows)
        for index, block in enumerate(self._parameters.blocks):
            qkv = ops.vision_linear(ops.rms_norm(x_ND, block.norm1, eps=NORM_EPS), block.qkv_weight, block.qkv_bias)
            attended = ops.vision_attention(
                qkv,
                positions,
                self._frequencies,
                cu_rows,
                num_heads=self.spec.num_heads,
                max_rows=packed.max_rows,
            )
            x_ND = self._close_block(attended, x_ND, block)
            see(f"block{index}", x_ND)
        x_ND = ops.rms_norm(x_ND, self._parameters.norm, eps=NORM_EPS)
        see("vit_out", x_ND)
        return x_ND

    def _close_block(self, attended_ND: Tensor, x_ND: Tensor, block: VisionBlock) -> Tensor:
        ops = self._ops
        x_ND = ops.vision_linear_add(attended_ND, block.out_weight, block.out_bias, x_ND)
        inner = ops.vision_linear_swiglu(ops.rms_norm(x_ND, block.norm2, eps=NORM_EPS), block.gate_up_weight)
        return ops.vision_linear_add(inner, block.down_weight, None, x_ND)

    def _spans(self, x_ND: Tensor, packed: PackedImages, see: TowerObserver) -> Tensor:
        ops, parameters = self._ops, self._parameters
        merged = ops.vision_merge(x_ND, self._place(packed.cells))
        see("downsampled", merged)
        inner = ops.vision_linear_gelu(merged, parameters.aligner_in_weight, parameters.aligner_in_bias)
        features = ops.vision_linear(inner, parameters.aligner_out_weight, parameters.aligner_out_bias)
        see("aligner_out", features)
        rows_TW = ops.vision_spans(
            features,
            parameters.image_start,
            parameters.image_newline,
            parameters.image_end,
            self._place(packed.sources),
        )
        see("span", rows_TW)
        return rows_TW

    def _place(self, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _ignore(_name: str, _tensor: Tensor) -> None:
    """The observer of production: none."""
