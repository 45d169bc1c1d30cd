"""Constants of the Engram hash, derived from the tokenizer and the config alone (model.md 2.11).

Three parts: the compressed vocabulary (token id -> class of tokens that read alike), the primes and offsets of each
layer's table, and the hash multipliers. Built once per engine; `ops.engram_hash` takes them as tensors. The trap: every
number must be equal to the trainer's, so normalisation is the tokenizers library's, and multipliers are numpy's PCG64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from prefill_plan.engram_primes import build_engram_primes
from prefill_plan.errors import CheckpointError, ConfigError
from prefill_plan.model_spec import EngramSpec, ModelSpec

_REPLACEMENT = "\ufffd"
_LONE_SPACE = "\ue000"
_SEED_FACTOR = 10007  # model.md 2.11


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramLayerTables:
    """Hash constants of one Engram layer, int64.

    multipliers: [max_ngram], odd. primes: [max_ngram - 1, heads]. offsets: [(max_ngram - 1) * heads], first table row
    of each (n-gram size, head), sizes outer.
    """

    layer: int
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramTables:
    """What `ops.engram_hash` needs of a model; every tensor on one device."""

    token_map: Tensor
    """[vocab_size] int64: compressed id of each token id; ids without a token carry the pad's."""
    pad_id: int
    """Compressed id that stands for "no token here"."""
    layers: tuple[EngramLayerTables, ...]

    def for_layer(self, layer: int) -> EngramLayerTables:
        """Constants of main layer `layer`; KeyError if it has no Engram."""
        for tables in self.layers:
            if tables.layer == layer:
                return tables
        raise KeyError(layer)

    def to(self, device: torch.device) -> "EngramTables":
        """The same tables with their tensors on `device`."""
        layers = tuple(
            replace(
                tables,
                multipliers=tables.multipliers.to(device),
                primes=tables.primes.to(device),
                offsets=tables.offsets.to(device),
            )
            for tables in self.layers
        )
        return replace(self, token_map=self.token_map.to(device), layers=layers)


def build_engram_tables(spec: ModelSpec, tokenizer_path: Path) -> EngramTables | None:
    """All hash constants of a model, on the CPU; None when it has no Engram layer.

    Args:
        tokenizer_path: `tokenizer.json`.

    Raises:
        CheckpointError: the tokenizer cannot be read, or its compressed vocabulary differs from the config's.
        ConfigError: a table has fewer rows than its primes add up to.
    """
    if spec.engram is None:  # then nothing needs a tokenizer
        return None
    try:
        tokenizer = tokenizer_path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{tokenizer_path}: cannot be read: {error.strerror}") from error
    return parse_engram_tables(spec, tokenizer, source=str(tokenizer_path))


def parse_engram_tables(spec: ModelSpec, tokenizer: bytes, *, source: str) -> EngramTables | None:
    """As build_engram_tables, from the content of tokenizer.json; source names it in messages."""
    if spec.engram is None:
        return None
    token_map = build_token_map(tokenizer, source=source)
    _check_vocabulary(spec, spec.engram, token_map, source=source)
    pad_id = token_map[spec.engram.pad_token_id]
    padded = np.full(spec.vocab_size, pad_id, dtype=np.int64)
    padded[: len(token_map)] = token_map
    return EngramTables(
        token_map=torch.from_numpy(padded),
        pad_id=pad_id,
        layers=_layer_tables(spec.engram),
    )


def build_token_map(tokenizer: bytes, *, source: str) -> list[int]:
    """Compressed id of every id the tokenizer knows, numbered by first appearance.

    Raises:
        CheckpointError: not a tokenizer.json.
    """
    try:
        parsed = Tokenizer.from_buffer(tokenizer)
    except Exception as error:  # the library raises bare Exception for every cause
        raise CheckpointError(f"{source}: not a tokenizer.json: {error}") from error
    normalizer = _normalizer()
    size = parsed.get_vocab_size(with_added_tokens=True)
    texts = parsed.decode_batch([[token_id] for token_id in range(size)], skip_special_tokens=False)
    numbers: dict[str, int] = {}
    token_map = []
    for token_id, text in enumerate(texts):
        is_fragment = _REPLACEMENT in text  # a piece of a UTF-8 character has no text to normalise
        name = parsed.id_to_token(token_id) if is_fragment else normalizer.normalize_str(text)
        key = name or text
        token_map.append(numbers.setdefault(key, len(numbers)))
    return token_map


def engram_multipliers(engram: EngramSpec, layer: int) -> tuple[int, ...]:
    """Odd hash multipliers of one layer, small enough that id * multiplier stays in int64."""
    bound = max(1, (2**63 - 1) // engram.compressed_vocab_size // 2)
    values = np.random.default_rng(_SEED_FACTOR * layer).integers(0, bound, size=engram.max_ngram)
    return tuple(int(value) * 2 + 1 for value in values)


def _layer_tables(engram: EngramSpec) -> tuple[EngramLayerTables, ...]:
    all_primes = build_engram_primes(
        len(engram.layers), max_ngram=engram.max_ngram, vocab_size=engram.vocab_size, num_heads=engram.num_heads
    )
    tables = []
    for layer, primes, rows in zip(engram.layers, all_primes, engram.num_embeddings, strict=True):
        flat = [prime for size in primes for prime in size]
        if sum(flat) > rows:
            raise ConfigError(
                f"engram_num_embeddings is {rows} for layer {layer}, but its {len(flat)} primes from "
                f"engram_vocab_size {engram.vocab_size} up need {sum(flat)} rows"
            )
        offsets = [sum(flat[:index]) for index in range(len(flat))]
        tables.append(
            EngramLayerTables(
                layer=layer,
                multipliers=_int64(engram_multipliers(engram, layer)),
                primes=torch.tensor(primes, dtype=torch.int64),
                offsets=_int64(offsets),
            )
        )
    return tuple(tables)


def _int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _check_vocabulary(spec: ModelSpec, engram: EngramSpec, token_map: list[int], *, source: str) -> None:
    if len(token_map) > spec.vocab_size:
        raise CheckpointError(f"{source}: {len(token_map)} tokens, but the config's vocab_size is {spec.vocab_size}")
    if engram.pad_token_id >= len(token_map):
        raise CheckpointError(f"{source}: {len(token_map)} tokens, but engram_pad_token_id is {engram.pad_token_id}")
    compressed = max(token_map) + 1
    if compressed != engram.compressed_vocab_size:
        raise CheckpointError(
            f"{source}: {compressed} compressed tokens, but engram_compressed_vocab_size is "
            f"{engram.compressed_vocab_size}; the tokenizer belongs to another model"
        )


def _normalizer() -> normalizers.Sequence:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),  # a token that is one space must survive the strip
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
