"""A validated Prefill request as plain values, its digest, and its message to a rank. Built by rpc/convert.py only."""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from prefill_engine.handoff_pieces import PushRegion
from prefill_engine.messages import ImageItem, Sampling, Submit
from prefill_engine.vision_client.image_source import ImageSource

PRIORITY_NAMES = ("interactive", "standard", "sheddable")


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlan:
    """Where a decode peer wants the hand-over pushed (HandoffPlan.PUSH). endpoint: of its HandoffSink. grant_id: as secret as a
    ticket. lease_seconds: of the grant, renewed while the push goes on. already_cached_tokens: whose Block KV the peer has."""

    endpoint: str
    engine_id: str
    grant_id: bytes
    lease_seconds: float
    regions: tuple[PushRegion, ...]
    early_send: bool
    already_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCall:
    """One attempt as asked for.

    tokens: int32 little-endian; emptied once the rank has them. offered_hit: None without a HitPlan. store: "best_effort",
    "required" or "skip". handoff: False = no ticket (HandoffPlan NONE). mode: "pull", "push" or "store_only".
    push: with mode "push". ticket_ttl_seconds, ttft_target_seconds, max_queue_wait_seconds, max_compute_rows, step_cap_ms: None =
    not asked for. digest: of all that makes the content (C45). sources: of the images' rows, by index; the front's alone, and no
    part of the content; emptied as tokens are.
    """

    request_id: str
    attempt: int
    attempt_id: bytes
    digest: bytes
    tokens: bytes
    num_tokens: int
    images: tuple[ImageItem, ...]
    cache_scope: bytes
    priority: int
    fairness_key: str
    weight: int
    offered_hit: int | None
    step_cap_ms: float | None
    ttft_target_seconds: float | None
    max_queue_wait_seconds: float | None
    max_compute_rows: int | None
    sampling: Sampling
    handoff: bool
    ticket_ttl_seconds: float | None
    store: str
    progress_gap_seconds: float
    wants_timeline: bool
    mode: str = "pull"
    push: PushPlan | None = None
    sources: tuple[ImageSource, ...] = ()

    def submit_message(self, *, arrival_ns: int) -> Submit:
        """What the rank is told. arrival_ns: CLOCK_MONOTONIC."""
        return Submit(
            attempt_id=self.attempt_id,
            request_id=self.request_id,
            tokens=self.tokens,
            images=self.images,
            cache_scope=self.cache_scope,
            offered_hit=self.offered_hit,
            priority=self.priority,
            fairness_key=self.fairness_key,
            weight=self.weight,
            step_cap_ms=self.step_cap_ms,
            max_compute_rows=self.max_compute_rows,
            sampling=self.sampling,
            store=self.store,
            handoff=self.handoff,
            arrival_ns=arrival_ns,
            store_only=self.mode == "store_only",
            push=self.push.regions if self.push is not None else (),
            early_send=self.push is not None and self.push.early_send,
        )


def digest_content(parts: Iterable[bytes]) -> bytes:
    """SHA-256 over length-prefixed parts, so that no two lists of parts share a digest by concatenation."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()
