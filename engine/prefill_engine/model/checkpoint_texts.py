"""The text files of a checkpoint to be written: config, tokenizer, tokenizer config; presets from package data, or a user's.

Presets keep the structure of model.md 8.1: 12 layers with every attention mode, two Engram layers, one DSpark layer. `tiny` has
window 16 and runs in a blink; `demo` has the window of the release, so the default keep tokens mean something.
Their tokenizer is a byte-level BPE with 240 merges learnt from texts of this repository: any text can be sent, at about two
characters a token; special, image and placeholder ids are those of the golden models.
"""

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import msgspec

from prefill_engine.model.engram_tables import parse_engram_tables
from prefill_plan.errors import ConfigError
from prefill_plan.model_spec import ModelSpec, parse_model_spec

PRESETS = ("tiny", "demo")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTexts:
    """File contents, byte for byte."""

    config: bytes
    tokenizer: bytes
    tokenizer_config: bytes


def read_preset(name: str) -> CheckpointTexts:
    """One of PRESETS."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r}: expected one of {', '.join(PRESETS)}")
    data = files("prefill_engine") / "data"
    return CheckpointTexts(
        config=(data / f"{name}.json").read_bytes(),
        tokenizer=(data / "tokenizer.json").read_bytes(),
        tokenizer_config=(data / "tokenizer_config.json").read_bytes(),
    )


def read_custom(config_path: Path) -> CheckpointTexts:
    """A user's config.json, with the tokenizer files beside it; each that is not there is the presets' (512 tokens).

    Raises:
        ConfigError: a file cannot be read.
    """
    preset = read_preset(PRESETS[0])
    return CheckpointTexts(
        config=_read(config_path),
        tokenizer=_read_or(config_path.with_name("tokenizer.json"), preset.tokenizer),
        tokenizer_config=_read_or(config_path.with_name("tokenizer_config.json"), preset.tokenizer_config),
    )


def without_quantisation(texts: CheckpointTexts) -> CheckpointTexts:
    """The same model as a dense checkpoint: no quantization_config (decisions C11).

    Raises:
        ConfigError: config is not a JSON object.
    """
    try:
        values = msgspec.json.decode(texts.config, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ConfigError(f"config: not a JSON object: {error}") from error
    values.pop("quantization_config", None)
    return replace(texts, config=msgspec.json.format(msgspec.json.encode(values), indent=1))


def check_texts(texts: CheckpointTexts, *, source: str) -> ModelSpec:
    """The spec of the config, once config and tokenizer are known to fit each other.

    Raises:
        ConfigError, CheckpointError: as parse_model_spec and parse_engram_tables.
    """
    spec = parse_model_spec(texts.config, source=source)
    parse_engram_tables(spec, texts.tokenizer, source=f"tokenizer for {source}")
    return spec


def _read_or(path: Path, default: bytes) -> bytes:
    return _read(path) if path.exists() else default


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
