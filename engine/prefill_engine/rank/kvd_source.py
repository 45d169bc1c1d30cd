"""BlockSource over the pod's KV sidecar: leases of hits, their swap-in, and the way of new blocks and snapshots to kvd.

The step thread only puts jobs into queues. A thread of this class ("kvd-link") owns the leases: it asks for them, hands them to
the copy thread (swap_in.py) and closes them; the writer has a thread of its own. The traps: a lease is closed only when no copy
reads its slots; an answer of kvd that comes after anybody waits for it still brings a lease to close; numbers in answers are
checked, since slots become addresses.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefill_engine.kv.pool_memory import PoolGeometry
from prefill_engine.kv.record import RecordCodec
from prefill_engine.kv.snapshot_record import SnapshotCodec
from prefill_engine.kv_cache import KvCache
from prefill_engine.rank.block_copy import BlockMovers
from prefill_engine.rank.block_source import (
    Completion,
    Load,
    LookUp,
    LookupDone,
    OpenGate,
    SnapshotDone,
    SnapshotOutlook,
    StepGate,
    WriteItem,
    guarded,
)
from prefill_engine.rank.cuda_gates import CudaGates
from prefill_engine.rank.kvd_client import KvdClient, Link
from prefill_engine.rank.kvd_hit import Hit, mode_of, read_answer
from prefill_engine.rank.kvd_writer import KvdWriter
from prefill_engine.rank.step_gate import CpuStepGate
from prefill_engine.rank.swap_counters import SwapCounters
from prefill_engine.rank.swap_in import LoadProgress, SwapIn, SwapJob
from prefill_engine.rank.swap_limit import SwapLimits
from prefill_engine.rpc import kv_pb2
from prefill_engine.swa_pool import SwaSnapshot
from prefill_plan.block_keys import snapshot_key
from prefill_plan.config import KvdLink
from prefill_plan.kv_layout import BLOCK_TOKENS

_IDLE_SECONDS = 3600.0


@dataclass(slots=True, kw_only=True)
class _Ask:
    """An Open that is under way. load: what to do with the answer (None: LookupDone). is_dropped: nobody waits any more.
    is_urged: of the load."""

    request: LookUp
    late_at: float
    load: Load | None = None
    progress: LoadProgress | None = None
    is_dropped: bool = False
    is_urged: bool = False


@dataclass(slots=True)
class _Leases:
    """Of the link thread."""

    hits: dict[bytes, Hit] = field(default_factory=dict)
    asks: dict[bytes, _Ask] = field(default_factory=dict)


class KvdSource:
    """The rank's side of kvd. Build it after the cache, start() it before the first call."""

    def __init__(
        self,
        settings: KvdLink,
        *,
        cache: KvCache,
        movers: BlockMovers,
        make_gates: Callable[[threading.Condition, SwapCounters], CudaGates] | None,
        rank: int,
        wake: Callable[[], None],
        is_required: bool,
    ) -> None:
        """make_gates: for a cache in device memory; None: gates make the step thread wait. is_required: being without kvd for
        connect_seconds counts as lost."""
        self.completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        layout = cache.layout
        self._settings = settings
        self._wake = wake
        self._is_required = is_required
        self._source_layers = tuple(source.layer for source in layout.sources)
        self._counters = SwapCounters()
        self._leases = _Leases()
        self._held: tuple[int, ...] = ()
        self._loads: dict[bytes, LoadProgress] = {}
        geometry = PoolGeometry.of_layout(layout, snapshot_bytes=cache.state.snapshot_bytes)
        snapshots = SnapshotCodec(geometry.layout_digest, geometry.snapshot_payload_bytes)
        self.client = KvdClient(settings, geometry=geometry, rank=rank, held_leases=lambda: self._held, on_change=wake)
        self._swap_in = SwapIn(
            copier=movers.copier,
            codec=snapshots,
            group_bytes=geometry.group_bytes,
            limits=SwapLimits.of(settings, on_gpu=make_gates is not None),
            gate_seconds=settings.gate_seconds,
            post=self._post,
            on_end=lambda attempt_id: self._jobs.put(lambda: self._end_load(attempt_id)),
            is_up=lambda link: self.client.link is link,
            counters=self._counters,
        )
        self._gates = make_gates(self._swap_in.changed, self._counters) if make_gates is not None else None
        self._writer = KvdWriter(
            self.client,
            codec=RecordCodec(layout),
            snapshots=snapshots,
            saver=movers.saver,
            post=self._post,
        )
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=guarded(self._run, self._post), name="kvd-link", daemon=True)

    def start(self) -> None:
        """Connects.

        Raises:
            ConfigError: engine and kvd do not see the same memory, or kvd refuses this rank.
        """
        try:
            self.client.start()
        except BaseException:
            self._swap_in.stop()
            self._writer.stop()
            raise
        self._thread.start()

    # --- the step thread's side
    @property
    def is_ok(self) -> bool:
        """As BlockSource."""
        return self.client.is_ok

    @property
    def is_lost(self) -> bool:
        """As BlockSource: kvd comes back by itself, unless it stays away for longer than a start may take."""
        return self._is_required and self.client.down_seconds > self._settings.connect_seconds

    def look_up(self, request: LookUp) -> bool:
        """As BlockSource; also when every block is resident, for the snapshot."""
        self._jobs.put(lambda: self._ask(request, load=None, progress=None))
        return True

    def load(self, request: Load) -> bool:
        """As BlockSource; also without blocks to load, for the snapshot."""
        progress = LoadProgress(progress=time.monotonic())
        self._loads[request.attempt_id] = progress
        self._jobs.put(lambda: self._load(request, progress))
        return True

    def gate(self, attempt_ids: Sequence[bytes], *, is_shared: bool) -> StepGate:
        """As BlockSource."""
        loads = {each: self._loads[each] for each in attempt_ids}
        if not loads:
            return OpenGate()
        if self._gates is not None:
            return self._gates.open(loads, is_shared=is_shared)
        return CpuStepGate(
            loads,
            changed=self._swap_in.changed,
            source_layers=self._source_layers,
            gate_seconds=self._settings.gate_seconds,
            is_shared=is_shared,
            counters=self._counters,
        )

    def urge(self, attempt_id: bytes) -> None:
        """As BlockSource."""
        self._jobs.put(lambda: self._urge(attempt_id))

    def let_go(self, attempt_id: bytes) -> None:
        """As BlockSource."""
        self._loads.pop(attempt_id, None)
        self._jobs.put(lambda: self._let_go(attempt_id))

    def write(self, attempt_id: bytes, items: Sequence[WriteItem], *, tenant: str) -> None:
        """As BlockSource."""
        self._writer.write(attempt_id, items, tenant=tenant)

    def keep_snapshots(self, attempt_id: bytes, snapshots: Sequence[tuple[bytes, SwaSnapshot]], *, tenant: str) -> bool:
        """As BlockSource."""
        self._writer.keep_snapshots(attempt_id, snapshots, tenant=tenant)
        return True

    def counters(self) -> dict[str, int]:
        """As BlockSource."""
        return self._counters.snapshot()

    def stop(self) -> None:
        """As BlockSource."""
        self._writer.stop()
        if self._gates is not None:
            self._gates.stop()
        self._swap_in.stop()
        self._jobs.put(None)
        self._thread.join()
        self.client.stop()

    def _post(self, completion: Completion) -> None:
        self.completions.put(completion)
        self._wake()

    # --- the link thread
    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._seconds_to_late())
            except queue.Empty:
                self._give_up_late()
                continue
            if job is None:
                return
            job()
            self._held = tuple(hit.lease_id for hit in self._leases.hits.values())

    def _seconds_to_late(self) -> float:
        waiting = [ask.late_at for ask in self._leases.asks.values() if not ask.is_dropped]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else _IDLE_SECONDS

    def _give_up_late(self) -> None:
        now = time.monotonic()
        for ask in self._leases.asks.values():
            if not ask.is_dropped and now >= ask.late_at:
                ask.is_dropped = True
                self._counters.add("kv_open_late")
                self._answer(ask, None)

    def _ask(self, request: LookUp, *, load: Load | None, progress: LoadProgress | None) -> None:
        late_at = time.monotonic() + self._settings.open_seconds
        ask = _Ask(request=request, late_at=late_at, load=load, progress=progress)
        self._leases.asks[request.attempt_id] = ask
        link = self.client.link
        message = kv_pb2.OpenRequest(
            owner_epoch=self.client.owner_epoch,
            attempt_id=request.attempt_id,
            keys=b"".join(request.keys),
            resident_blocks=request.resident_blocks,
            tenant=request.tenant,
            want_snapshot=True,
            step_waits=request.step_waits,
        )
        message.limit.FromNanoseconds(round(self._settings.swap_in_seconds * 1e9))
        self.client.open(message, lambda answer: self._jobs.put(lambda: self._take_answer(ask, link, answer)))

    def _take_answer(self, ask: _Ask, link: Link | None, answer: kv_pb2.OpenResponse | None) -> None:
        if self._leases.asks.get(ask.request.attempt_id) is ask:
            del self._leases.asks[ask.request.attempt_id]
        hit = None if link is None or answer is None else read_answer(answer, ask.request, link)
        if answer is not None and answer.shrunk_blocks:
            self._counters.add("kv_open_shrunk")
        if ask.is_dropped or hit is None:
            if answer is not None and answer.lease_id:
                self.client.close([answer.lease_id])
            hit = None
        if not ask.is_dropped:
            self._answer(ask, hit)

    def _answer(self, ask: _Ask, hit: Hit | None) -> None:
        attempt_id = ask.request.attempt_id
        if hit is not None:
            self._leases.hits[attempt_id] = hit
        if ask.load is not None and ask.progress is not None:
            self._begin(ask.load, ask.progress, hit)
            if ask.is_urged:
                self._urge(attempt_id)
            return
        present = len(hit.slots) if hit is not None else 0
        outlook = hit.outlook if hit is not None else SnapshotOutlook.NONE
        found = ask.request.resident_blocks + present
        self._counters.add(f"kv_open_{mode_of(found, outlook)}")
        self._counters.add("kv_requested_tokens", len(ask.request.keys) * BLOCK_TOKENS)
        self._counters.add("kv_hit_tokens", found * BLOCK_TOKENS)
        due = time.monotonic() + self._settings.snapshot_seconds
        self._post(LookupDone(attempt_id=attempt_id, present=present, snapshot=outlook, snapshot_due=due))

    def _load(self, load: Load, progress: LoadProgress) -> None:
        """Begins with the lease of the look-up, or with a new one where that one does not cover the load: blocks that were
        resident then are not now, or kvd was restarted."""
        hit = self._leases.hits.get(load.attempt_id)
        if hit is not None and hit.resident <= load.first_block and hit.link is self.client.link:
            self._begin(load, progress, hit)
            return
        self._close(load.attempt_id)
        if not load.slots:
            self._begin(load, progress, None)
            return
        request = LookUp(
            attempt_id=load.attempt_id, keys=load.keys, resident_blocks=load.first_block, tenant=load.tenant
        )
        self._ask(request, load=load, progress=progress)

    def _begin(self, load: Load, progress: LoadProgress, hit: Hit | None) -> None:
        if hit is None:
            self._swap_in.refuse(load.attempt_id, progress)
            return
        is_cut = len(load.keys) < hit.found
        if is_cut:
            self.client.truncate(hit.lease_id, num_blocks=len(load.keys) - hit.resident)
        wanted = max(0, min(hit.found, len(load.keys)) - load.first_block)
        first = load.first_block - hit.resident
        has_snapshot = hit.outlook is not SnapshotOutlook.NONE and len(load.keys) == hit.found
        if not has_snapshot:
            self._post(
                SnapshotDone(attempt_id=load.attempt_id, snapshot=None)
            )  # an earlier lease may have promised one
        hit.is_loading = True
        self._swap_in.start(
            SwapJob(
                attempt_id=load.attempt_id,
                link=hit.link,
                owner_epoch=self.client.owner_epoch,
                lease_row=hit.row,
                lease_id=hit.lease_id,
                first=first,
                keys=load.keys[load.first_block : load.first_block + wanted],
                sources=hit.slots[first : first + wanted],
                targets=load.slots[:wanted],
                num_blocks=len(load.slots),
                snapshot_key=snapshot_key(load.keys[-1]) if has_snapshot else b"",
            ),
            progress,
        )

    def _urge(self, attempt_id: bytes) -> None:
        hit = self._leases.hits.get(attempt_id)
        if hit is not None and hit.is_loading:
            hit.link.say(kv_pb2.SessionRequest(urge=kv_pb2.SessionUrge(lease_ids=[hit.lease_id])))
        elif (ask := self._leases.asks.get(attempt_id)) is not None:
            ask.is_urged = True

    def _end_load(self, attempt_id: bytes) -> None:
        hit = self._leases.hits.get(attempt_id)
        if hit is not None:
            hit.is_loading = False
            self._close(attempt_id)

    def _let_go(self, attempt_id: bytes) -> None:
        ask = self._leases.asks.get(attempt_id)
        if ask is not None and not ask.is_dropped:
            ask.is_dropped = True
            self._answer_dropped(ask)
        self._swap_in.give_up(attempt_id)
        self._close(attempt_id)

    def _answer_dropped(self, ask: _Ask) -> None:
        """The step thread still waits for one answer of each call, even for an attempt that has ended."""
        if ask.load is not None and ask.progress is not None:
            self._swap_in.refuse(ask.request.attempt_id, ask.progress)
        else:
            self._post(LookupDone(attempt_id=ask.request.attempt_id, present=0))

    def _close(self, attempt_id: bytes) -> None:
        """Closes the attempt's lease as soon as no copy reads its slots."""
        hit = self._leases.hits.get(attempt_id)
        if hit is not None and not hit.is_loading:
            del self._leases.hits[attempt_id]
            self.client.close([hit.lease_id])
