"""The KV side of a rank: which slots an attempt holds, from the first look-up to the last release.

Owner of BlockPool, SwaPool and the open exports; called by the step thread only. Block I/O goes through a BlockSource, reads of
the decode side through ReadServer. The trap: a slot is freed only when the attempt is idle (no I/O names it) and its export is
closed; `free` is the one place where that happens.
"""

from collections.abc import Sequence

from prefill_engine.block_pool import BlockPool
from prefill_engine.kv_cache import KvCache
from prefill_engine.messages import Region
from prefill_engine.rank.attempt import Attempt
from prefill_engine.rank.block_source import (
    BlockSource,
    Load,
    LoadDone,
    LookUp,
    LookupDone,
    SnapshotOutlook,
    StepGate,
    WriteItem,
)
from prefill_engine.rank.exports import build_components
from prefill_engine.rank.payloads import Payloads
from prefill_engine.rank.push_sender import PushSender
from prefill_engine.rank.read_server import ReadServer
from prefill_engine.swa_pool import SwaPool, SwaSnapshot
from prefill_plan.block_keys import snapshot_key
from prefill_plan.errors import CapacityError
from prefill_plan.kv_layout import BLOCK_TOKENS, StateLayout
from prefill_plan.positions import PrefillPositions, effective_hit, plan_positions


