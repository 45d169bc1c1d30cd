"""The Keeper: owner of the pool's bookkeeping, for one kvd process, on its event loop (kv.md 7).

The service translates calls into these methods. Sessions come and go here, the pool is laid out for a model here, and time does
its work here (grace, late pulls, gauges). The trap: state changes only on the loop; threads report through the Mailbox.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from prefill_engine.kv.directory import Directory
from prefill_engine.kv.pool_memory import LeaseState, PoolGeometry, PoolMemory
from prefill_engine.kv.transport.contract import Source, Transport
from prefill_engine.kvd.block_reads import BlockReads
from prefill_engine.kvd.commits import CommitResult, Commits, SlotKey
from prefill_engine.kvd.gauges import Gauges
from prefill_engine.kvd.kvd_metrics import KvdMetrics
from prefill_engine.kvd.lease_ends import LeaseEnds
from prefill_engine.kvd.lease_journal import journal_path, open_journal
from prefill_engine.kvd.leases import Lease
from prefill_engine.kvd.mailbox import Mailbox
from prefill_engine.kvd.opens import OpenAnswer, OpenAsk, Opens
from prefill_engine.kvd.pool_state import PoolState
from prefill_engine.kvd.recovery import recover_slots, restore_leases
from prefill_engine.kvd.sessions import Session, Sessions
from prefill_engine.kvd.snapshot_pulls import SnapshotPulls
from prefill_engine.kvd.store_link import StoreLink
from prefill_engine.kvd.write_back import WriteBack
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import KvdConfig

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
_CHECK_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaidOut:
    """What exists once a geometry is known."""

    state: PoolState
    reads: BlockReads
    ends: LeaseEnds
    pulls: SnapshotPulls
    write_back: WriteBack
    opens: Opens
    commits: Commits


class Keeper:
    """clock: monotonic seconds."""

    def __init__(
        self,
        config: KvdConfig,
        memory: PoolMemory,
        *,
        store: StoreLink,
        directory: Directory,
        transport: Transport,
        metrics: KvdMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._memory = memory
        self.store = store
        self._directory = directory
        self._transport = transport
        self._metrics = metrics
        self._clock = clock
        self._journal = open_journal(journal_path(memory.path))
        self._mailbox = Mailbox(asyncio.get_running_loop())
        self._store_threads = ThreadPoolExecutor(config.store.read_threads, thread_name_prefix="kvd-read")
        self._write_threads = ThreadPoolExecutor(1, thread_name_prefix="kvd-write")
        self._check_threads = ThreadPoolExecutor(_CHECK_THREADS, thread_name_prefix="kvd-check")
        self.sessions = Sessions(grace_seconds=config.lease_grace_seconds, is_alive=memory.has_living_rank, clock=clock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_id = (memory.epoch & 0xFFFF_FFFF) << 32
        self._num_calls = 0
        self._parts: _LaidOut | None = None
        self._laying_out = asyncio.Lock()
        self._gauges = Gauges(metrics, transport, directory)
        self.is_draining = False

    @property
    def memory(self) -> PoolMemory:
        return self._memory

    @property
    def state(self) -> PoolState | None:
        """None until a rank has told the geometry."""
        return self._parts.state if self._parts else None

    def start(self) -> None:
        """Takes up what a former life left, and starts housekeeping."""
        if self._memory.geometry is not None:
            self._build()
            assert self._parts is not None
            num = restore_leases(self._parts.state, self.sessions)
            logger.info("pool re-attached", extra={"leases": num, "epoch": self._memory.epoch})
            self._run(recover_slots(self._parts.state, self._parts.pulls, self._check_threads))
        else:
            self._journal.clear()
        self._run(self._housekeep())

    def find_snapshot(self, key: bytes) -> Source | None:
        """Transport.listen's question."""
        return self._parts.pulls.find(key) if self._parts else None

    def snapshot_keys(self) -> list[bytes]:
        """What this kvd serves to peers."""
        return self._parts.pulls.keys() if self._parts else []

    async def connect(
        self,
        *,
        owner_epoch: int,
        engine_id: str,
        rank: int,
        geometry: PoolGeometry,
        held_leases: Sequence[int],
    ) -> tuple[Session, list[int]]:
        """A rank's hello; returns its session and the leases it keeps.

        Raises:
            ConfigError: impossible geometry; another one while leases live; too many sessions.
        """
        async with self._laying_out:  # a second rank that brings the same new geometry finds the pool laid out
            await self._lay_out(geometry)
        session = self.sessions.connect(owner_epoch=owner_epoch, engine_id=engine_id, rank=rank, geometry=geometry)
        return session, self._laid_out.ends.adopt(owner_epoch, held_leases)

    def attach(self, session: Session) -> None:
        """The rank says it has mapped the pool.

        Raises:
            ConfigError: its echo is not there.
        """
        found = self._memory.echo(session.echo_index)
        if found != session.owner_epoch:
            raise ConfigError(
                f"echo {session.echo_index} of {self._memory.path} is {found}, expected owner epoch {session.owner_epoch}: "
                f"engine and kvd do not map the same memory; both containers need the same /dev/shm (sgl-project/sglang#10249)"
            )
        session.is_ready = True
        extra = {"engine_id": session.engine_id, "dp_rank": session.rank, "echo": session.echo_index}
        logger.info("rank attached", extra=extra)

    def disconnect(self, session: Session, connection: int) -> None:
        """Its stream ended."""
        if not self.sessions.disconnect(session, connection):
            return
        leases = self._parts.state.leases.of_owner(session.owner_epoch) if self._parts else []
        for lease in leases:
            self._laid_out.state.leases.set_state(lease, LeaseState.GRACE)
        extra = {"engine_id": session.engine_id, "dp_rank": session.rank, "leases": len(leases)}
        logger.info("rank gone; its leases are in grace", extra=extra)

    async def open(self, owner_epoch: int, ask: OpenAsk) -> OpenAnswer:
        """Raises ConfigError without a session."""
        with self._call():
            return await self._laid_out.opens.open(self._session(owner_epoch), ask)

    def reserve(
        self, owner_epoch: int, *, num_blocks: int, num_snapshots: int, tenant: str, call_id: int = 0
    ) -> Lease | None:
        """As Commits.reserve; nothing while draining. Raises ConfigError without a session."""
        session = self._session(owner_epoch)
        if self.is_draining:
            return None
        return self._laid_out.commits.reserve(
            session, num_blocks=num_blocks, num_snapshots=num_snapshots, tenant=tenant, call_id=call_id
        )

    async def commit(
        self, reservation_id: int, blocks: Sequence[SlotKey], snapshots: Sequence[SlotKey]
    ) -> CommitResult:
        """As Commits.commit. Goes on to its end if the caller is gone.

        Raises:
            ValueError: slots that are not of this reservation.
        """
        reservation = self._parts.state.leases.find(reservation_id) if self._parts else None
        if reservation is None or not reservation.is_reservation:
            failure = f"reservation {reservation_id} is not known"
            return CommitResult(stored_blocks=0, held_snapshots=0, failure=failure)
        with self._call():
            work = asyncio.ensure_future(self._laid_out.commits.commit(reservation, blocks, snapshots))
            return await asyncio.shield(work)

    def truncate(self, lease_id: int, *, num_blocks: int, drop_snapshot: bool) -> bool:
        """False = there is no such lease."""
        parts = self._parts
        return parts is not None and parts.ends.truncate(lease_id, num_blocks=num_blocks, drop_snapshot=drop_snapshot)

    def close(self, ids: Sequence[int]) -> int:
        """Ends leases and reservations; returns how many were not known."""
        return self._parts.ends.close(ids) if self._parts else len(ids)

    def abandon(self, session: Session, call_ids: Sequence[int]) -> None:
        """As LeaseEnds.abandon."""
        if self._parts is not None:
            self._parts.ends.abandon(session, call_ids)

    def urge(self, session: Session, lease_ids: Sequence[int]) -> None:
        """A step of this rank waits for these leases of its own."""
        for lease_id in lease_ids if self._parts is not None else ():
            lease = self._laid_out.state.leases.find(lease_id)
            if lease is not None and lease.owner_epoch == session.owner_epoch:
                self._laid_out.reads.urge(lease.slots)

    async def drain(self, seconds: float) -> bool:
        """No new reservations; waits for the write-back. False = not all was written in time."""
        self.is_draining = True
        return await self._parts.write_back.drain(seconds) if self._parts else True

    async def stop(self) -> None:
        """Ends tasks and threads that are not stuck."""
        for task in list(self._tasks):
            task.cancel()
        for task in list(self._tasks):
            with suppress(asyncio.CancelledError):
                await task
        if self._parts:
            self._parts.reads.cancel_all()
        for threads in (self._store_threads, self._write_threads, self._check_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self.store.close()

    @property
    def _laid_out(self) -> _LaidOut:
        assert self._parts is not None, "a ready session implies a geometry"
        return self._parts

    def _session(self, owner_epoch: int) -> Session:
        session = self.sessions.find(owner_epoch)
        if session is None or session.geometry != self._memory.geometry:
            raise ConfigError(f"owner epoch {owner_epoch} has no ready session here: say hello first")
        return session

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    async def _lay_out(self, geometry: PoolGeometry) -> None:
        geometry.check()
        if self._memory.geometry == geometry:
            return
        if self._parts is not None:
            parts = self._parts
            if self._num_calls or not parts.state.is_idle or not (parts.reads.is_idle and parts.pulls.is_idle):
                raise ConfigError(
                    f"the pool is laid out for {self._memory.geometry} and holds {len(parts.state.leases)} leases; a rank with "
                    f"{geometry} is refused until they are closed"
                )
            self._parts = None
            await self._directory.withdraw_snapshots(parts.pulls.keys())
            await parts.write_back.stop()
            await self.store.stop()
        self._memory.lay_out(geometry, self._config.snapshot_bytes)
        self._journal.clear()
        self._build()

    def _build(self) -> None:
        config, metrics = self._config, self._metrics
        state = PoolState(
            self._memory,
            self._journal,
            tenant_share=config.tenant_share,
            on_group_ready=lambda group, seconds: metrics.group_ready_seconds.labels(str(group)).observe(seconds),
        )
        reads = BlockReads(
            state,
            self._mailbox,
            metrics=metrics,
            store_threads=self._store_threads,
            check_threads=self._check_threads,
            done_reading=self.store.note_read,
        )
        pulls = self._make_pulls(state)
        write_back = WriteBack(
            state,
            self.store,
            self._directory,
            reads=reads,
            metrics=metrics,
            threads=self._write_threads,
            max_bytes=config.write_queue_bytes,
        )
        opens = Opens(
            state,
            reads=reads,
            pulls=pulls,
            store=self.store,
            directory=self._directory,
            metrics=metrics,
            new_id=self._new_id,
            read_budget_blocks=config.read_budget_bytes // state.geometry.record_bytes,
        )
        commits = Commits(
            state,
            write_back=write_back,
            pulls=pulls,
            store=self.store,
            directory=self._directory,
            metrics=metrics,
            threads=self._check_threads,
            new_id=self._new_id,
            run=self._run,
        )
        ends = LeaseEnds(state, reads, clock=self._clock, grace_seconds=config.lease_grace_seconds)
        self._parts = _LaidOut(
            state=state, reads=reads, ends=ends, pulls=pulls, write_back=write_back, opens=opens, commits=commits
        )
        self.store.start(state.geometry)
        # Snapshots alone: with one-sided RDMA a peer can read all that is registered (kv.md 7.6).
        self._run(self._transport.use_region(self._memory.snapshot_area))
        extra = {
            "layout": state.layout_id.hex(),
            "blocks": state.blocks.num_slots,
            "snapshots": state.snapshots.num_slots,
        }
        logger.info("pool laid out", extra=extra)

    def _make_pulls(self, state: PoolState) -> SnapshotPulls:
        return SnapshotPulls(
            state,
            self._transport,
            self._directory,
            metrics=self._metrics,
            threads=self._check_threads,
            run=self._run,
            deadline_seconds=self._config.pull_deadline_seconds,
            max_quarantined=self._config.max_quarantined_slots,
            clock=self._clock,
        )

    async def _housekeep(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                await self._tick()
            except Exception:
                logger.exception("housekeeping failed; goes on")

    async def _tick(self) -> None:
        parts = self._parts
        for session in self.sessions.pop_dead():
            if parts is not None:
                parts.ends.end_owner(session.owner_epoch)
        if parts is not None:
            parts.ends.end_undeclared()
            await parts.pulls.settle_late()
            self._gauges.show(parts.state, self.sessions)
        self._gauges.show_store(self.store)
        self._gauges.show_network()

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background work failed", exc_info=error)
