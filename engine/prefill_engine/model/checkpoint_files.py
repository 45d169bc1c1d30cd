"""Which files make up a checkpoint directory, and which tensors they hold. No torch.

Used by weights.py (what to read) and digests.py (what to hash). Nothing stops at the first fault: a Catalogue carries
all of them, so that a user with a damaged download sees the whole damage at once.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from prefill_engine.model.safetensors_reader import StoredFile, StoredTensor, read_header
from prefill_engine.model.tensor_names import strip_prefix
from prefill_plan.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
_SHOWN_PROBLEMS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One fault. kind: a word for the summary count, e.g. "missing". text: file, tensor, found, expected."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedTensor:
    file: StoredFile
    stored: StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All readable headers of a directory.

    tensors: by official name. unreadable: official names that the index places in a file that is missing or damaged.
    """

    files: tuple[StoredFile, ...]
    tensors: dict[str, LocatedTensor]
    unreadable: frozenset[str]
    problems: tuple[Problem, ...]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def shard_paths(directory: Path) -> tuple[tuple[Path, ...], dict[str, str] | None]:
    """Shards in name order, and the index's tensor -> file map; None without an index (every .safetensors counts).

    Raises:
        CheckpointError: no such directory, no shard, or an index that cannot be used.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; expected config.json and .safetensors files in it")
    index_path = directory / INDEX_NAME
    if not index_path.exists():
        paths = tuple(sorted(directory.glob("*.safetensors")))
        if not paths:
            raise CheckpointError(f"{directory}: neither {INDEX_NAME} nor any .safetensors file")
        return paths, None
    try:
        weight_map = msgspec.json.decode(index_path.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{index_path}: not a readable index: {error}") from error
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if outside or not names:
        raise CheckpointError(
            f"{index_path}: names {outside or 'no files'}; expected .safetensors files of its own directory"
        )
    return tuple(directory / name for name in names), weight_map


def build_catalogue(directory: Path, *, wanted: Callable[[str], bool] = lambda _name: True) -> Catalogue:
    """Reads the headers of a checkpoint; faults of single files and names are collected, not raised.

    Args:
        wanted: by official name; files that the index gives no wanted tensor are not opened, other tensors not listed.

    Raises:
        CheckpointError: as shard_paths.
    """
    paths, weight_map = shard_paths(directory)
    if weight_map is not None:
        weight_map = {name: file for name, file in weight_map.items() if wanted(strip_prefix(name))}
        paths = tuple(path for path in paths if path.name in set(weight_map.values()))
    problems: list[Problem] = []
    files = []
    for path in paths:
        try:
            files.append(read_header(path))
        except CheckpointError as error:
            problems.append(Problem(kind="unreadable file", text=error.message))
    tensors: dict[str, LocatedTensor] = {}
    for file in files:
        for stored in file.tensors:
            name = strip_prefix(stored.name)
            if not wanted(name):
                continue
            if name in tensors:
                first = tensors[name].file.path.name
                problems.append(Problem(kind="duplicate", text=f"{file.path.name}: {stored.name} is also in {first}"))
            tensors[name] = LocatedTensor(file=file, stored=stored)
    readable = {file.path.name for file in files}
    if weight_map is not None:
        problems += _index_problems(weight_map, tensors, readable)
    return Catalogue(
        files=tuple(files),
        tensors=tensors,
        unreadable=frozenset(strip_prefix(n) for n, file in (weight_map or {}).items() if file not in readable),
        problems=tuple(problems),
    )


def raise_problems(directory: Path, problems: Sequence[Problem]) -> NoReturn:
    """One error for all faults: the count of each kind, then the first ten in full."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(problem.kind for problem in problems).items())
    shown = "; ".join(problem.text for problem in problems[:_SHOWN_PROBLEMS])
    rest = f"; and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
    raise CheckpointError(
        f"{directory}: {len(problems)} problem{'s' * (len(problems) > 1)} ({kinds}): {shown}{rest}; nothing was loaded",
        problems=tuple(problem.text for problem in problems),
    )


def _index_problems(weight_map: dict[str, str], tensors: dict[str, LocatedTensor], readable: set[str]) -> list[Problem]:
    problems = []
    placed = {strip_prefix(name): file for name, file in weight_map.items()}
    for name, file in placed.items():
        located = tensors.get(name)
        if file in readable and (located is None or located.file.path.name != file):
            place = located.file.path.name if located else "no file"
            problems.append(
                Problem(kind="index mismatch", text=f"{INDEX_NAME}: {name} should be in {file}, is in {place}")
            )
    for name, located in tensors.items():
        if name not in placed:
            text = f"{located.file.path.name}: {located.stored.name} is not in {INDEX_NAME}"
            problems.append(Problem(kind="index mismatch", text=text))
    return problems
