"""The attempts of one rank, from Submit to Released: what each message and each finished I/O job changes.

Called by the step loop (loop.py) on one thread; it decides nothing about order (scheduler, admission) and computes nothing
(stepper.py). The trap: any attempt may have ended while its I/O was away, so every completion checks `ended` first.
"""

import logging
import queue
import time
from collections.abc import Callable, Sequence

from prefill_engine.image_messages import ImageRows
from prefill_engine.messages import (
    AttemptFailed,
    Cancel,
    FromRank,
    Release,
    Released,
    Resolved,
    Stop,
    StoreProgress,
    Submit,
    SwappedIn,
    ToRank,
    Waiting,
)
from prefill_engine.queue_limits import Refusal
from prefill_engine.rank.attempt import Attempt, AttemptPhase, read_submit
from prefill_engine.rank.block_source import (
    BlockSource,
    Completion,
    GroupLoaded,
    LoadDone,
    LookupDone,
    SnapshotDone,
    SnapshotOutlook,
    SnapshotsKept,
    SourceFailed,
    WriteDone,
)
from prefill_engine.rank.image_rows import RankImages
from prefill_engine.rank.kv_keeper import KvKeeper
from prefill_engine.rank.model_runner import ModelDigests
from prefill_engine.rank.planner import RankPlanner
from prefill_engine.rank.push_sender import PushSender
from prefill_plan.block_keys import BlockKey, ImageDigest, block_keys, chain_root
from prefill_plan.errors import CapacityError, RequestError
from prefill_plan.kv_layout import BLOCK_TOKENS

logger = logging.getLogger(__name__)


