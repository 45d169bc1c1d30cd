"""Writes a checkpoint that has a vision tower and nothing else: what a VE pod needs, 1 GB instead of 500.

Called by the CLI verb make-checkpoint. Either cut out of a full checkpoint, bytes copied as they are, or random. Its
config.json is the whole model's, so the text width and the image token come along; there is no tokenizer, a VE reads no text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from prefill_engine.model.checkpoint_files import INDEX_NAME, Catalogue
from prefill_engine.model.checkpoint_writer import WrittenFile, random_values, write_shards, write_small_files
from prefill_engine.model.safetensors_reader import read_into
from prefill_engine.model.tensor_names import ExpectedTensor, build_vision_tensors
from prefill_plan.errors import CheckpointError
from prefill_plan.model_spec import ModelSpec

_PIECE_BYTES = 64 * 1024 * 1024


def cutout_tensors(spec: ModelSpec, catalogue: Catalogue) -> tuple[ExpectedTensor, ...]:
    """The tower's tensors in the dtypes that `catalogue`, which has them all, stores them in."""
    return tuple(
        replace(tensor, dtypes=(catalogue.tensors[name].stored.dtype,))
        for name, tensor in build_vision_tensors(spec).items()
    )


def write_cutout(
    directory: Path,
    tensors: Sequence[ExpectedTensor],
    catalogue: Catalogue,
    *,
    config: bytes,
    shard_bytes: int,
    report: Callable[[WrittenFile], None] | None = None,
) -> None:
    """Copies the tensors out of another checkpoint's shards.

    Args:
        tensors: of cutout_tensors. config: config.json of the source.

    Raises:
        CheckpointError: a source file changed or failed while it was read. OSError: the disk refused. config.json is then
        missing.
    """
    index = write_shards(
        directory, tensors, lambda unit: _stored_pieces(catalogue, unit), shard_bytes=shard_bytes, report=report
    )
    write_small_files(directory, {INDEX_NAME: index, "config.json": config}, report=report)


def write_random_tower(
    directory: Path,
    spec: ModelSpec,
    *,
    config: bytes,
    seed: int,
    shard_bytes: int,
    report: Callable[[WrittenFile], None] | None = None,
) -> None:
    """The tower that write_checkpoint with this seed would write, alone.

    Raises:
        OSError: the disk refused; config.json is then missing.
    """
    tensors = tuple(build_vision_tensors(spec).values())
    index = write_shards(directory, tensors, random_values(seed), shard_bytes=shard_bytes, report=report)
    write_small_files(directory, {INDEX_NAME: index, "config.json": config}, report=report)


def _stored_pieces(catalogue: Catalogue, tensors: Sequence[ExpectedTensor]) -> Iterator[tuple[Tensor, ...]]:
    """Bytes of one tensor as uint8 pieces."""
    located = catalogue.tensors[tensors[0].name]
    stored, path = located.stored, located.file.path
    try:
        with path.open("rb", buffering=0) as file:
            for start in range(stored.start, stored.end, _PIECE_BYTES):
                piece = torch.empty(min(_PIECE_BYTES, stored.end - start), dtype=torch.uint8)
                read_into(file, start, piece.numpy().data, name=f"{path.name}: {stored.name}")
                yield (piece,)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
