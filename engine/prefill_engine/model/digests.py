"""Digests that name a checkpoint in block keys: KV computed with other weights or another tokenizer must never be found.

Both are 32 bytes, the same on every machine that holds the same files. No torch.
"""

import hashlib
from pathlib import Path

from prefill_engine.model.checkpoint_files import INDEX_NAME, shard_paths
from prefill_engine.model.safetensors_reader import read_header
from prefill_plan.errors import CheckpointError

_DOMAIN = b"prefill weights digest 1"


def weights_digest(directory: Path) -> bytes:
    """Identity of a checkpoint, in milliseconds instead of the hour that hashing 500 GB would take.

    Covers: every byte of config.json and of the index; each shard's name, size and header (names, dtypes, shapes, places of its
    tensors). Does not cover the tensors' bytes: two fine-tunes of the same shape that were packed alike have the same digest
    unless their config.json differs, so keep their stores or tenant salts apart.

    Raises:
        CheckpointError: config.json, index or a shard's header cannot be read.
    """
    digest = hashlib.sha256()
    paths, weight_map = shard_paths(directory)
    parts = [_DOMAIN, _read(directory / "config.json"), b"" if weight_map is None else _read(directory / INDEX_NAME)]
    for path in paths:
        file = read_header(path)
        parts += [path.name.encode(), file.file_bytes.to_bytes(8, "little"), file.header]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def tokenizer_digest(directory: Path) -> bytes:
    """SHA-256 of tokenizer.json: token ids mean the same text only under the same tokenizer.

    Raises:
        CheckpointError: it cannot be read.
    """
    return hashlib.sha256(_read(directory / "tokenizer.json")).digest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
