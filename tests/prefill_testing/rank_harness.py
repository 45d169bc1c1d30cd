"""A rank in the test's own process: built like the real one, turned by hand, with a list for a mailbox."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from prefill_engine.messages import FromRank, RankLoad, Released, Sampling, Submit, ToRank
from prefill_engine.rank.attempt import Attempt
from prefill_engine.rank.build import build_rank
from prefill_engine.rank.courier import Courier
from prefill_engine.rank.read_server import ReadServer
from prefill_plan.config import (
    Device,
    EngineConfig,
    KvConfig,
    ModelConfig,
    ReplayConfig,
    SchedulerConfig,
    StoreConfig,
    StoreKind,
)

M = TypeVar("M")
TINY_QUANT = Path(__file__).parents[1] / "golden" / "tiny_quant"
PATIENCE_SECONDS = 60.0


def tiny_engine_config(
    *,
    store_path: Path | None = None,
    pool_tokens: int = 8192,
    state_slots: int = 4,
    snapshot_bytes: int = 1 << 24,
    chunk_cap_tokens: int = 256,
    canary_seconds: float = 3600.0,
    ops: str = "ref",
) -> EngineConfig:
    """The golden quantised model (window 16) on the CPU; small keep, so that the decoder floor matters (C4)."""
    store = StoreConfig() if store_path is None else StoreConfig(kind=StoreKind.FILE, path=str(store_path))
    return EngineConfig(
        model=ModelConfig(path=str(TINY_QUANT)),
        device=Device.CPU,
        ops=ops,
        replay=ReplayConfig(keep_tokens=24),
        kv=KvConfig(pool_tokens=pool_tokens, state_slots=state_slots, snapshot_bytes=snapshot_bytes),
        store=store,
        scheduler=SchedulerConfig(
            chunk_cap_tokens=chunk_cap_tokens, min_chunk_tokens=16, canary_seconds=canary_seconds
        ),
    )


def tiny_tokens(length: int, *, seed: int = 1) -> np.ndarray:
    """[length] int32 ids of the tiny vocabulary, special ids left out."""
    return np.random.default_rng(seed).integers(3, 480, length, dtype=np.int32)


def make_submit(
    tokens: np.ndarray,
    *,
    attempt: int = 1,
    store: str = "best_effort",
    handoff: bool = True,
    offered_hit: int | None = None,
    max_compute_rows: int | None = None,
    step_cap_ms: float | None = None,
    images: tuple = (),
) -> Submit:
    return Submit(
        attempt_id=attempt.to_bytes(16, "big"),
        request_id=f"r{attempt}",
        tokens=tokens.astype("<i4").tobytes(),
        images=images,
        cache_scope=b"tenant",
        offered_hit=offered_hit,
        priority=2,
        fairness_key="t",
        weight=1,
        step_cap_ms=step_cap_ms,
        max_compute_rows=max_compute_rows,
        sampling=Sampling(sample=True, temperature=0.0),
        store=store,
        handoff=handoff,
        arrival_ns=time.monotonic_ns(),
    )


class ListMailbox:
    """Messages to the rank wait in `inbox`; events end up in `events`."""

    def __init__(self) -> None:
        self.inbox: list[ToRank] = []
        self.events: list[FromRank] = []
        self._woken = threading.Event()

    def send(self, message: FromRank) -> None:
        self.events.append(message)

    def receive(self, *, timeout_seconds: float) -> Iterator[ToRank]:
        if not self.inbox:
            self._woken.wait(min(timeout_seconds, 0.05))
        self._woken.clear()
        arrived, self.inbox = self.inbox, []
        yield from arrived

    def wake(self) -> None:
        self._woken.set()


class RankHarness:
    """One rank and the hands that turn it."""

    def __init__(self, config: EngineConfig, *, make_courier: Callable[[ListMailbox], Courier] | None = None) -> None:
        """make_courier: for a rank with a data transport; it is started and stopped here."""
        self.mailbox = ListMailbox()
        self.reads = ReadServer(make_courier(self.mailbox) if make_courier is not None else None)
        if self.reads.courier is not None:
            self.reads.courier.start(self.reads.find)
        self.loop = build_rank(config, rank=0, mailbox=self.mailbox, reads=self.reads, enter=lambda _phase: None)
        self.engine = self.loop._engine
        self.kv = self.loop._kv
        self.cache = self.kv._cache
        self.source = self.loop._source
        self._free = (self.kv.blocks.num_free, self.kv.states.num_free_states)

    def turn(self) -> None:
        self.loop.turn(timeout_seconds=0.05, before_step=lambda: None)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Turns until done(); fails when that takes longer than any healthy machine needs."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not done():
            assert time.monotonic() < deadline, [type(event).__name__ for event in self.mailbox.events]
            self.turn()

    def submit(self, submit: Submit) -> None:
        self.mailbox.inbox.append(submit)

    def send(self, message: ToRank) -> None:
        self.mailbox.inbox.append(message)

    def finish(self, submit: Submit, *, until: type | tuple[type, ...]) -> None:
        """Submits and turns until an event of that type has come for it."""
        self.submit(submit)
        self.run_until(lambda: any(isinstance(e, until) for e in self.events_of(submit)))

    def events_of(self, submit: Submit) -> list[FromRank]:
        return [e for e in self.mailbox.events if getattr(e, "attempt_id", None) == submit.attempt_id]

    def event(self, submit: Submit, kind: type[M]) -> M:
        """The last event of a kind."""
        return [e for e in self.events_of(submit) if isinstance(e, kind)][-1]

    def names(self, submit: Submit) -> list[str]:
        return [type(e).__name__ for e in self.events_of(submit)]

    def attempt(self, submit: Submit) -> Attempt:
        return self.engine.attempts[submit.attempt_id]

    def is_released(self, submit: Submit) -> bool:
        return any(isinstance(e, Released) for e in self.events_of(submit))

    def assert_nothing_held(self) -> None:
        """Every slot is back and no export is open."""
        self.kv.blocks.check()
        assert self.engine.attempts == {}
        assert self.reads._exports == {}
        assert (self.kv.blocks.num_free, self.kv.states.num_free_states) == self._free

    def loads(self) -> list[RankLoad]:
        return [e for e in self.mailbox.events if isinstance(e, RankLoad)]

    def close(self) -> None:
        self.loop._source.stop()
        if self.reads.courier is not None:
            self.reads.courier.stop()
