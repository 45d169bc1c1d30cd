"""One pass over one pool: observe, plan, decide, apply, status. Events, wake-ups, resync and start-up all end here.

Level-based: a pass looks only at what is, so that it may run at any time, twice, or after a restart. A pass that wrote something
is followed by another at once, which finds nothing to do or what is left; only such a quiet pass writes the status, so that the
status never tells of a moment that our own writes have ended.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from prefill_operator.api import Pool
from prefill_operator.api_status import PoolStatus, VEPoolStatus
from prefill_operator.apply import Applied, Applier, Target
from prefill_operator.cache import Cache, PoolRecord
from prefill_operator.conditions import refuse_conditions
from prefill_operator.decide import decide
from prefill_operator.drain import Drains
from prefill_operator.engine_watch import EngineWatch, WatchedEngine
from prefill_operator.errors import ClusterError, ClusterUnavailable, LeaseLost, RequestRejected
from prefill_operator.model import Decision, PodPhase, seconds_since
from prefill_operator.names import Kind
from prefill_operator.observe import Observer, is_foreign_pod
from prefill_operator.operator_metrics import OperatorMetrics
from prefill_operator.pod_reading import PodRecord
from prefill_operator.pool_api import PrefillPoolSpec
from prefill_operator.pool_memory import PoolMemory
from prefill_operator.pool_metrics import PoolMetrics
from prefill_operator.resources import PoolKey
from prefill_operator.settings import OperatorSettings
from prefill_operator.ve_api import VEPoolSpec
from prefill_operator.work_queue import WorkQueue
from prefill_plan.errors import PrefillError

logger = logging.getLogger(__name__)

MAX_PASSES_IN_A_ROW = 20
"""Each at once after the one before. A pool that then still changes something has met a bug or a fight: it is slowed down."""


class Reconciler:
    """clock: seconds since the epoch."""

    def __init__(
        self,
        cache: Cache,
        queue: WorkQueue[PoolKey],
        observer: Observer,
        applier: Applier,
        *,
        drains: Drains,
        engines: EngineWatch,
        metrics: OperatorMetrics,
        pool_metrics: PoolMetrics,
        settings: OperatorSettings,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._observer = observer
        self._applier = applier
        self._drains = drains
        self._engines = engines
        self._metrics = metrics
        self._pool_metrics = pool_metrics
        self._settings = settings
        self._clock = clock
        self._memories: dict[PoolKey, PoolMemory] = {}

    async def work(self) -> None:
        """Reconciles keys of the queue for ever. Raises LeaseLost."""
        while True:
            await self.step(await self._queue.take())

    async def step(self, key: PoolKey) -> None:
        """Reconciles a key that was taken, and gives it back. Raises LeaseLost; what fails otherwise comes again later."""
        began = time.perf_counter()
        try:
            await self.reconcile(key)
        except LeaseLost:
            raise
        except PrefillError as error:
            self._fail(key, error, reason=error.code)
        except Exception as error:  # one pool's bug must not stop the others
            logger.exception("reconcile failed", extra={"pool": str(key)})
            self._fail(key, error, reason="BUG")
        else:
            self._queue.finish(key)
        self._metrics.observe_reconcile(key.kind, time.perf_counter() - began)

    async def reconcile(self, key: PoolKey) -> None:
        """One pass. Raises ClusterError and LeaseLost."""
        record = self._cache.pool(key)
        if record is None:
            self._forget(key)
            return
        memory = self._remember(key, record.uid)
        pool = record.pool
        if pool is None:
            await self._refuse(record)
            return
        if pool.is_deleting:
            self._queue.wake_after(key, None)
            return
        memory.drop_old(self._clock())
        self._resume_drains(key, pool)
        self._watch_engines(key, pool)
        view = self._observer.observe(key, pool, memory)
        decision = decide(view.observed, view.plan, self._settings.times)
        target = Target(key=key, pool=pool, plan=view.plan, memory=memory, children=view.children)
        num_tended, untended, is_learned = await self._tend_pods(target)
        applied = await self._applier.apply(target, decision.actions)
        if untended is not None:
            applied = replace(applied, error=applied.error or untended, is_learned=applied.is_learned or is_learned)
        if applied.num_writes or applied.error is not None:
            logger.info("decided", extra={"pool": str(key), "reasons": decision.reasons, "writes": applied.num_writes})
        self._pool_metrics.set_status(key, pool, decision.status)
        self._pool_metrics.note_pods(key, pool, view.observed.pods)
        done = decision.actions[: applied.num_done]
        self._pool_metrics.count_actions(key, done, pods=view.observed.pods, now=self._clock())
        await self._settle(target, decision, applied, num_writes=num_tended + applied.num_writes)

    async def _settle(self, target: Target, decision: Decision, applied: Applied, *, num_writes: int) -> None:
        """Status, and when to come again."""
        key, memory, error = target.key, target.memory, applied.error
        if applied.is_learned or (error is None and num_writes):
            memory.passes_in_a_row += 1
            if isinstance(error, ClusterError):
                self._metrics.count_error(key.kind, error.code)
            if memory.passes_in_a_row > MAX_PASSES_IN_A_ROW:
                raise PrefillError(f"{key} does not settle: {memory.passes_in_a_row} passes in a row changed something")
            self._queue.add(key)
            return
        memory.passes_in_a_row = 0
        if not isinstance(error, ClusterUnavailable):
            await self._write_status(target, decision)
        if error is not None:
            raise error

    async def _write_status(self, target: Target, decision: Decision) -> None:
        """If it says something new, and not too often; then sets the wake-up."""
        memory, now = target.memory, self._clock()
        due = [decision.next_wakeup, memory.next_look()]
        if decision.status != target.pool.status:
            allowed = memory.status_written_at + self._settings.status_seconds
            if now >= allowed or now < memory.status_written_at:
                await self._applier.write_status(target, decision.status)
                # The answer is in the cache by now, so its event will say nothing new.
                for key in self._cache.referrers(target.key):
                    self._queue.add(key)
            else:
                due.append(allowed)
        self._wake_at(target.key, min((when for when in due if when is not None), default=None))

    async def _tend_pods(self, target: Target) -> tuple[int, RequestRejected | None, bool]:
        """What the planner does not decide: adopts pods of ours that lost their owner, opens gates of engines that are
        ready, notes which engines serve without their KV store. A refusal stops neither other pods nor the planner.

        Returns:
            The number of writes, the last refusal, and whether there is a new one.
        """
        num_writes, refusal, is_learned = 0, None, False
        for pod in self._cache.pods(target.key):
            if is_foreign_pod(pod, target.pool) or pod.observed.terminating_since is not None:
                continue
            try:
                num_writes += await self._tend_pod(target, pod)
            except RequestRejected as error:
                refusal = error
                is_learned |= self._applier.note_tended(target, pod, error)
            else:
                self._applier.note_tended(target, pod, None)
        return num_writes, refusal, is_learned

    async def _tend_pod(self, target: Target, pod: PodRecord) -> int:
        num_writes = 0
        if not pod.controller_uid:
            await self._applier.adopt(target, pod)
            num_writes += 1
        if _may_open_gate(pod):
            await self._applier.open_gate(target, pod)
            num_writes += 1
        is_degraded = self._engines.is_degraded(pod.observed.uid)
        if is_degraded is not None and is_degraded != pod.observed.is_store_degraded:
            await self._applier.note_store(target, pod, is_degraded=is_degraded)
            num_writes += 1
        return num_writes

    def _resume_drains(self, key: PoolKey, pool: Pool) -> None:
        """Calls engines whose pods say that they drain and that this process has not called (k8s.md 4.7). Of a paused pool no
        further one is called: no drain begins there, and none ends in a deletion."""
        draining = [pod for pod in self._cache.pods(key) if pod.observed.draining_since is not None]
        self._drains.keep_only(key, [pod.observed.uid for pod in draining])
        if pool.spec.paused:
            return
        for pod in draining:
            if pod.observed.terminating_since is None and not is_foreign_pod(pod, pool):
                elapsed = seconds_since(pod.observed.draining_since, self._clock())
                left = max(0.0, pool.spec.lifecycle.drain_timeout_seconds - elapsed)
                self._drains.begin(pod.observed.uid, pool=key, address=pod.address, timeout_seconds=left)

    def _watch_engines(self, key: PoolKey, pool: Pool) -> None:
        """Engines that run and are not on their way out are asked for what only they know."""
        has_store = isinstance(pool.spec, PrefillPoolSpec) and pool.spec.kvd.enabled
        batch_patches = pool.spec.batching.max_patches_per_batch if isinstance(pool.spec, VEPoolSpec) else 0
        engines = {
            pod.observed.uid: WatchedEngine(
                address=pod.address,
                has_store=has_store and pod.containers_ready,
                is_degraded=pod.observed.is_store_degraded,
                is_loading=not pod.containers_ready,
                batch_patches=batch_patches,
            )
            for pod in self._cache.pods(key)
            if _may_ask(pod) and not is_foreign_pod(pod, pool)
        }
        self._engines.keep_only(key, engines)

    async def _refuse(self, record: PoolRecord) -> None:
        """Says in the status why a spec cannot be used; pods are left as they are."""
        assert record.fault is not None
        body: dict[str, Any] = msgspec.json.decode(record.body)
        status = _known_status(record.key.kind, body)
        generation = body["metadata"].get("generation", 0)
        conditions = refuse_conditions(status.conditions, generation=generation, fault=record.fault, now=self._clock())
        new = msgspec.structs.replace(status, observed_generation=generation, conditions=conditions)
        if new != status:
            await self._applier.write_refusal(record.key, record.uid, new)

    def _remember(self, key: PoolKey, uid: str) -> PoolMemory:
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            memory = PoolMemory(uid=uid)
            self._memories[key] = memory
        return memory

    def _forget(self, key: PoolKey) -> None:
        self._memories.pop(key, None)
        self._queue.forget(key)
        self._observer.forget(key)
        self._applier.forget(key)
        self._drains.keep_only(key, ())
        self._engines.keep_only(key, {})
        self._pool_metrics.forget(key)

    def _wake_at(self, key: PoolKey, when: float | None) -> None:
        """The queue counts on its own clock."""
        self._queue.wake_after(key, None if when is None else max(0.0, when - self._clock()))

    def _fail(self, key: PoolKey, error: Exception, *, reason: str) -> None:
        wanted = error.details.get("retry_after_seconds", 0.0) if isinstance(error, PrefillError) else 0.0
        pause = self._queue.retry(key, after=float(str(wanted)))
        self._metrics.count_error(key.kind, reason)
        logger.warning("pass failed", extra={"pool": str(key), "error": str(error), "retry_seconds": pause})


def _may_open_gate(pod: PodRecord) -> bool:
    seen = pod.observed
    return pod.has_gate and pod.containers_ready and seen.gate is not True and seen.draining_since is None


def _may_ask(pod: PodRecord) -> bool:
    seen = pod.observed
    is_staying = seen.draining_since is None and seen.terminating_since is None
    return bool(pod.address) and seen.phase is PodPhase.RUNNING and not seen.waiting_reason and is_staying


def _known_status(kind: Kind, body: dict[str, Any]) -> PoolStatus | VEPoolStatus:
    """What the object says now; empty if it cannot be read."""
    struct: type[PoolStatus] | type[VEPoolStatus] = PoolStatus if kind is Kind.PREFILL_POOL else VEPoolStatus
    try:
        return msgspec.convert(body.get("status") or {}, struct)
    except msgspec.ValidationError:
        return struct()
