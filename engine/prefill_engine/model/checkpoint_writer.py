"""Writes a random checkpoint in the official format: names, dtypes, scales, shards, index, config and tokenizer.

Called by the CLI verb make-checkpoint, by vision_cutout and by tests. Tensors are made and written one at a time, in pieces, so
memory does not grow with the model. The trap: config.json is written last, so a directory that was not finished is never taken
for a model.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from torch import Tensor

from prefill_engine.model.checkpoint_files import INDEX_NAME
from prefill_engine.model.checkpoint_texts import CheckpointTexts
from prefill_engine.model.random_weights import random_pieces
from prefill_engine.model.safetensors_reader import DTYPE_BYTES
from prefill_engine.model.tensor_names import ExpectedTensor, Storage, build_expected_tensors
from prefill_kernels.number_formats import quantise_fp8_ue8m0, quantise_weight_fp4, quantise_weight_fp8
from prefill_plan.model_spec import ModelSpec

_ALIGNMENT = 8
"""The data section starts at a multiple of 8 bytes, as the safetensors library writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    name: str
    num_bytes: int
    num_tensors: int
    """0 for files that are not shards."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """A tensor and its scale, made together and kept in one shard."""

    tensors: tuple[ExpectedTensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(_tensor_bytes(tensor) for tensor in self.tensors)


Pieces = Callable[[Sequence[ExpectedTensor]], Iterator[tuple[Tensor, ...]]]
"""Row blocks of a tensor and its scale (or of a tensor alone) as they are stored, in order."""


def checkpoint_bytes(spec: ModelSpec) -> int:
    """Bytes of all tensors of a checkpoint of this shape."""
    return stored_bytes(build_expected_tensors(spec).values())


def stored_bytes(tensors: Iterable[ExpectedTensor]) -> int:
    """Bytes of these tensors in shards, headers not counted."""
    return sum(_tensor_bytes(tensor) for tensor in tensors)


def write_checkpoint(
    directory: Path,
    spec: ModelSpec,
    texts: CheckpointTexts,
    *,
    seed: int,
    shard_bytes: int,
    report: Callable[[WrittenFile], None] | None = None,
) -> None:
    """Writes all files into an existing directory, over files of the same names.

    Args:
        spec: what texts.config says (checkpoint_texts.check_texts).
        seed: same seed, same bytes.
        shard_bytes: a shard is closed before it would pass this; a single tensor with its scale may.
        report: called after each file.

    Raises:
        OSError: the disk refused; config.json is then missing.
    """
    tensors = tuple(build_expected_tensors(spec).values())
    index = write_shards(directory, tensors, random_values(seed), shard_bytes=shard_bytes, report=report)
    small_files = {
        INDEX_NAME: index,
        "tokenizer.json": texts.tokenizer,
        "tokenizer_config.json": texts.tokenizer_config,
        "config.json": texts.config,
    }
    write_small_files(directory, small_files, report=report)


def write_shards(
    directory: Path,
    tensors: Sequence[ExpectedTensor],
    pieces: Pieces,
    *,
    shard_bytes: int,
    report: Callable[[WrittenFile], None] | None,
) -> bytes:
    """Writes tensors, each stored in the first of its dtypes, in their order; returns the text of their index."""
    shards = _plan_shards(tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, units in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        written = _write_shard(directory / name, units, pieces)
        weight_map |= {tensor.name: name for unit in units for tensor in unit.tensors}
        if report:
            report(written)
    index = {"metadata": {"total_size": stored_bytes(tensors)}, "weight_map": weight_map}
    return msgspec.json.format(msgspec.json.encode(index), indent=1)


def write_small_files(
    directory: Path, contents: Mapping[str, bytes], *, report: Callable[[WrittenFile], None] | None
) -> None:
    """Writes the files in the order given: config.json last, see above."""
    for name, content in contents.items():
        (directory / name).write_bytes(content)
        if report:
            report(WrittenFile(name=name, num_bytes=len(content), num_tensors=0))


def random_values(seed: int) -> Pieces:
    """Pieces of random values, quantised as the tensor's rule says."""
    return lambda tensors: _random_pieces(tensors, seed=seed)


def _plan_shards(tensors: Sequence[ExpectedTensor], shard_bytes: int) -> list[list[_Unit]]:
    shards: list[list[_Unit]] = [[]]
    filled = 0
    for unit in _units(tensors):
        if shards[-1] and filled + unit.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += unit.num_bytes
    return shards


def _units(tensors: Sequence[ExpectedTensor]) -> Iterator[_Unit]:
    waiting: ExpectedTensor | None = None
    for tensor in tensors:
        if waiting and tensor.is_scale:
            yield _Unit((waiting, tensor))
            waiting = None
            continue
        if waiting:
            yield _Unit((waiting,))
        waiting = tensor
    if waiting:
        yield _Unit((waiting,))


def _write_shard(path: Path, units: Sequence[_Unit], pieces: Pieces) -> WrittenFile:
    tensors = [tensor for unit in units for tensor in unit.tensors]
    header, offsets = _build_header(tensors)
    with path.open("wb") as file:
        file.write(header)
        for unit in units:
            positions = [len(header) + offsets[tensor.name] for tensor in unit.tensors]
            for blocks in pieces(unit.tensors):
                for index, piece in enumerate(blocks):
                    positions[index] += _write_at(file, positions[index], piece)
    return WrittenFile(name=path.name, num_bytes=path.stat().st_size, num_tensors=len(tensors))


def _build_header(tensors: Sequence[ExpectedTensor]) -> tuple[bytes, dict[str, int]]:
    """Header with its length prefix, and each tensor's offset in the data; wide dtypes first, so that all stay aligned."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets = {}
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (-DTYPE_BYTES[tensor.dtypes[0]], tensor.name)):
        offsets[tensor.name] = end
        end += _tensor_bytes(tensor)
        entries[tensor.name] = {
            "dtype": tensor.dtypes[0],
            "shape": tensor.shape,
            "data_offsets": (offsets[tensor.name], end),
        }
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, offsets


def _random_pieces(tensors: Sequence[ExpectedTensor], *, seed: int) -> Iterator[tuple[Tensor, ...]]:
    tensor = tensors[0]
    is_packed = tensor.rule.storage is Storage.FP4 and len(tensors) == 2
    shape = (tensor.shape[0], tensor.shape[1] * 2) if is_packed else tensor.shape
    for values in random_pieces(tensor.name, tensor.rule, shape, seed=seed):
        if len(tensors) == 1:
            yield (values.to(torch.bfloat16 if tensor.dtypes[0] == "BF16" else torch.float32),)
            continue
        match tensor.rule.storage:
            case Storage.FP8:
                fp8 = quantise_weight_fp8(values)
                yield fp8.data, fp8.scale
            case Storage.FP4:
                fp4 = quantise_weight_fp4(values)
                yield fp4.data, fp4.scale
            case Storage.ROWS:
                yield quantise_fp8_ue8m0(values)
            case storage:
                raise AssertionError(f"{tensor.name} has a scale but storage {storage}")


def _write_at(file: BinaryIO, position: int, tensor: Tensor) -> int:
    file.seek(position)
    return file.write(tensor.contiguous().view(torch.uint8).numpy().data)


def _tensor_bytes(tensor: ExpectedTensor) -> int:
    return DTYPE_BYTES[tensor.dtypes[0]] * math.prod(tensor.shape)
