"""Names of segments and where they lie: `<root>/kv/<layout>/<generation>/<xx>/<32 hex>.seg`. Pure.

A generation is a time bucket, and a part of it: a new part begins when one has grown to the bytes that a collection frees, so
that a store which fills within one bucket still has something old to give up. Where tenants have shares, each has generations of
its own, so that any kvd can tell from names and sizes what a tenant holds. The trap: a segment's name comes from a directory
service, that is from outside; only `resolve` makes a path of it.
"""

import hashlib
import re
from dataclasses import dataclass

TEMP_NAME = ".tmp"
MARKER_NAME = ".withdrawn"
"""Tells the other kvds of a shared store that a generation is about to be deleted."""

_GENERATION = re.compile(r"[0-9]{12}-[0-9]{4}(-[0-9a-f]{8})?")
_SHARD = re.compile(r"[0-9a-f]{2}")
_FILE = re.compile(r"[0-9a-f]{32}\.seg")
_PARTS = 10_000


_OWNER_BYTES = 4


def owner_tag(tenant: str, *, store_id: str) -> str:
    """What stands for a tenant in names: 8 hexadecimal digits of a hash that differs from store to store, so that the medium
    tells no names. The same for every kvd of a store."""
    return hashlib.blake2b(tenant.encode(), key=store_id.encode()[:64], digest_size=_OWNER_BYTES).hexdigest()


def generation_name(now: float, *, generation_seconds: float, part: int, owner: str = "") -> str:
    """Name of the generation of a moment: start of its bucket in seconds, the part, and the owner's tag if it has one. Names
    sort by age."""
    start = int(now // generation_seconds * generation_seconds)
    return f"{start:012d}-{part % _PARTS:04d}{'-' if owner else ''}{owner}"


def owner_of(generation: str) -> str:
    """The tag in a generation's name; "" = it is nobody's."""
    return generation.split("-")[2] if generation.count("-") == 2 else ""


def part_of(generation: str) -> int:
    return int(generation.split("-")[1])


def is_same_bucket(generation: str, other: str) -> bool:
    return generation.split("-")[0] == other.split("-")[0]


def is_generation(name: str) -> bool:
    return _GENERATION.fullmatch(name) is not None


def is_shard(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


def is_segment_file(name: str) -> bool:
    return _FILE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPaths:
    """Paths of one layout below a root."""

    root: str
    layout_id: bytes

    @property
    def prefix(self) -> str:
        """Of the names of this layout."""
        return f"kv/{self.layout_id.hex()}"

    @property
    def layout(self) -> str:
        return f"{self.root}/{self.prefix}"

    def generation(self, generation: str) -> str:
        return f"{self.layout}/{generation}"

    def name(self, generation: str, file_id: str) -> str:
        """Of a segment; file_id: 32 hexadecimal digits."""
        return f"{self.prefix}/{generation}/{file_id[:2]}/{file_id}.seg"

    def path(self, name: str) -> str:
        """Of a segment named by this store itself."""
        return f"{self.root}/{name}"

    def resolve(self, name: str) -> str | None:
        """Path of a segment of this layout; None for any other text."""
        parts = name.split("/")
        if len(parts) != 5 or f"{parts[0]}/{parts[1]}" != self.prefix:
            return None
        generation, shard, file = parts[2:]
        if not is_generation(generation) or not is_segment_file(file) or shard != file[:2]:
            return None
        return f"{self.root}/{name}"