class KvKeeper:
    """Slots, snapshots, exports and store jobs of all attempts of a rank."""

    def __init__(
        self,
        *,
        cache: KvCache,
        blocks: BlockPool,
        states: SwaPool,
        source: BlockSource,
        reads: ReadServer,
        pushes: PushSender,
        payloads: Payloads,
        state_layout: StateLayout,
        keep_tokens: int,
        has_encoder: bool = False,
    ) -> None:
        """has_encoder: rows of images can be had, so a replay may meet one (C3)."""
        self.blocks = blocks
        self.states = states
        self._cache = cache
        self._source = source
        self._reads = reads
        self._pushes = pushes
        self._payloads = payloads
        self._state_layout = state_layout
        self._keep_tokens = keep_tokens
        self._has_encoder = has_encoder

    @property
    def capacity_blocks(self) -> int:
        """Blocks that one attempt could get on an idle rank."""
        return self.blocks.num_blocks - self.blocks.reserve_blocks

    # --- hit
    def start_resolving(self, attempt: Attempt, *, step_waits: bool) -> bool:
        """Pins what the pool has and asks the source for the rest; True = an answer is pending. step_waits: as LookUp's."""
        limit = attempt.prompt_tokens if attempt.submit.offered_hit is None else attempt.submit.offered_hit
        usable = effective_hit(
            min(limit, attempt.prompt_tokens),
            attempt.prompt_tokens,
            keep_tokens=self._keep_tokens,
            spans=attempt.spans,
        )
        wanted = attempt.keys[: usable // BLOCK_TOKENS]
        attempt.resident_slots = self.blocks.match(wanted)
        self.blocks.pin(attempt.resident_slots)
        if not wanted:
            return False
        attempt.read_pending = self._source.look_up(
            LookUp(
                attempt_id=attempt.attempt_id,
                keys=wanted,
                resident_blocks=len(attempt.resident_slots),
                tenant=attempt.submit.fairness_key,
                step_waits=step_waits,
            )
        )
        return attempt.read_pending

    def finish_look_up(self, attempt: Attempt, done: LookupDone) -> None:
        """Positions for what the source found. A snapshot that it holds is counted on; for one that is being pulled the attempt
        is held back a moment, where it would spare the replay."""
        present_blocks = len(attempt.resident_slots) + done.present
        if done.snapshot is SnapshotOutlook.HELD:
            attempt.promised_snapshot = present_blocks * BLOCK_TOKENS
        plan = self.resolve(attempt, present_blocks=present_blocks)
        is_of_use = plan.replay_tokens > 0 and plan.hit_tokens == present_blocks * BLOCK_TOKENS
        if done.snapshot is SnapshotOutlook.PULLING and is_of_use:
            attempt.snapshot_due = done.snapshot_due

    def resolve(self, attempt: Attempt, *, present_blocks: int) -> PrefillPositions:
        """Positions for a hit of `present_blocks` blocks; takes hold of the snapshot if one is there."""
        positions = plan_positions(
            attempt.prompt_tokens,
            offered_hit=present_blocks * BLOCK_TOKENS,
            keep_tokens=self._keep_tokens,
            window_tokens=self._state_layout.window_tokens,
            snapshot_held=lambda hit: hit == attempt.promised_snapshot or self._find_snapshot(attempt, hit) is not None,
            spans=attempt.spans,
            embeddings_available=self._has_encoder,
        )
        attempt.positions = positions
        attempt.next_row = positions.compute_start
        attempt.snapshot = self._find_snapshot(attempt, positions.hit_tokens) if positions.replay_tokens == 0 else None
        self._drop_residents_beyond(attempt, positions.hit_tokens // BLOCK_TOKENS)
        return positions

    def _find_snapshot(self, attempt: Attempt, position: int) -> SwaSnapshot | None:
        if position <= 0:
            return None
        if attempt.snapshot is not None and attempt.snapshot.position == position:
            return attempt.snapshot
        return self.states.get(snapshot_key(attempt.keys[position // BLOCK_TOKENS - 1]))

    def take_snapshot_in(self, attempt: Attempt, snapshot: SwaSnapshot | None) -> None:
        """The snapshot of the look-up is here, or lost. One that fits spares the replay of an attempt that has not begun; in the
        middle of its first step it is too late."""
        attempt.promised_snapshot, attempt.snapshot_due = 0, 0.0
        if snapshot is None or attempt.is_window_set or snapshot.position != attempt.plan.hit_tokens:
            return
        attempt.snapshot = snapshot
        self.resolve(attempt, present_blocks=attempt.plan.hit_tokens // BLOCK_TOKENS)

    def has_window(self, attempt: Attempt) -> bool:
        """Whether its window state can be had as planned: replayed, not needed, or from a snapshot that is here."""
        plan = attempt.plan
        return plan.hit_tokens == 0 or plan.replay_tokens > 0 or attempt.snapshot is not None

    def _drop_residents_beyond(self, attempt: Attempt, num_blocks: int) -> None:
        self.blocks.release(attempt.resident_slots[num_blocks:])
        attempt.resident_slots = attempt.resident_slots[:num_blocks]

    # --- admission
    def admit(self, attempt: Attempt) -> bool:
        """Takes every slot the whole prompt needs; False = no room after all, nothing taken.

        Hit blocks are looked for again: others may have published some, and unpin() may have let some go.
        """
        hit_keys = attempt.keys[: attempt.plan.hit_tokens // BLOCK_TOKENS]
        found = self.blocks.match(hit_keys)[len(attempt.resident_slots) :]
        self.blocks.pin(found)
        attempt.resident_slots += found
        state_slot = self.states.allocate_state()
        if state_slot is None:
            return False
        fresh = self.blocks.allocate(attempt.num_blocks - len(attempt.resident_slots))
        if fresh is None:
            self.states.release_state(state_slot)
            return False
        attempt.state_slot = state_slot
        attempt.block_slots = attempt.resident_slots + fresh
        attempt.num_published = len(attempt.resident_slots)
        attempt.resident_slots = ()
        return True

    def unpin(self, attempt: Attempt) -> None:
        """Lets go of the hit of an attempt that waits, because others need the room (admission.py)."""
        self._drop_residents_beyond(attempt, 0)

    def start_loading(self, attempt: Attempt) -> bool:
        """Asks the source for what the hit needs and the pool has not; True = an answer is pending."""
        hit_blocks = attempt.plan.hit_tokens // BLOCK_TOKENS
        first = attempt.num_published
        attempt.read_pending = hit_blocks > 0 and self._source.load(
            Load(
                attempt_id=attempt.attempt_id,
                keys=attempt.keys[:hit_blocks],
                first_block=first,
                slots=attempt.block_slots[first:hit_blocks],
                tenant=attempt.submit.fairness_key,
            )
        )
        return attempt.read_pending

    def finish_loading(self, attempt: Attempt, done: LoadDone) -> bool:
        """Publishes loaded blocks, which are whole now; True = the hit shrank and the positions are new.

        Raises:
            CapacityError: the hit shrank into blocks shared with others, and there is no room for own copies.
        """
        present = attempt.num_published + len(done.provenances)
        attempt.promised_snapshot = 0
        hit_before = attempt.plan.hit_tokens
        if present * BLOCK_TOKENS < hit_before or not self.has_window(attempt):
            self.resolve(attempt, present_blocks=min(present, hit_before // BLOCK_TOKENS))
            if attempt.plan.is_all_computed and not attempt.num_published:
                self.resolve(attempt, present_blocks=0)  # what is left saves no row, and a replay is not exact
        hit_blocks = attempt.plan.hit_tokens // BLOCK_TOKENS
        first, end = attempt.num_published, min(hit_blocks, attempt.num_published + len(done.provenances))
        if first < end:
            provenances = done.provenances[: end - first]
            self.blocks.publish_loaded(attempt.block_slots[first:end], attempt.keys[first:end], provenances)
        self._own_blocks_from(attempt, hit_blocks)
        attempt.num_published = hit_blocks
        has_shrunk = attempt.plan.hit_tokens < hit_before
        if has_shrunk:
            attempt.snapshot_due = 0.0  # it is of another position
        return has_shrunk

    def _own_blocks_from(self, attempt: Attempt, first_block: int) -> None:
        """Swaps resident blocks beyond a shrunk hit for fresh ones: rows will be computed there, and others read the old ones."""
        shared = attempt.block_slots[first_block : attempt.num_published]
        fresh = self.blocks.allocate(len(shared))
        if fresh is None:
            raise CapacityError(
                f"the hit shrank to {first_block} blocks and {len(shared)} blocks are not free; the attempt is refused",
                reason="KV_MEMORY",
            )
        end = first_block + len(shared)
        attempt.block_slots = attempt.block_slots[:first_block] + fresh + attempt.block_slots[end:]
        self.blocks.release(shared)

    def prepare_state(self, attempt: Attempt) -> None:
        """The state slot as the first chunk needs it: cleared, with the snapshot's rows if there is one. Called again when that
        chunk was discarded."""
        plan, snapshot = attempt.plan, attempt.snapshot
        assert self.has_window(attempt), "the hit has neither a snapshot nor a replay"
        attempt.is_window_set = True
        self._cache.clear_state(attempt.state_slot)
        if plan.replay_tokens == 0 and snapshot is not None:
            self._cache.restore_snapshot(attempt.state_slot, snapshot.position, snapshot.data)

    def gate(self, attempts: Sequence[Attempt]) -> StepGate:
        """The layer gates of a step of these attempts."""
        loading = [attempt.attempt_id for attempt in attempts if attempt.read_pending]
        return self._source.gate(loading, is_shared=len(attempts) > 1)

    def finish_first_chunk(self, attempt: Attempt) -> None:
        """Its rows are good and its hit is whole: settles what the new blocks descend from, and lets go of the look-up."""
        plan, snapshot = attempt.plan, attempt.snapshot
        hit_slots = attempt.block_slots[: plan.hit_tokens // BLOCK_TOKENS]
        is_exact = plan.replay_tokens == 0 and (snapshot is None or snapshot.exact)
        attempt.provenance = max(self.blocks.provenance(hit_slots), int(not is_exact))
        attempt.snapshot = None
        self._source.let_go(attempt.attempt_id)

    # --- results
    def publish(self, attempt: Attempt, *, upto_blocks: int) -> None:
        """Makes blocks [num_published, upto_blocks) findable in the pool; their bytes are complete."""
        for index in range(attempt.num_published, upto_blocks):
            self.blocks.publish(attempt.block_slots[index], attempt.keys[index], provenance=attempt.provenance)
        attempt.num_published = max(attempt.num_published, upto_blocks)
        self._pushes.blocks_complete(attempt, end_block=upto_blocks)

    def start_storing(self, attempt: Attempt, block_indices: Sequence[int]) -> None:
        """Hands complete blocks to the source, in chain order."""
        hit_blocks = attempt.plan.hit_tokens // BLOCK_TOKENS
        items = []
        for index in block_indices:
            slot = attempt.block_slots[index]
            provenance = self.blocks.provenance([slot]) if index < hit_blocks else attempt.provenance
            items.append(WriteItem(key=attempt.keys[index], slot=slot, block_index=index, provenance=provenance))
        if items and attempt.submit.store != "skip":
            attempt.writes_pending += 1
            attempt.blocks_to_store += len(items)
            self._source.write(attempt.attempt_id, items, tenant=attempt.submit.fairness_key)

    def store_missing_hit(self, attempt: Attempt) -> None:
        """Hit blocks of the pool that never reached the store go there now: "required" means the whole prompt."""
        resident = attempt.block_slots[: attempt.num_published]
        self.start_storing(attempt, self.blocks.unstored(resident))

    def take_snapshots(self, attempt: Attempt, positions: tuple[int, ...]) -> None:
        """Copies SWA state at `positions` into host memory (R13): kept here, else by the source."""
        first_valid = attempt.plan.window_floor
        others = []
        for position in positions:
            data = self._cache.take_snapshot(attempt.state_slot, position, first_valid=first_valid)
            snapshot = SwaSnapshot(position=position, first_valid=first_valid, exact=attempt.provenance == 0, data=data)
            key = snapshot_key(attempt.keys[position // BLOCK_TOKENS - 1])
            self.states.put(key, snapshot)
            if self.states.has(key):
                attempt.snapshots_held += (position,)
            else:
                others.append((key, snapshot))
        is_pending = bool(others) and self._source.keep_snapshots(
            attempt.attempt_id, others, tenant=attempt.submit.fairness_key
        )
        attempt.writes_pending += int(is_pending)

    def export(self, attempt: Attempt) -> tuple[Region, ...]:
        """Opens everything a decode peer reads; the state slot is free afterwards, since the export holds a copy."""
        components = build_components(attempt, cache=self._cache, payloads=self._payloads)
        self.release_state(attempt)
        self._pushes.finish(attempt, components)
        return self._reads.open(attempt.attempt_id, components)

    def check_reads(self) -> None:
        """Raises what a read of an open export failed with."""
        self._reads.check()

    # --- the end
    def stop_loading(self, attempt: Attempt) -> None:
        """Makes a load in progress end soon; for an attempt that has ended."""
        self._source.let_go(attempt.attempt_id)

    def release_state(self, attempt: Attempt) -> None:
        if attempt.state_slot >= 0:
            self.states.release_state(attempt.state_slot)
            attempt.state_slot = -1

    def free(self, attempt: Attempt) -> None:
        """Returns every slot. Only for an attempt that is idle."""
        assert attempt.is_idle, "I/O still names slots of the attempt"
        self._reads.close(attempt.attempt_id)
        self._source.let_go(attempt.attempt_id)
        self.release_state(attempt)
        self.blocks.release(attempt.resident_slots)
        self.blocks.release(attempt.block_slots)
        attempt.resident_slots = attempt.block_slots = ()
        attempt.snapshot = None
