"""The step loop of a rank: mailbox -> finished I/O -> admission -> plan -> agree -> step, again and again (serving.md 2.4).

The one thread that touches attempts, pools and model. It waits only for messages: never for the store, a decode peer or the
front. The trap: an idle rank must go on proving that it lives, hence the canary step.
"""

import time
from collections.abc import Callable

from prefill_engine.lockstep import step_wish
from prefill_engine.messages import Beat, StepReport
from prefill_engine.parallel.exchange import Exchange
from prefill_engine.rank.block_source import BlockSource
from prefill_engine.rank.engine import RankEngine
from prefill_engine.rank.kv_keeper import KvKeeper
from prefill_engine.rank.lanes import Mailbox
from prefill_engine.rank.load_report import build_load
from prefill_engine.rank.planner import RankPlanner
from prefill_engine.rank.read_server import ReadServer
from prefill_engine.rank.stepper import Stepper
from prefill_engine.scheduler import IDLE_STEP, StepDecision
from prefill_plan.config import EngineConfig
from prefill_plan.errors import StoreUnavailable

_REPORT_SECONDS = 1.0


class StepLoop:
    """Runs a built rank until the front says Stop."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        rank: int,
        num_layers: int,
        mailbox: Mailbox,
        engine: RankEngine,
        kv: KvKeeper,
        planner: RankPlanner,
        stepper: Stepper,
        source: BlockSource,
        reads: ReadServer,
        exchange: Exchange,
    ) -> None:
        self._config = config
        self._rank = rank
        self._num_layers = num_layers
        self._mailbox = mailbox
        self._engine = engine
        self._kv = kv
        self._planner = planner
        self._stepper = stepper
        self._source = source
        self._reads = reads
        self._exchange = exchange
        self._num_steps = 0
        self._last_step_seconds = time.monotonic()
        self._last_report_seconds = -_REPORT_SECONDS

    def run(self, *, before_step: Callable[[], None]) -> None:
        """Serves until Stop, then finishes store I/O. before_step is called before each real step (test hook).

        Raises:
            StoreUnavailable: the store is lost and configured as required.
        """
        busy = False
        while not self._engine.stop_asked:
            busy = self.turn(timeout_seconds=0.0 if busy else self._idle_seconds(), before_step=before_step)
        self._source.stop()

    def turn(self, *, timeout_seconds: float, before_step: Callable[[], None]) -> bool:
        """One round: everything that has arrived, then at most one step; True = rows were computed."""
        for message in self._mailbox.receive(timeout_seconds=timeout_seconds):
            self._engine.handle(message)
        self._engine.collect()
        self._check_store()
        self._admit()
        is_busy = self._step(before_step)
        if not is_busy:
            self._engine.urge_loads()
        if time.monotonic() - self._last_report_seconds >= _REPORT_SECONDS:
            self._report(None)
        return is_busy

    def _idle_seconds(self) -> float:
        """How long nothing may happen before a report, a canary or an attempt that was held back is due."""
        now = time.monotonic()
        canary = self._last_step_seconds + self._config.scheduler.canary_seconds
        held_back = self._planner.next_due(self._engine.attempts.values(), now=now)
        return max(0.0, min(canary, self._last_report_seconds + _REPORT_SECONDS, held_back) - now)

    def _check_store(self) -> None:
        if self._config.store.required and self._source.is_lost:
            raise StoreUnavailable("the block store failed and store.required is true; the engine ends")

    def _admit(self) -> None:
        decision = self._planner.admit(self._engine.attempts.values(), self._kv)
        for attempt_id in decision.unpin:
            self._kv.unpin(self._engine.attempts[attempt_id])
        for attempt_id, refusal in decision.refused:
            self._engine.refuse(self._engine.attempts[attempt_id], refusal)
        self._engine.admit(decision.admitted)

    def _step(self, before_step: Callable[[], None]) -> bool:
        """Runs a step if any rank has work, or a canary if one is due; True = real work was done here."""
        decision = self._planner.plan(self._engine.attempts.values(), now=time.monotonic())
        wishes = self._exchange.agree(step_wish(decision, stop_epoch=0))
        if any(wish.has_work for wish in wishes):
            decision = self._planner.agree(decision, [wish.rows for wish in wishes])
            before_step()
            self._run(decision, kind="real" if decision.chunks else "placeholder")
        elif time.monotonic() - self._last_step_seconds >= self._config.scheduler.canary_seconds:
            self._run(IDLE_STEP, kind="canary")
        return bool(decision.chunks)

    def _run(self, decision: StepDecision, *, kind: str) -> None:
        layer_ms = self._planner.cost.layer_ms(decision.predicted_ms, num_layers=self._num_layers)

        def beat(step_id: int, layer: int) -> None:
            message = Beat(
                rank=self._rank,
                step_id=step_id,
                layer=layer,
                predicted_layer_ms=layer_ms,
                at_ns=time.monotonic_ns(),
            )
            self._mailbox.send(message)

        result = self._stepper.run(decision, on_layer=beat)
        self._num_steps = result.step_id
        self._last_step_seconds = time.monotonic()
        if decision.chunks:
            self._planner.observe(decision, result.seconds - result.stall_seconds)
            self._planner.forget(decision, result.poisoned)
        self._report(
            StepReport(
                kind=kind,
                seconds=result.seconds,
                encoder_rows=decision.encoder_rows,
                decoder_rows=decision.decoder_rows,
                replay_rows=decision.replay_rows,
            )
        )

    def _report(self, step: StepReport | None) -> None:
        self._last_report_seconds = time.monotonic()
        self._mailbox.send(
            build_load(
                self._engine.attempts.values(),
                rank=self._rank,
                kv=self._kv,
                cost=self._planner.cost,
                step_counter=self._num_steps,
                step=step,
                store_ok=self._source.is_ok,
                source_counters=self._source.counters() | self._reads.counters(),
            )
        )
