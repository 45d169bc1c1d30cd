"""What the records of a pool look like, as a rank declares it to kvd, which knows no model (kv.md 7.2)."""

from dataclasses import dataclass

from prefill_engine.kv.lease_record import MAX_GROUPS
from prefill_plan.errors import ConfigError
from prefill_plan.kv_layout import BlockLayout

PAGE_BYTES = 4096
SNAPSHOT_HEADER_BYTES = PAGE_BYTES


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGeometry:
    """Sizes of one model's records. group_bytes: of each KV source, in payload order, without gaps."""

    layout_digest: bytes
    header_bytes: int
    payload_bytes: int
    record_bytes: int
    group_bytes: tuple[int, ...]
    snapshot_payload_bytes: int

    @classmethod
    def of_layout(cls, layout: BlockLayout, *, snapshot_bytes: int) -> "PoolGeometry":
        return cls(
            layout_digest=layout.digest(),
            header_bytes=layout.header_bytes,
            payload_bytes=layout.payload_bytes,
            record_bytes=layout.record_bytes,
            group_bytes=tuple(source.group_bytes for source in layout.sources),
            snapshot_payload_bytes=snapshot_bytes,
        )

    @property
    def snapshot_record_bytes(self) -> int:
        """Header page and payload, whole pages."""
        return _round_up(SNAPSHOT_HEADER_BYTES + self.snapshot_payload_bytes, PAGE_BYTES)

    def group_offset(self, group: int) -> int:
        """Of a group in the payload."""
        return sum(self.group_bytes[:group])

    def check(self) -> None:
        """Raises ConfigError unless records of this form can stand in a pool."""
        is_right = (
            len(self.layout_digest) == 32
            and 1 <= len(self.group_bytes) <= MAX_GROUPS
            and min(self.group_bytes) > 0
            and sum(self.group_bytes) == self.payload_bytes
            and self.header_bytes > 0
            and self.header_bytes + self.payload_bytes == self.record_bytes
            and self.record_bytes % PAGE_BYTES == 0
            and self.snapshot_payload_bytes > 0
        )
        if not is_right:
            raise ConfigError(
                f"pool geometry {self}: expected a digest of 32 bytes, 1..{MAX_GROUPS} groups that make up the payload, header + "
                f"payload = record, records of whole {PAGE_BYTES}-byte pages"
            )
