"""The operations of the vision tower as one protocol, as `ops` for the text model; `ref` is the definition and CPU backend.

The tower (prefill_engine.vision.tower) receives a VisionOps and calls it. One op is what one launch can do; the contract of each
(formula, rounding points, source) is the docstring in `ref/vision_*.py`, here are the shapes. Legend:

    N patches of the batch (all images back to back), B images, D width of the tower, I inner width, H heads, P patch side, G
    cells (rows of the aligner), M patches per cell, W text width, T rows of all spans

"act" is the dtype of the first argument; weights are bfloat16 (norms bfloat16 or float32). Index tensors are int32 where nothing
else is said. Nothing is written in place. The trap: an image alone and the same image in any batch give the same bits (decisions
22), so reductions have a fixed order that depends on the image only.
"""

from typing import Protocol

from torch import Tensor

SPAN_START, SPAN_NEWLINE, SPAN_END = -1, -2, -3
"""Sources of span rows that are no feature rows."""


class VisionOps(Protocol):
    """Everything the forward pass of vision.md 3 to 6 is made of, after the canvas."""

    def vision_patches(
        self, pixels: Tensor, origins_N: Tensor, strides_N: Tensor, levels: Tensor, *, patch_size: int
    ) -> Tensor:
        """[N, 3 * P * P] in levels' dtype. pixels: flat uint8, all canvases back to back; origins int64: byte of a patch's first
        pixel; strides: bytes per canvas row; levels [256]."""
        ...

    def rms_norm(self, x_ND: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
        """[.., D] act, one rounding at the end; as Ops.rms_norm."""
        ...

    def vision_linear(self, x_NK: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
        """[N, O] act."""
        ...

    def vision_linear_add(self, x_NK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, residual_NO: Tensor) -> Tensor:
        """[N, O] act: residual + vision_linear."""
        ...

    def vision_linear_swiglu(self, x_NK: Tensor, weight_2IK: Tensor) -> Tensor:
        """[N, I] act: silu(gate) * up; the weight's first I rows are the gate."""
        ...

    def vision_linear_gelu(self, x_NK: Tensor, weight_OK: Tensor, bias_O: Tensor) -> Tensor:
        """[N, O] act: exact (erf) GELU of vision_linear."""
        ...

    def vision_attention(
        self,
        qkv_N3D: Tensor,
        positions_N2: Tensor,
        frequencies: Tensor,
        cu_rows_B1: Tensor,
        *,
        num_heads: int,
        max_rows: int,
    ) -> Tensor:
        """[N, D] act: 2-D rotation of q and k, then full attention inside each image. qkv [N, 3 * D], all heads of q, then k,
        then v; positions: patch row and column; frequencies [D / H / 4] float32; max_rows: host-side bound of an image's
        patches."""
        ...

    def vision_merge(self, x_ND: Tensor, index_GM: Tensor) -> Tensor:
        """[G, D * M] act: the patches of each cell, channel-major; index -1 gives zeros."""
        ...

    def vision_spans(
        self, features_GW: Tensor, start_W: Tensor, newline_W: Tensor, end_W: Tensor, source_T: Tensor
    ) -> Tensor:
        """[T, W] act: row t is features[source[t]], or start, newline or end where source is SPAN_START and so on."""
        ...


def load_vision_ops(name: str) -> VisionOps:
    """The one place that chooses an implementation: "ref" (any machine; pins torch to one CPU thread, as load_ops does) or
    "triton" (a CUDA device of this process, bfloat16 activations).

    Raises:
        ValueError: another name, with the choices; or no GPU that the Triton set has configurations for.
    """
    match name:
        case "ref":
            import torch

            import prefill_kernels.ref.vision as ref

            torch.set_num_threads(1)
            return ref
        case "triton":
            from prefill_kernels.gpu.triton_vision_ops import triton_vision_ops
            from prefill_kernels.op_sets import cuda_chip

            return triton_vision_ops(cuda_chip())
        case _:
            raise ValueError(f"vision ops {name!r} are not available: expected 'ref' or 'triton'")
