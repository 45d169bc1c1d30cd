"""One attempt on a rank: the record the step thread keeps from Submit to Released, and its life as an enum.

    RESOLVING -> WAITING -> LOADING -> RUNNING -> COMPUTED -> (gone)
RUNNING may begin while the later layer groups of the hit still come in; a step that waited for them in vain puts the attempt back
to LOADING. Any phase may end early: `ended` is set (cancel, failure) and the record goes as soon as no I/O names its slots.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from prefill_engine.batch import SpanEmbeddings
from prefill_engine.messages import Submit
from prefill_engine.swa_pool import SwaSnapshot
from prefill_plan.block_keys import BlockKey
from prefill_plan.kv_layout import BLOCK_TOKENS
from prefill_plan.positions import PrefillPositions, Span


class AttemptPhase(Enum):
    RESOLVING = auto()  # the store is asked how much of the prompt it has
    WAITING = auto()  # accepted; waits for KV memory
    LOADING = auto()  # hit blocks are on their way into slots
    RUNNING = auto()  # rows left to compute
    COMPUTED = auto()  # every row done; hand-off and store may still be open


@dataclass(slots=True, kw_only=True)
class Attempt:
    """Mutable; owned by the step thread."""

    submit: Submit
    token_ids: npt.NDArray[np.int32]
    is_image: npt.NDArray[np.bool_]
    spans: tuple[Span, ...]
    keys: tuple[BlockKey, ...]
    """Keys of the complete blocks of the prompt."""
    arrival_seconds: float
    """CLOCK_MONOTONIC at the front."""
    phase: AttemptPhase = AttemptPhase.RESOLVING
    resident_slots: tuple[int, ...] = ()
    """Leading hit blocks found in the pool, pinned from the start; moved into block_slots at admission."""
    positions: PrefillPositions | None = None
    snapshot: SwaSnapshot | None = None
    """Goes into the window rings at the first chunk; kept until that chunk is committed."""
    promised_snapshot: int = 0
    """Position of the snapshot that the source said it holds, until it is here or lost; 0 = none."""
    snapshot_due: float = 0.0
    """CLOCK_MONOTONIC seconds until which its first step waits for a snapshot from a peer; 0 = it waits for none."""
    images_wanted: dict[int, int] = field(default_factory=dict)
    """Images whose rows the front was asked for -> the round of the asking (image_messages.py)."""
    images_round: int = 0
    embeddings: dict[int, SpanEmbeddings] = field(default_factory=dict)
    """Rows of images that are here and not all computed."""
    block_slots: tuple[int, ...] = ()
    """Slots of blocks 0..ceil(L/128)-1, each referenced once, from admission on."""
    state_slot: int = -1
    is_window_set: bool = False
    """Its window state was prepared for the chunk that computes or has computed its first rows: the plan of it stands."""
    next_row: int = 0
    first_token: int = -1
    num_published: int = 0
    """Leading blocks of block_slots whose bytes are complete (hit or computed)."""
    provenance: int = 0
    """1 when its new blocks descend from a replay, its own or an earlier one (kv.md 2.2)."""
    writes_pending: int = 0
    """Write jobs the block source has not answered."""
    read_pending: bool = False
    """A look-up or load is with the block source."""
    is_urged: bool = False
    """Its source was told that nothing else is left to wait for."""
    poisoned: bool = False
    """A step waited for its hit in vain: it runs again only when the load is over (C18)."""
    blocks_to_store: int = 0
    """Blocks handed to the block source so far."""
    blocks_committed: int = 0
    blocks_failed: int = 0
    snapshots_held: tuple[int, ...] = ()
    ended: bool = False
    """Cancelled or failed: no further row, store write or event; freed when no I/O is pending."""
    release_asked: bool = False
    push_pending: bool = False
    """The courier pushes it to a decode peer, or may still have a write in flight."""

    @property
    def attempt_id(self) -> bytes:
        return self.submit.attempt_id

    @property
    def prompt_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_blocks(self) -> int:
        """Blocks the whole prompt needs, the partial last one included."""
        return -(-self.prompt_tokens // BLOCK_TOKENS)

    @property
    def plan(self) -> PrefillPositions:
        """Positions; only after the hit is resolved."""
        assert self.positions is not None, "hit not resolved yet"
        return self.positions

    @property
    def rows_left(self) -> int:
        """Rows still to compute, replayed ones included; the whole prompt while the hit is unknown."""
        match self.phase:
            case AttemptPhase.RESOLVING:
                return self.prompt_tokens
            case AttemptPhase.COMPUTED:
                return 0
            case _:
                return 0 if self.ended else self.prompt_tokens - self.next_row

    @property
    def rows_computed(self) -> int:
        """Rows done so far, replayed ones included."""
        return 0 if self.positions is None else self.next_row - self.positions.compute_start

    @property
    def runnable_end(self) -> int:
        """Rows below it can be computed: an image whose rows are not here ends them at its start (serving.md 4.6)."""
        for index, span in enumerate(self.spans):
            if span.end > self.next_row and index not in self.embeddings:
                return max(span.start, self.next_row)
        return self.prompt_tokens

    def is_held_back(self, now: float) -> bool:
        """Whether it had better not begin yet: a snapshot may still come that spares the replay it is planned with."""
        return now < self.snapshot_due and not self.is_window_set

    @property
    def is_idle(self) -> bool:
        """No thread but the step thread knows its slots."""
        return not self.read_pending and self.writes_pending == 0 and not self.push_pending


def read_submit(submit: Submit, keys: tuple[BlockKey, ...]) -> Attempt:
    """The record of a new attempt."""
    token_ids = np.frombuffer(submit.tokens, dtype="<i4").astype(np.int32, copy=False)
    is_image = np.zeros(token_ids.shape[0], dtype=np.bool_)
    for image in submit.images:
        is_image[image.start : image.start + image.length] = True
    return Attempt(
        submit=submit,
        token_ids=token_ids,
        is_image=is_image,
        spans=tuple(Span(start=image.start, length=image.length) for image in submit.images),
        keys=keys,
        arrival_seconds=submit.arrival_ns / 1e9,
    )
