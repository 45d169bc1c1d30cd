"""A kvd under the test's thumb: the real pool memory and the real protocol, but watermarks move only as far as the test says.

For what a real kvd does too fast or too rarely: a group that is late, a lease that is lost in mid-copy, a snapshot that arrives
at a chosen moment. It never evicts and has no store.
"""

import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from prefill_engine.kv.pool_memory import LeaseState, PoolGeometry, PoolMemory, SnapshotState
from prefill_engine.rpc import kv_pb2, kv_pb2_grpc

GROUPS = 4
END_SECONDS = 30.0


class DaemonThreads(Executor):
    """A thread per call that does not keep the process: Python joins a ThreadPoolExecutor's at its exit, without a deadline, so a
    test that fails before it closes its fake would hang there for as long as a rank beats on its session."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="fake-kvd", daemon=True).start()
        return future


class FakeKvd(kv_pb2_grpc.KvdServicer):
    """held: per group, blocks of a lease that may become ready (None: all). limit: of every lease (None: all).

    pulling: snapshots are on their way until `deliver_snapshots`. mute: calls by name that are neither acted on nor answered.
    silent: Open, Reserve: acted on, but not answered. refuses: every session.
    """

    def __init__(self, *, pool_bytes: int = 24 << 20) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="kvd"))
        self.socket = str(self.dir / "s")
        self._pool_bytes = pool_bytes
        self._pool_path = f"/dev/shm/fake-kvd-{secrets.token_hex(6)}"
        self._lock = threading.RLock()
        self.blocks: dict[bytes, int] = {}
        self.snapshots: dict[bytes, int] = {}
        self.held: dict[int, int | None] = {}
        self.limit: int | None = None
        self.pulling = False
        self.room: int | None = None
        """Blocks after the resident ones that there is room for; None = all."""
        self.mute: set[str] = set()
        self.silent: set[str] = set()
        self.call_ids: dict[int, int] = {}
        self.refuses = self.is_draining = False
        self.calls: list[str] = []
        self.urged: list[int] = []
        self.leases: dict[int, int] = {}
        self.reservations: dict[int, tuple[list[int], list[int]]] = {}
        self.num_used = self.num_snapshots_used = 0
        self._num_rows = 0
        self._stopped = threading.Event()
        self._server: grpc.Server | None = None
        self.start()

    # --- life
    def start(self) -> None:
        """A new incarnation on the same file."""
        self.epoch = secrets.randbits(60)
        self._stopped.clear()
        self.pool = PoolMemory.create(self._pool_path, pool_bytes=self._pool_bytes, epoch=self.epoch)
        self._server = grpc.server(DaemonThreads())
        kv_pb2_grpc.add_KvdServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def kill(self) -> None:
        """Gone without a word; the file stays, leases stay as they are in it."""
        ended = self._server.stop(
            None
        )  # None ends the calls here and now; 0 leaves that to a thread, and a muted call may be answered
        self._stopped.set()
        assert ended.wait(END_SECONDS), (
            f"the fake's server did not end within {END_SECONDS:g} s; calls: {self.calls[-8:]}"
        )
        self.pool.close()

    def close(self) -> None:
        if not self._stopped.is_set():
            self.kill()
        Path(self._pool_path).unlink()

    @classmethod
    @contextmanager
    def running(cls, *, pool_bytes: int = 24 << 20) -> Iterator["FakeKvd"]:
        """One that is closed whatever happens."""
        fake = cls(pool_bytes=pool_bytes)
        try:
            yield fake
        finally:
            fake.silent.clear()
            fake.mute.clear()
            fake.close()

    # --- what a test does to it
    def let_through(self) -> None:
        """Everything held becomes ready, in leases of now and later."""
        with self._lock:
            self.held.clear()
            for row in self.leases.values():
                self._move(row)

    def deliver_snapshots(self, state: SnapshotState = SnapshotState.READY) -> None:
        """Every pull ends like this."""
        with self._lock:
            self.pulling = False
            for row in self.leases.values():
                lease = self.pool.lease(row)
                if lease.snapshot_state is SnapshotState.PULLING:
                    lease.snapshot_state = state

    def cut_leases(self, limit: int) -> None:
        """Reads of blocks from `limit` on have failed."""
        with self._lock:
            for row in self.leases.values():
                self.pool.lease(row).limit_blocks = limit

    def lose_leases(self) -> None:
        with self._lock:
            for row in self.leases.values():
                self.pool.lease(row).state = LeaseState.LOST

    def reuse_slots(self) -> None:
        """Every block slot gets another block's record, as if it had been evicted and filled again."""
        with self._lock:
            for slot in self.blocks.values():
                self.pool.record(slot)[:] = secrets.token_bytes(len(self.pool.record(slot)))

    def _move(self, row: int) -> None:
        lease = self.pool.lease(row)
        for group in range(len(self.pool.geometry.group_bytes)):
            held = self.held.get(group)
            lease.set_ready(group, lease.num_blocks if held is None else min(held, lease.num_blocks))
        lease.progress_ns = time.monotonic_ns()

    # --- the service
    def Session(self, requests, context):
        hello = next(requests).hello
        form = hello.geometry
        geometry = PoolGeometry(
            layout_digest=form.layout_digest,
            header_bytes=form.header_bytes,
            payload_bytes=form.payload_bytes,
            record_bytes=form.record_bytes,
            group_bytes=tuple(form.group_bytes),
            snapshot_payload_bytes=hello.snapshot_bytes,
        )
        self.calls.append("Session")
        index = self.calls.count("Session")
        self.hello = hello
        with self._lock:
            if self.refuses:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another geometry")
            if self.pool.geometry is None:
                self.pool.lay_out(geometry, self._pool_bytes // 4)
            elif self.pool.geometry != geometry:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another geometry")
        welcome = kv_pb2.SessionWelcome(
            protocol=1, kvd_epoch=self.epoch, pool_path=self._pool_path, nonce=self.pool.nonce, echo_index=index
        )
        yield kv_pb2.SessionResponse(welcome=welcome)
        assert next(requests).WhichOneof("m") == "attached"
        if self.pool.echo(index) != hello.owner_epoch:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the echo was not seen")
        yield kv_pb2.SessionResponse(ready=kv_pb2.SessionReady())
        notice = kv_pb2.SessionNotice(store_ok=True, transport="tcp", draining=self.is_draining)
        yield kv_pb2.SessionResponse(notice=notice)
        for request in requests:
            if request.WhichOneof("m") == "abandon":
                self._abandon(request.abandon.call_ids)
            elif request.WhichOneof("m") == "urge":
                self.urged.extend(request.urge.lease_ids)

    def Open(self, request, context):
        self._meet("Open", context)
        keys = [request.keys[at : at + 32] for at in range(0, len(request.keys), 32)]
        with self._lock:
            found = next(
                (i for i, key in enumerate(keys) if i >= request.resident_blocks and key not in self.blocks), None
            )
            known = len(keys) if found is None else found
            found = known if self.room is None else min(known, request.resident_blocks + self.room)
            snapshot = self.snapshots.get(b"\x01" + keys[found - 1]) if found else None
            if found == request.resident_blocks and snapshot is None:
                return kv_pb2.OpenResponse(found_blocks=found, snapshot=kv_pb2.OpenResponse.NONE)
            slots = [self.blocks[key] for key in keys[request.resident_blocks : found]]
            row, self._num_rows = self._num_rows, self._num_rows + 1
            lease = self.pool.lease(row)
            lease.clear()
            lease_id = secrets.randbits(60) | 1
            lease.owner_epoch = request.owner_epoch
            lease.num_blocks = len(slots)
            lease.limit_blocks = len(slots) if self.limit is None else self.limit
            lease.state = LeaseState.LIVE
            outlook = kv_pb2.OpenResponse.NONE
            if snapshot is not None:
                lease.snapshot_slot = snapshot
                lease.snapshot_state = SnapshotState.PULLING if self.pulling else SnapshotState.READY
                outlook = kv_pb2.OpenResponse.PULLING if self.pulling else kv_pb2.OpenResponse.HELD
            lease.lease_id = lease_id
            self.leases[lease_id] = row
            self.call_ids[lease_id] = request.call_id
            self._move(row)
        self._withhold("Open")
        return kv_pb2.OpenResponse(
            lease_id=lease_id,
            lease_row=row,
            found_blocks=found,
            slots=slots,
            snapshot=outlook,
            snapshot_slot=snapshot or 0,
            shrunk_blocks=known - found,
        )

    def Reserve(self, request, context):
        self._meet("Reserve", context)
        with self._lock:
            slots = list(range(self.num_used, min(self.pool.num_blocks, self.num_used + request.num_blocks)))
            first = self.num_snapshots_used
            snapshots = list(range(first, min(self.pool.num_snapshots, first + request.num_snapshots)))
            if not slots and not snapshots:
                return kv_pb2.ReserveSlotsResponse()
            self.num_used += len(slots)
            self.num_snapshots_used += len(snapshots)
            reservation = secrets.randbits(60) | 1
            self.reservations[reservation] = (slots, snapshots)
            self.call_ids[reservation] = request.call_id
        self._withhold("Reserve")
        return kv_pb2.ReserveSlotsResponse(reservation_id=reservation, slots=slots, snapshot_slots=snapshots)

    def Commit(self, request, context):
        self._meet("Commit", context)
        with self._lock:
            if self.reservations.pop(request.reservation_id, None) is None:
                return kv_pb2.CommitResponse(failure="unknown reservation")
            for block in request.blocks:
                self.blocks.setdefault(block.key, block.slot)
            for snapshot in request.snapshots:
                self.snapshots.setdefault(snapshot.key, snapshot.slot)
        return kv_pb2.CommitResponse(stored_blocks=len(request.blocks), held_snapshots=len(request.snapshots))

    def Truncate(self, request, context):
        self._meet("Truncate", context)
        return kv_pb2.TruncateResponse(known=request.lease_id in self.leases)

    def Close(self, request, context):
        self._meet("Close", context)
        with self._lock:
            unknown = [each for each in request.lease_ids if not self._end(each)]
        return kv_pb2.CloseResponse(unknown=len(unknown))

    def _abandon(self, call_ids) -> None:
        self.calls.append("abandon")
        with self._lock:
            for each in [one for one, call_id in self.call_ids.items() if call_id in call_ids]:
                self._end(each)

    def _end(self, lease_or_reservation: int) -> bool:
        """False = there is no such one."""
        row = self.leases.pop(lease_or_reservation, None)
        if row is not None:
            self.pool.lease(row).clear()
        return row is not None or self.reservations.pop(lease_or_reservation, None) is not None

    def _withhold(self, call: str) -> None:
        while call in self.silent and not self._stopped.is_set():
            time.sleep(0.005)

    def _meet(self, call: str, context: grpc.ServicerContext) -> None:
        self.calls.append(call)
        while call in self.mute:
            if self._stopped.wait(0.005):
                context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
