"""A rank's end of kvd's socket: one session kept up by a thread of its own, and calls that never raise.

Used by KvdSource's threads, never by the step thread. Owner of the channel and of the pool's mapping. The traps: a call without
a deadline would hang with a stopped kvd, so each has one, and what it may have been granted meanwhile is given back on the
session, which kvd reads when it goes on; after a restart of kvd the pool may be another file, so whoever holds a Link compares it
before trusting what it wrote or read.
"""

import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc

from prefill_engine.kv.pool_memory import PoolGeometry, PoolMemory
from prefill_engine.rpc import kv_pb2, kv_pb2_grpc
from prefill_plan.config import KvdLink
from prefill_plan.errors import ConfigError

logger = logging.getLogger(__name__)
Request = TypeVar("Request")
Answer = TypeVar("Answer")

PROTOCOL = 1
# No silence ends a session: a frozen rank keeps its slots, into which it may still write (kv.md 7.5, kvd/sessions.py). What a
# beat is good for: Close calls that got no answer are sent again.
_BEAT_SECONDS = 0.5
_MOST_CLOSED = 1 << 14
"""Ids in one Close; kvd takes 65,536 of each kind. The rest goes with the next beat."""
_RETRY_SECONDS = 0.2
_AWAY = "away"
_CALL_SECONDS = 2.0
_COMMIT_SECONDS = 30.0
"""Commit answers when the medium has the blocks; nobody waits for it but the store report."""
_LATE_SECONDS = 10.0
"""An Open is waited for this much longer than anybody needs it: its lease can then be closed by its id."""
_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One session that is up. epoch: kvd's, as the pool's header had it when the session began. say: sends on the session."""

    stub: kv_pb2_grpc.KvdStub
    pool: PoolMemory
    epoch: int
    say: Callable[[kv_pb2.SessionRequest], None]

    @property
    def is_current(self) -> bool:
        """False once another kvd incarnation serves the pool: nothing read or written since then counts."""
        return self.pool.epoch == self.epoch


class KvdClient:
    """The session and its calls."""

    def __init__(
        self,
        settings: KvdLink,
        *,
        geometry: PoolGeometry,
        rank: int,
        held_leases: Callable[[], Sequence[int]],
        on_change: Callable[[], None],
    ) -> None:
        """held_leases: asked at each new session, by the session thread. on_change: called when link or store state changed."""
        self.owner_epoch = secrets.randbits(63) | 1
        self.settings = settings
        self._geometry = geometry
        self._rank = rank
        self._held_leases = held_leases
        self._on_change = on_change
        self._link: Link | None = None
        # Every pool ever mapped: other threads may still read one that kvd has left.
        self._pools: list[PoolMemory] = []
        self._unclosed: set[int] = set()
        self._filling: set[int] = set()
        self._call_ids = itertools.count(1)
        self._told = ""
        self._store_ok = True
        self._is_draining = False
        self._transport = ""
        self._down_since = time.monotonic()
        self._failure: ConfigError | None = None
        self._settled = threading.Event()
        self._stopping = threading.Event()
        self._session: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name="kvd-session", daemon=True)

    @property
    def link(self) -> Link | None:
        """The session, if one is up. A view of another thread's state: it may be gone the moment after."""
        return self._link

    @property
    def is_ok(self) -> bool:
        return self._link is not None and self._store_ok

    @property
    def down_seconds(self) -> float:
        """How long there has been no session; 0 while there is one."""
        return 0.0 if self._link is not None else time.monotonic() - self._down_since

    def start(self) -> None:
        """Opens the first session; without kvd it goes on alone after connect_seconds, every hit a miss.

        Raises:
            ConfigError: kvd answers, but the two do not see the same memory, or it refuses this rank's geometry.
        """
        self._thread.start()
        self._settled.wait(self.settings.connect_seconds)
        if self._failure is not None:
            self.stop()
            raise self._failure
        if self._link is None:
            logger.error(
                "kvd does not answer; the rank starts without it and keeps trying",
                extra={"socket": self.settings.socket, "waited_seconds": self.settings.connect_seconds},
            )

    def stop(self) -> None:
        """Ends session and thread; leases go with it."""
        self._stopping.set()
        session = self._session
        if session is not None:
            session.cancel()  # type: ignore[no-untyped-call]
        self._thread.join()

    # --- calls
    def open(self, request: kv_pb2.OpenRequest, done: Callable[["kv_pb2.OpenResponse | None"], None]) -> None:
        """Calls done(answer) later, on a thread of grpc's; None = no answer. It may come long after anybody waits for it. Sets
        the request's call_id."""
        link = self._link
        if link is None:
            done(None)
            return
        request.call_id = next(self._call_ids)

        def end(answer: kv_pb2.OpenResponse | None) -> None:
            if answer is None:
                _abandon(link, request.call_id)
            done(answer)

        _call(link.stub.Open, request, seconds=self.settings.open_seconds + _LATE_SECONDS, done=end)

    def reserve(self, link: Link, request: kv_pb2.ReserveSlotsRequest) -> kv_pb2.ReserveSlotsResponse | None:
        """Waits for the answer; None = none came. Slots that were granted are the caller's until `filled`, over a restart of
        kvd, too. Sets the request's call_id. A kvd that drains is not asked: it would refuse."""
        if self._is_draining:
            return None
        request.call_id = next(self._call_ids)
        answers: queue.SimpleQueue[kv_pb2.ReserveSlotsResponse | None] = queue.SimpleQueue()
        _call(link.stub.Reserve, request, seconds=_CALL_SECONDS, done=answers.put)
        answer = answers.get()
        if answer is None:
            _abandon(link, request.call_id)
        elif answer.reservation_id:
            self._filling.add(answer.reservation_id)
        return answer

    def filled(self, link: Link, reservation_id: int) -> None:
        """Nothing is written into the slots of a reservation any more. A kvd that was restarted meanwhile adopted it: it is told
        to let go, since the commit is not for it."""
        self._filling.discard(reservation_id)
        if not link.is_current:
            self.close([reservation_id])

    def commit(
        self,
        link: Link,
        request: kv_pb2.CommitRequest,
        done: Callable[["kv_pb2.CommitResponse | None"], None],
    ) -> None:
        """Calls done(answer) when kvd has stored the blocks or given up. Without an answer the reservation is closed: the
        commit may never have begun."""

        def end(answer: kv_pb2.CommitResponse | None) -> None:
            if answer is None:
                self.close([request.reservation_id])
            done(answer)

        _call(link.stub.Commit, request, seconds=_COMMIT_SECONDS, done=end)

    def truncate(self, lease_id: int, *, num_blocks: int) -> None:
        """Tells kvd that the end of a lease is not needed; nobody waits for the answer."""
        link = self._link
        if link is not None:
            request = kv_pb2.TruncateRequest(lease_id=lease_id, num_blocks=num_blocks)
            _call(link.stub.Truncate, request, seconds=_CALL_SECONDS, done=lambda _answer: None)

    def close(self, ids: Sequence[int]) -> None:
        """Ends leases and reservations; nobody waits. Those of a kvd that is away or frozen are closed when it is back, since
        it may have adopted them."""
        self._unclosed.update(ids)
        self._send_close()

    def _send_close(self) -> None:
        link, ids = self._link, tuple(self._unclosed)[:_MOST_CLOSED]
        if link is None or not ids:
            return

        def end(answer: kv_pb2.CloseResponse | None) -> None:
            if answer is not None:
                self._unclosed.difference_update(ids)

        _call(link.stub.Close, kv_pb2.CloseRequest(lease_ids=ids), seconds=_CALL_SECONDS, done=end)

    # --- the session thread
    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with grpc.insecure_channel(f"unix:{self.settings.socket}", options=_OPTIONS) as channel:
                    stub: kv_pb2_grpc.KvdStub = kv_pb2_grpc.KvdStub(channel)  # type: ignore[no-untyped-call]
                    self._serve_session(stub)
            except ConfigError as error:
                self._refuse(error)
            except grpc.RpcError as error:
                if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    self._refuse(ConfigError(f"kvd refuses this rank: {error.details()}"))
                elif not self._stopping.is_set():
                    self._tell_away(error)
            except Exception:
                logger.exception("the kvd session failed; tried again")
            self._set_link(None)
            self._stopping.wait(_RETRY_SECONDS)
        for pool in self._pools:
            pool.close()

    def _refuse(self, error: ConfigError) -> None:
        if not self._settled.is_set():
            self._failure = error
            self._settled.set()
        if self._told != error.message:  # once: the next try is a moment away
            self._told = error.message
            logger.error("kvd can't be used; every hit is a miss until it can", extra={"error": error.message})

    def _serve_session(self, stub: kv_pb2_grpc.KvdStub) -> None:
        requests: queue.SimpleQueue[kv_pb2.SessionRequest | None] = queue.SimpleQueue()
        requests.put(self._hello())
        self._is_draining = False
        self._session = session = stub.Session(_with_beats(requests, self._send_close))
        link: Link | None = None
        try:
            if self._stopping.is_set():  # stop() may have cancelled the session before this one
                return
            for response in session:
                match response.WhichOneof("m"):
                    case "welcome":
                        pool = self._map(response.welcome)
                        link = Link(stub=stub, pool=pool, epoch=response.welcome.kvd_epoch, say=requests.put)
                        pool.set_echo(response.welcome.echo_index, self.owner_epoch)
                        requests.put(kv_pb2.SessionRequest(attached=kv_pb2.SessionAttached()))
                    case "ready":
                        self._set_link(link)
                        self._settled.set()
                        self._send_close()
                    case "notice":
                        self._hear(response.notice)
                if self._stopping.is_set():
                    return
        finally:
            requests.put(None)
            session.cancel()

    def _hear(self, notice: kv_pb2.SessionNotice) -> None:
        if (notice.transport, notice.draining) != (self._transport, self._is_draining):
            extra = {"transport": notice.transport, "draining": notice.draining}
            logger.info("kvd says how it stands", extra=extra)
        self._transport, self._is_draining = notice.transport, notice.draining
        self._store_ok = notice.store_ok
        self._on_change()

    def _hello(self) -> kv_pb2.SessionRequest:
        form = self._geometry
        return kv_pb2.SessionRequest(
            hello=kv_pb2.SessionHello(
                protocol=PROTOCOL,
                engine_id=f"rank-{self._rank}-{self.owner_epoch:016x}",
                rank=self._rank,
                owner_epoch=self.owner_epoch,
                geometry=kv_pb2.BlockGeometry(
                    layout_digest=form.layout_digest,
                    header_bytes=form.header_bytes,
                    payload_bytes=form.payload_bytes,
                    record_bytes=form.record_bytes,
                    group_bytes=form.group_bytes,
                ),
                snapshot_bytes=form.snapshot_payload_bytes,
                held_leases=(*self._held_leases(), *tuple(self._filling)),
            )
        )

    def _map(self, welcome: kv_pb2.SessionWelcome) -> PoolMemory:
        """The pool as it is laid out now. The mapping of an earlier session stays in use if it is the same file (a GPU would
        have to pin a new one)."""
        pool = PoolMemory.attach(welcome.pool_path, nonce=welcome.nonce)
        form = (pool.nonce, pool.geometry, pool.num_blocks, pool.num_snapshots)
        if pool.geometry != self._geometry:
            pool.close()
            raise ConfigError(f"kvd's pool is laid out as {form[1]}: expected {self._geometry}")
        for old in self._pools:
            if (old.nonce, old.geometry, old.num_blocks, old.num_snapshots) == form:
                pool.close()
                return old
        self._pools.append(pool)
        return pool

    def _tell_away(self, error: grpc.RpcError) -> None:
        """Once per absence: the next try is a moment away."""
        if self._told != _AWAY:
            self._told = _AWAY
            detail = error.details() if isinstance(error, grpc.Call) else str(error)
            logger.warning("no session with kvd; every hit is a miss until it is back", extra={"error": detail})

    def _set_link(self, link: Link | None) -> None:
        was_up = self._link is not None
        self._link = link
        if link is not None:
            self._told = ""
        if link is None and was_up:
            self._down_since = time.monotonic()
        if was_up or link is not None:
            logger.info("kvd session", extra={"is_up": link is not None})
            self._on_change()