class RankEngine:
    """Owner of the attempt records of a rank."""

    def __init__(
        self,
        *,
        kv: KvKeeper,
        planner: RankPlanner,
        source: BlockSource,
        pushes: PushSender,
        images: RankImages,
        digests: ModelDigests,
        num_sources: int,
        send: Callable[[FromRank], None],
    ) -> None:
        self.attempts: dict[bytes, Attempt] = {}
        self.images = images
        self.stop_asked = False
        self._kv = kv
        self._planner = planner
        self._source = source
        self._pushes = pushes
        self._digests = digests
        self._num_sources = num_sources
        self._send = send

    # --- what arrives
    def handle(self, message: ToRank) -> None:
        """Acts on one message of the front."""
        match message:
            case Submit():
                self._submit(message)
            case Cancel(attempt_id=attempt_id):
                self._cancel(attempt_id)
            case Release(attempt_id=attempt_id):
                self._release(attempt_id)
            case ImageRows(attempt_id=attempt_id):
                if attempt_id in self.attempts:
                    self.images.take(self.attempts[attempt_id], message)
            case Stop():
                self.stop_asked = True

    def collect(self) -> None:
        """Acts on every I/O job that has finished. Raises what ended one unexpectedly."""
        self._kv.check_reads()
        for attempt_id in self._pushes.collect():
            self.attempts[attempt_id].push_pending = False
            self.free_if_done(self.attempts[attempt_id])
        while True:
            try:
                completion = self._source.completions.get_nowait()
            except queue.Empty:
                return
            self._complete(completion)

    def _submit(self, submit: Submit) -> None:
        if submit.attempt_id in self.attempts:
            logger.error("attempt submitted twice; the second one is ignored", extra={"request_id": submit.request_id})
            return
        attempt = read_submit(submit, self._keys(submit))
        self.attempts[submit.attempt_id] = attempt
        self._pushes.begin(attempt)
        if attempt.num_blocks > self._kv.capacity_blocks:
            limit = self._kv.capacity_blocks * BLOCK_TOKENS
            text = f"the prompt has {attempt.prompt_tokens} tokens, KV memory of this engine holds {limit}"
            self.fail(attempt, reason="KV_MEMORY", retry="NEVER", phase="ADMISSION", message=text)
        elif not self._kv.start_resolving(attempt, step_waits=self._is_alone(attempt)):
            self._kv.resolve(attempt, present_blocks=len(attempt.resident_slots))
            self._accept(attempt, SnapshotOutlook.NONE)

    def _is_alone(self, attempt: Attempt) -> bool:
        """No other attempt has rows left, so a step could begin now."""
        return not any(other.rows_left for other in self.attempts.values() if other is not attempt)

    def _keys(self, submit: Submit) -> tuple[BlockKey, ...]:
        root = chain_root(
            weights_digest=self._digests.weights,
            tokenizer_digest=self._digests.tokenizer,
            layout_digest=self._digests.layout,
            numerics_class=self._digests.numerics_class,
            tenant_salt=submit.cache_scope,
        )
        images = [ImageDigest(start=i.start, length=i.length, content_key=i.content_key) for i in submit.images]
        return block_keys(root, submit.tokens, images=images)

    def _cancel(self, attempt_id: bytes) -> None:
        attempt = self.attempts.get(attempt_id)
        if attempt is None:
            self._send(Released(attempt_id=attempt_id, at_ns=time.monotonic_ns()))
            return
        self._end(attempt)

    def _release(self, attempt_id: bytes) -> None:
        attempt = self.attempts.get(attempt_id)
        if attempt is None:
            self._send(Released(attempt_id=attempt_id, at_ns=time.monotonic_ns()))
            return
        attempt.release_asked = True
        self.free_if_done(attempt)

    # --- finished I/O
    def _complete(self, completion: Completion) -> None:
        if isinstance(completion, SourceFailed):
            raise completion.error
        attempt = self.attempts.get(completion.attempt_id)
        if attempt is None:
            return  # a snapshot that came too late
        match completion:
            case WriteDone() | SnapshotsKept():
                self._finish_write(attempt, completion)
            case LookupDone() | LoadDone():
                attempt.read_pending = False
                if attempt.ended:
                    self.free_if_done(attempt)
                elif isinstance(completion, LookupDone):
                    self._kv.finish_look_up(attempt, completion)
                    self._accept(attempt, completion.snapshot)
                else:
                    self._finish_loading(attempt, completion)
            case SnapshotDone(snapshot=snapshot) if not attempt.ended:
                self._kv.take_snapshot_in(attempt, snapshot)
                self._have_images(attempt, self.images.want)
            case GroupLoaded() if not attempt.ended:
                self._go_on_loading(attempt, completion)

    def _finish_write(self, attempt: Attempt, done: WriteDone | SnapshotsKept) -> None:
        attempt.writes_pending -= 1
        if isinstance(done, WriteDone):
            self._kv.blocks.mark_stored(done.slots[: done.committed])
            attempt.blocks_committed += done.committed
            attempt.blocks_failed += done.failed
        else:
            attempt.snapshots_held += done.positions
        if not attempt.ended:
            self.report_store(attempt)
        self.free_if_done(attempt)

    def _accept(self, attempt: Attempt, snapshot: SnapshotOutlook) -> None:
        """The hit is known: refuse the attempt, or accept and queue it."""
        if self._refuse(attempt):
            return
        attempt.phase = AttemptPhase.WAITING
        positions = attempt.plan
        if positions.hit_tokens == 0:
            source = "none"
        elif positions.replay_tokens == 0:
            source = "local"
        else:
            source = "peer" if snapshot is SnapshotOutlook.PULLING else "replay"
        estimate = self._planner.estimate(attempt, self.attempts.values())
        now_ns = time.monotonic_ns()
        self._send(
            Resolved(
                attempt_id=attempt.attempt_id,
                effective_hit=positions.hit_tokens,
                replay_rows=positions.replay_tokens,
                compute_rows=positions.replay_tokens + positions.new_tokens,
                swa_source=source,
                predicted_wait_seconds=estimate.wait_seconds,
                predicted_finish_seconds=estimate.finish_seconds,
                at_ns=now_ns,
            )
        )
        self._send(
            Waiting(
                attempt_id=attempt.attempt_id,
                ahead_requests=estimate.ahead_requests,
                ahead_rows=estimate.ahead_rows,
                waiting_for="queue",
                at_ns=now_ns,
            )
        )
        self._have_images(attempt, self.images.want)

    def _refuse(self, attempt: Attempt) -> bool:
        """Ends an attempt that cannot be computed as resolved; True = ended."""
        plan, limit = attempt.plan, attempt.submit.max_compute_rows
        rows = plan.replay_tokens + plan.new_tokens
        if limit is not None and rows > limit:
            text = f"the hit shrank to {plan.hit_tokens} tokens: {rows} rows to compute, the caller allows {limit}"
            self.fail(attempt, reason="HIT_LEASE_GONE", retry="REPLAN", phase="ADMISSION", message=text)
            return True
        refusal = self._planner.refuse_budget(attempt)
        if refusal is not None:
            self.refuse(attempt, refusal)
            return True
        return not self._have_images(attempt, self.images.check)

    def _have_images(self, attempt: Attempt, ask: Callable[[Attempt], None]) -> bool:
        """Whether the images that the plan needs can be had; False = one can't, and the attempt has ended. ask: of RankImages."""
        try:
            ask(attempt)
        except RequestError as error:
            retry = str(error.details["retry"])
            self.fail(attempt, reason=error.reason, retry=retry, phase="IMAGES", message=error.message)
            return False
        return True

    def _finish_loading(self, attempt: Attempt, done: LoadDone) -> None:
        try:
            shrunk = self._kv.finish_loading(attempt, done)
        except CapacityError as error:
            self.fail(attempt, reason=error.reason, retry="SAME_LATER", phase="SWAP_IN", message=error.message)
            return
        if done.num_bytes or shrunk:
            self._report_swap_in(attempt, self._num_sources, done, shrunk_to=attempt.plan.hit_tokens if shrunk else -1)
        if shrunk and self._refuse(attempt):
            return
        # A snapshot that was lost on the way means a replay, which may meet an image that nobody has asked for.
        if self._have_images(attempt, self.images.want):
            self._start_running(attempt)

    def _go_on_loading(self, attempt: Attempt, done: GroupLoaded) -> None:
        """One more layer group of the hit is in its slots: enough to begin with, since the gates guard the later ones. After a
        poison the attempt waits for the whole hit."""
        self._report_swap_in(attempt, done.groups, done, shrunk_to=-1)
        if attempt.phase is AttemptPhase.LOADING and not attempt.poisoned and self._kv.has_window(attempt):
            self._start_running(attempt)

    def _report_swap_in(self, attempt: Attempt, groups: int, done: GroupLoaded | LoadDone, *, shrunk_to: int) -> None:
        self._send(
            SwappedIn(
                attempt_id=attempt.attempt_id,
                layers_ready=groups,
                layers_total=self._num_sources,
                num_bytes=done.num_bytes,
                hit_shrunk_to=shrunk_to,
                took_seconds=done.seconds,
                at_ns=done.at_ns,
            )
        )

    # --- admission
    def admit(self, attempt_ids: Sequence[bytes]) -> None:
        """Gives KV memory to waiting attempts, in order, and starts their swap-in."""
        for attempt_id in attempt_ids:
            attempt = self.attempts[attempt_id]
            if not self._kv.admit(attempt):
                return
            if self._kv.start_loading(attempt):
                attempt.phase = AttemptPhase.LOADING
            else:
                self._start_running(attempt)

    def urge_loads(self) -> None:
        """No step could run: attempts wait for their hits' first groups, and nothing else is to be done."""
        for attempt in self.attempts.values():
            if attempt.phase is AttemptPhase.LOADING and not (attempt.is_urged or attempt.poisoned):
                attempt.is_urged = True
                self._source.urge(attempt.attempt_id)

    def _start_running(self, attempt: Attempt) -> None:
        if attempt.phase is AttemptPhase.RUNNING:
            return  # since its first layer group was there
        if not attempt.poisoned:
            self._kv.store_missing_hit(attempt)
        attempt.phase = AttemptPhase.RUNNING

    def requeue(self, attempt: Attempt) -> None:
        """Its rows of this step are worthless: the hit did not come in time (C18). It goes on when the load is over."""
        attempt.poisoned = True
        attempt.is_window_set = False
        attempt.phase = AttemptPhase.LOADING

    # --- the end
    def _end(self, attempt: Attempt) -> None:
        attempt.ended = True
        if attempt.read_pending:
            self._kv.stop_loading(attempt)
        self.free_if_done(attempt)

    def fail(self, attempt: Attempt, *, reason: str, retry: str, phase: str, message: str) -> None:
        """Ends an attempt with an error; its slots go back as soon as no I/O names them. `message` may be shown to users."""
        self._send(
            AttemptFailed(
                attempt_id=attempt.attempt_id,
                reason=reason,
                retry=retry,
                phase=phase,
                public_message=message,
                operator_detail="",
                rows_computed=attempt.rows_computed,
                at_ns=time.monotonic_ns(),
            )
        )
        self._end(attempt)

    def refuse(self, attempt: Attempt, refusal: Refusal) -> None:
        """Ends an attempt that this rank cannot serve."""
        self.fail(attempt, reason=refusal.reason, retry=refusal.retry, phase="ADMISSION", message=refusal.message)

    def report_store(self, attempt: Attempt) -> None:
        """Tells the front what has been written so far."""
        new_blocks = attempt.plan.end_new_block - attempt.plan.first_new_block
        is_skipped = attempt.submit.store == "skip"
        self._send(
            StoreProgress(
                attempt_id=attempt.attempt_id,
                committed=attempt.blocks_committed,
                total=0 if is_skipped else max(new_blocks, attempt.blocks_to_store),
                failed=attempt.blocks_failed,
                snapshots=attempt.snapshots_held,
                done=attempt.phase is AttemptPhase.COMPUTED and attempt.writes_pending == 0,
                at_ns=time.monotonic_ns(),
            )
        )

    def free_if_done(self, attempt: Attempt) -> None:
        """Returns the slots of an attempt that nothing needs any more (serving.md 1.1, who frees what)."""
        settled = attempt.release_asked or not attempt.submit.handoff
        finished = attempt.ended or (attempt.phase is AttemptPhase.COMPUTED and settled)
        if finished:
            self._pushes.cancel(attempt)
        if not (finished and attempt.is_idle) or attempt.attempt_id not in self.attempts:
            return
        self._kv.free(attempt)
        del self.attempts[attempt.attempt_id]
        self._send(Released(attempt_id=attempt.attempt_id, at_ns=time.monotonic_ns()))
