"""Reads the configuration of engine, kvd or encoder: a JSON file, then `--set part.field=value` in order. The only reader of the
environment.

Parsed once at start; each object then gets its own part, never the whole tree.
"""

import json
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from prefill_plan.config import EngineConfig
from prefill_plan.encoder_config import EncoderConfig
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import KvdConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIdentity:
    """Who this process is to the cluster. pod_ip: address peers reach it by, "" = the bound host. plan_hash: of the memory
    plan that the operator rendered, echoed in the termination message."""

    engine_id: str
    pod_ip: str
    zone: str
    plan_hash: str


def load_config(path: Path | None, overrides: Sequence[str]) -> EngineConfig:
    """File, then overrides. An override's value is JSON if it parses as such, else a string: `server.port=0`, `model.path=/m`.

    Raises:
        ConfigError: unreadable file, bad JSON, malformed override, unknown key, wrong type; the message names the path.
    """
    return _load(path, overrides, EngineConfig)


def load_kvd_config(path: Path | None, overrides: Sequence[str]) -> KvdConfig:
    """As load_config, for the KV sidecar."""
    return _load(path, overrides, KvdConfig)


def load_encoder_config(path: Path | None, overrides: Sequence[str]) -> EncoderConfig:
    """As load_config, for a vision encoder."""
    return _load(path, overrides, EncoderConfig)


def environment_of_libraries() -> MutableMapping[str, str]:
    """The environment itself, as libraries that this process loads will read it (UCX)."""
    return os.environ


def load_identity(environ: Mapping[str, str] = os.environ) -> HostIdentity:
    """POD_NAME, POD_IP, POD_ZONE and PLAN_HASH as the operator's pod template sets them; outside a pod the host's name."""
    return HostIdentity(
        engine_id=environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        pod_ip=environ.get("POD_IP", ""),
        zone=environ.get("POD_ZONE", ""),
        plan_hash=environ.get("PLAN_HASH", ""),
    )


def _load(path: Path | None, overrides: Sequence[str], kind: type[T]) -> T:
    source = str(path) if path is not None else "--set"
    tree = _read(path) if path is not None else {}
    for override in overrides:
        _apply(tree, override)
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explain(str(error))}") from error


def _read(path: Path) -> dict[str, object]:
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(tree).__name__}")
    return tree


def _apply(tree: dict[str, object], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: expected part.field=value")
    try:
        value: object = json.loads(text)
    except ValueError:
        value = text
    node = tree
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {part} is a value, not a part of the configuration")
        node = cast(dict[str, object], child)
    node[parts[-1]] = value


def _explain(text: str) -> str:
    """msgspec's message with its `$.a.b` path first and without backticks."""
    reason, _, where = text.partition(" - at ")
    key = where.strip("`").removeprefix("$").removeprefix(".")
    reason = reason.replace("`", "")
    return f"{key}: {reason}" if key else reason