def _abandon(link: Link, call_id: int) -> None:
    """A call that kvd did not answer in time may still be granted something. The session keeps the order of what is said on it
    and needs no answer: a kvd that was frozen reads it when it goes on, and one that is restarted asks what is held."""
    link.say(kv_pb2.SessionRequest(abandon=kv_pb2.SessionAbandon(call_ids=[call_id])))


def _with_beats(
    requests: "queue.SimpleQueue[kv_pb2.SessionRequest | None]", on_beat: Callable[[], None]
) -> Iterator[kv_pb2.SessionRequest]:
    """What is put, and beats in between."""
    while True:
        try:
            request = requests.get(timeout=_BEAT_SECONDS)
        except queue.Empty:
            request = kv_pb2.SessionRequest(beat=kv_pb2.SessionBeat())
            on_beat()
        if request is None:
            return
        yield request


def _call(
    method: "grpc.UnaryUnaryMultiCallable[Request, Answer]",
    request: Request,
    *,
    seconds: float,
    done: Callable[[Answer | None], None],
) -> None:
    """Calls done(answer) on a thread of grpc's, or done(None) when there is none."""

    def end(future: "grpc.Future[Answer]") -> None:
        try:
            done(future.result())
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            logger.info("kvd gave no answer", extra={"call": type(request).__name__, "error": str(error)})
            done(None)

    try:
        future = method.future(request, timeout=seconds)
    except ValueError:  # the channel was closed a moment ago
        done(None)
        return
    future.add_done_callback(end)
