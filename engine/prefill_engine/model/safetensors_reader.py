"""Reads `.safetensors` files: header into plain data, tensor bytes into a caller's buffer. No torch.

The library of the same name maps whole files and copies out of them; here bytes go straight to where they stay, and a
damaged file gives a sentence with both sizes. The trap: the header is written by others, so nothing in it is trusted
before parse_header has checked it.
"""

import io
import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prefill_plan.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""Limit of the format (safetensors README); a bigger number means that the file is something else."""

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file: bytes [start, end) of the file, row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """Header of one file; tensors in file order."""

    path: Path
    file_bytes: int
    header: bytes
    """Length prefix and JSON, as they stand in the file."""
    tensors: tuple[StoredTensor, ...]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> StoredFile:
    """Header of a file, checked against itself and against the file's size.

    Raises:
        CheckpointError: unreadable, not this format, or shorter or longer than its header says.
    """
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or not 2 <= header_bytes <= MAX_HEADER_BYTES or 8 + header_bytes > file_bytes:
                raise CheckpointError(
                    f"{path.name}: {file_bytes} bytes, first 8 bytes {prefix.hex() or 'absent'} give no header length; "
                    "not a safetensors file, or cut short"
                )
            text = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read: {error}") from error
    return StoredFile(
        path=path,
        file_bytes=file_bytes,
        header=prefix + text,
        tensors=parse_header(text, source=path.name, data_start=8 + header_bytes, file_bytes=file_bytes),
    )


def parse_header(text: bytes, *, source: str, data_start: int, file_bytes: int) -> tuple[StoredTensor, ...]:
    """A header's tensors in file order; they tile [data_start, file_bytes) without gap or overlap (rule of the format).

    Raises:
        CheckpointError: names the first tensor that breaks a rule, with the numbers.
    """
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(value, type=_Entry) for name, value in raw.items()}
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{source}: header of {len(text)} bytes is not a safetensors header: {error}") from error
    tensors = []
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        item_bytes = DTYPE_BYTES.get(entry.dtype)
        if item_bytes is None:
            raise CheckpointError(f"{source}: {name} has dtype {entry.dtype}; known: {', '.join(DTYPE_BYTES)}")
        if min(entry.shape, default=0) < 0 or end - start != item_bytes * math.prod(entry.shape):
            found = f"{entry.dtype} {list(entry.shape)}"
            raise CheckpointError(f"{source}: {name} is {found} but spans {end - start} bytes")
        if start != position:
            raise CheckpointError(f"{source}: {name} starts at data byte {start}, expected {position} (gap or overlap)")
        position = end
        tensors.append(
            StoredTensor(
                name=name, dtype=entry.dtype, shape=entry.shape, start=data_start + start, end=data_start + end
            )
        )
    if data_start + position != file_bytes:
        state = "cut short" if data_start + position > file_bytes else "too long"
        raise CheckpointError(f"{source}: {file_bytes} bytes, its header describes {data_start + position}; {state}")
    return tuple(tensors)


def read_into(file: io.RawIOBase, position: int, buffer: memoryview, *, name: str) -> None:
    """Fills `buffer` (contiguous bytes) from `position` of a file opened unbuffered.

    Raises:
        CheckpointError: the file ends early (it changed after read_header) or the medium failed.
    """
    try:
        file.seek(position)
        done = 0
        while done < len(buffer):
            count = file.readinto(buffer[done:])
            if not count:
                raise CheckpointError(
                    f"{name}: file ended {len(buffer) - done} bytes early; it changed while it was read"
                )
            done += count
    except OSError as error:
        raise CheckpointError(f"{name}: read of {len(buffer)} bytes at {position} failed: {error}") from error
