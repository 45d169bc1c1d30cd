"""Loads the vision tower from a full checkpoint, reading only its own tensors, or from a cut-out; and names it.

Called by the encoder process, by a rank with in-engine vision and by `check`; vision_digest also by whoever compares towers.
The trap: shards without vision tensors are not even opened, so a VE starts beside a text model that is incomplete or still
being copied.

Legend of shapes: D width of the tower, P patch side, I inner width, W text width, M patches per cell.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from prefill_engine.model.checkpoint_files import Catalogue, build_catalogue, raise_problems
from prefill_engine.model.load_progress import LoadProgress
from prefill_engine.model.safetensors_reader import read_into
from prefill_engine.model.shard_stream import ShardStream
from prefill_engine.model.tensor_names import build_vision_tensors, is_vision_tensor
from prefill_engine.model.weights import compare_headers
from prefill_kernels.op_sets import ops_identity
from prefill_plan.config import Device
from prefill_plan.errors import CheckpointError
from prefill_plan.model_spec import ModelSpec

logger = logging.getLogger(__name__)

_TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_DIGEST_DOMAIN = b"prefill vision digest 2"
_RECIPE = b"fixed-point plan; Pillow < 13 bicubic, horizontal first; padding 127; white below alpha; first frame"
"""What happens to pixels before the tower. Another recipe gives other embeddings under the same weights: change this text with
it."""
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionBlock:
    """norm1, norm2 [D]; qkv [3 * D, D], out [D, D], each with bias; gate_up [2 * I, D], down [D, I]."""

    norm1: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    norm2: Tensor
    gate_up_weight: Tensor
    down_weight: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionParameters:
    """patch [D, 3 * P * P]; norm [D]; aligner_in [W, D * M], aligner_out [W, W]; image_* [W]. As stored: bfloat16, norms also
    float32."""

    patch_weight: Tensor
    patch_bias: Tensor
    blocks: tuple[VisionBlock, ...]
    norm: Tensor
    aligner_in_weight: Tensor
    aligner_in_bias: Tensor
    aligner_out_weight: Tensor
    aligner_out_bias: Tensor
    image_start: Tensor
    image_newline: Tensor
    image_end: Tensor


def load_vision_parameters(
    path: Path,
    spec: ModelSpec,
    *,
    device: torch.device,
    progress: Callable[[LoadProgress], None] | None = None,
) -> VisionParameters:
    """Reads every tensor of the tower into its final place.

    Args:
        path: checkpoint directory, full or a cut-out.

    Raises:
        CheckpointError: no vision_config; or one error for everything missing, extra, misshapen, of a wrong dtype or truncated.
    """
    catalogue = vision_catalogue(path, spec)
    targets = {
        name: torch.empty(located.stored.shape, dtype=_TORCH_DTYPES[located.stored.dtype], device=device)
        for name, located in catalogue.tensors.items()
    }
    stream = ShardStream(catalogue, targets, device=device, progress=progress)
    stream.run()
    logger.info(
        "vision tower loaded",
        extra={"path": str(path), "num_tensors": len(targets), "num_bytes": stream.done_bytes},
    )
    assert spec.vision is not None, "vision_catalogue has refused that"
    return _arrange(targets, num_layers=spec.vision.num_layers)


def vision_catalogue(path: Path, spec: ModelSpec) -> Catalogue:
    """The tower's tensors of a checkpoint, complete and of the shapes that the config says.

    Raises:
        CheckpointError: as load_vision_parameters.
    """
    expected = build_vision_tensors(spec)
    if not expected:
        raise CheckpointError(
            f"{path}: config.json has no vision_config with layers, so there is no vision tower to read"
        )
    catalogue = build_catalogue(path, wanted=is_vision_tensor)
    problems = compare_headers(catalogue, expected)
    if problems:
        raise_problems(path, problems)
    return catalogue


def vision_numerics(device: Device, ops: str, activation: str) -> str:
    """Names the arithmetic of a tower's rows, as numerics_class does that of KV: encoders of two names may differ in a bit.

    Raises:
        ValueError: as ops_identity.
    """
    return f"{device.value}-{ops_identity(ops)}-{activation}"


def vision_digest(path: Path, spec: ModelSpec, *, numerics: str) -> bytes:
    """Identity of a tower's rows, 32 bytes: part of every image's content key.

    Covers each tensor's name, dtype, shape and bytes, the numbers of vision_config, the preprocessing recipe and the arithmetic,
    so a cut-out and its full checkpoint agree, and two fine-tunes or two op sets differ. Reads all of it (0.97 GB, seconds).

    Args:
        numerics: of vision_numerics.

    Raises:
        CheckpointError: as load_vision_parameters.
    """
    catalogue = vision_catalogue(path, spec)
    digest = hashlib.sha256()
    _add(digest, _DIGEST_DOMAIN, _RECIPE, numerics.encode(), msgspec.json.encode(spec.vision))
    buffer = memoryview(bytearray(_PIECE_BYTES))
    for name, located in sorted(catalogue.tensors.items()):
        stored = located.stored
        _add(digest, name.encode(), stored.dtype.encode(), repr(stored.shape).encode())
        try:
            with located.file.path.open("rb", buffering=0) as file:
                for start in range(stored.start, stored.end, _PIECE_BYTES):
                    piece = buffer[: min(_PIECE_BYTES, stored.end - start)]
                    read_into(file, start, piece, name=f"{located.file.path.name}: {name}")
                    digest.update(piece)
        except OSError as error:
            raise CheckpointError(f"{located.file.path}: cannot be read: {error}") from error
    return digest.digest()


def _add(digest: "hashlib._Hash", *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def _arrange(tensors: dict[str, Tensor], *, num_layers: int) -> VisionParameters:
    return VisionParameters(
        patch_weight=tensors["vision.patch_embed.proj.weight"],
        patch_bias=tensors["vision.patch_embed.proj.bias"],
        blocks=tuple(_block(tensors, f"vision.blocks.{index}.") for index in range(num_layers)),
        norm=tensors["vision.norm.weight"],
        aligner_in_weight=tensors["aligner.w1.weight"],
        aligner_in_bias=tensors["aligner.w1.bias"],
        aligner_out_weight=tensors["aligner.w2.weight"],
        aligner_out_bias=tensors["aligner.w2.bias"],
        image_start=tensors["image_start"],
        image_newline=tensors["image_newline"],
        image_end=tensors["image_end"],
    )


def _block(tensors: dict[str, Tensor], prefix: str) -> VisionBlock:
    return VisionBlock(
        norm1=tensors[prefix + "norm1.weight"],
        qkv_weight=tensors[prefix + "attn.wqkv.weight"],
        qkv_bias=tensors[prefix + "attn.wqkv.bias"],
        out_weight=tensors[prefix + "attn.wo.weight"],
        out_bias=tensors[prefix + "attn.wo.bias"],
        norm2=tensors[prefix + "norm2.weight"],
        gate_up_weight=tensors[prefix + "mlp.w1.weight"],
        down_weight=tensors[prefix + "mlp.w2.weight"],
    )
