"""Identity of Block KV: a SHA-256 chain over everything the bytes of a block depend on (kv.md 2.2, C13).

Engine, clients and stores compute the same 32 bytes in any process on any machine. The trap: a key names the prefix,
not the bytes; the same key may hold slightly different bytes after a replay, so stores are put-if-absent.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NewType

from prefill_plan.config import Struct
from prefill_plan.layer_spec import BLOCK_TOKENS

BlockKey = NewType("BlockKey", bytes)
"""32 bytes: chain hash of all tokens and images up to a block's end."""

_ROOT_DOMAIN = b"dsv41-kv\x00v1"
_SNAPSHOT_NAMESPACE = b"\x01"
_DIGEST_BYTES = 32
_TOKEN_BYTES = 4
_BLOCK_ID_BYTES = BLOCK_TOKENS * _TOKEN_BYTES


class ImageDigest(Struct):
    """An image span [start, start + length) of the prompt and what is in it."""

    start: int
    length: int
    content_key: bytes
    """32 bytes: serving.md 4.4's content_key. All image tokens share an id, so only this tells images apart."""


def chain_root(
    *, weights_digest: bytes, tokenizer_digest: bytes, layout_digest: bytes, numerics_class: str, tenant_salt: bytes
) -> bytes:
    """Start of a chain: everything but the prompt that the KV bytes depend on, plus the tenant's salt.

    Each field is preceded by its u32 little-endian length, so no two field lists give the same text.
    """
    digest = hashlib.sha256(_ROOT_DOMAIN)
    for field in (weights_digest, tokenizer_digest, layout_digest, numerics_class.encode(), tenant_salt):
        digest.update(struct.pack("<I", len(field)))
        digest.update(field)
    return digest.digest()


def block_keys(
    root: bytes, token_ids: memoryview | bytes, *, images: Sequence[ImageDigest] = ()
) -> tuple[BlockKey, ...]:
    """Keys of the complete blocks of a prompt, in order.

    Args:
        root: chain_root(...).
        token_ids: int32 little-endian.
        images: ascending, not overlapping. A block hashes offset and key of each image that overlaps it.

    Raises:
        ValueError: token bytes are no multiple of 4; images out of order, overlapping or empty; a key not of 32 bytes.
    """
    ids = memoryview(token_ids).cast("B")
    if len(ids) % _TOKEN_BYTES:
        raise ValueError(f"token_ids has {len(ids)} bytes, expected a multiple of {_TOKEN_BYTES}")
    _check_images(images)
    sha256 = hashlib.sha256
    parent = root
    keys = []
    first_image = 0
    for index in range(len(ids) // _BLOCK_ID_BYTES):
        digest = sha256(parent)
        digest.update(ids[index * _BLOCK_ID_BYTES : (index + 1) * _BLOCK_ID_BYTES])
        if first_image < len(images):
            start = index * BLOCK_TOKENS
            end = start + BLOCK_TOKENS
            for image in images[first_image:]:
                if image.start >= end:
                    break
                digest.update(struct.pack("<I", max(0, start - image.start)))
                digest.update(image.content_key)
                if image.start + image.length <= end:
                    first_image += 1
        parent = digest.digest()
        keys.append(BlockKey(parent))
    return tuple(keys)


def snapshot_key(block_key: BlockKey) -> bytes:
    """Key of the SWA snapshot at the end of a block: the same chain, another namespace. 33 bytes."""
    return _SNAPSHOT_NAMESPACE + block_key


def _check_images(images: Sequence[ImageDigest]) -> None:
    previous_end = 0
    for image in images:
        if image.start < previous_end or image.length < 1:
            raise ValueError(
                f"image span start {image.start}, length {image.length}: expected length >= 1 and "
                f"start >= {previous_end}, the end of the span before it"
            )
        if len(image.content_key) != _DIGEST_BYTES:
            raise ValueError(f"image content key of {len(image.content_key)} bytes, expected {_DIGEST_BYTES}")
        previous_end = image.start + image.length
