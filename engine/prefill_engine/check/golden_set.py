"""A directory of golden data: tiny checkpoint, manifest, expected tensors (format: its README). Found and read, not judged."""

import json
import re
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from prefill_plan.errors import ConfigError


class NotGolden(ConfigError):
    """The directory is not of the golden format."""

    code = "NOT_GOLDEN"


class CaseEntry(msgspec.Struct, frozen=True):
    length: int
    file: str


class ChunkState(msgspec.Struct, frozen=True):
    """After `n` tokens: finished groups and tokens of an open group, by KV source layer."""

    n: int
    compressed: dict[str, int]
    tail: dict[str, int]


class ChunkedEntry(msgspec.Struct, frozen=True):
    """plan: rows of each chunk. states: of the first chunks (all, or the first few)."""

    plan: list[int]
    states: list[ChunkState]


class DecoderKeep(msgspec.Struct, frozen=True):
    keep: int
    rect_lo: int


class DecoderReplayEntry(msgspec.Struct, frozen=True):
    prompt: str
    keep: int
    rect_lo: int
    fp32: dict[str, object]

    def plans(self) -> list[list[int]]:
        """Chunk plans the manifest reports for this replay: keys chunked_A+B_diff."""
        found = (re.fullmatch(r"chunked_(\d+(?:\+\d+)*)_diff", key) for key in self.fp32)
        return [[int(part) for part in match[1].split("+")] for match in found if match]


class EncoderReplayNumbers(msgspec.Struct, frozen=True):
    with_decoder_keep: DecoderKeep


class EncoderReplayEntry(msgspec.Struct, frozen=True):
    prompt: str
    hit: int
    replay: int
    swa_valid_start: int
    fp32: EncoderReplayNumbers


class Manifest(msgspec.Struct, frozen=True):
    cases: dict[str, CaseEntry]
    chunked: dict[str, ChunkedEntry] = {}
    decoder_replay: dict[str, DecoderReplayEntry] = {}
    encoder_replay: dict[str, EncoderReplayEntry] = {}


class GoldenSet:
    """One set. Files are read once, when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        for needed in ("config.json", "tokenizer.json", "manifest.json", "cases"):
            if not (path / needed).exists():
                raise NotGolden(f"{path}: no {needed}; expected a directory of golden data", path=str(path))
        try:
            # Not msgspec's decoder: manifests hold Infinity, as Python's json writes it.
            self.manifest = msgspec.convert(json.loads((path / "manifest.json").read_bytes()), Manifest)
        except (json.JSONDecodeError, msgspec.MsgspecError) as error:
            raise NotGolden(f"{path / 'manifest.json'}: not a golden manifest: {error}", path=str(path)) from error
        self._files: dict[str, dict[str, Tensor]] = {}

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Tensors of cases/<name>.safetensors; empty if there is no such file."""
        if name not in self._files:
            file = self.path / "cases" / f"{name}.safetensors"
            try:
                self._files[name] = load_file(file) if file.exists() else {}
            except SafetensorError as error:
                raise NotGolden(f"{file}: not a safetensors file: {error}", path=str(file)) from error
        return self._files[name]

    def regimes(self) -> set[str]:
        """Prefixes that its cases have expected values for."""
        return {key.split("/")[0] for name in self.manifest.cases for key in self.tensors(name) if "/" in key}

    def case_of_length(self, length: int) -> str:
        """Name of the plain text case with that many tokens; chunk plans are filed under lengths."""
        for name, case in self.manifest.cases.items():
            if case.length == length and name.startswith("text"):
                return name
        raise NotGolden(
            f"{self.path}: a chunk plan of {length} tokens, but no text case of that length", path=str(self.path)
        )


def find_sets(path: Path) -> list[Path]:
    """The directory of the set at `path`, or those of all sets directly under it, by name.

    Raises:
        NotGolden: neither.
    """
    if (path / "manifest.json").exists():
        return [path]
    children = sorted(child.parent for child in path.glob("*/manifest.json"))
    if not children:
        raise NotGolden(f"{path}: no manifest.json there or one level below; expected golden data", path=str(path))
    return children
