"""RankLoad from the records of a rank: pure, for the front's binding, metrics and WatchLoad."""

import time
from collections.abc import Iterable

from prefill_engine.cost_model import CostModel
from prefill_engine.messages import RankLoad, StepReport
from prefill_engine.rank.attempt import Attempt, AttemptPhase
from prefill_engine.rank.kv_keeper import KvKeeper
from prefill_plan.kv_layout import BLOCK_TOKENS

_STARTED = (AttemptPhase.RUNNING, AttemptPhase.COMPUTED)


def build_load(
    attempts: Iterable[Attempt],
    *,
    rank: int,
    kv: KvKeeper,
    cost: CostModel,
    step_counter: int,
    step: StepReport | None,
    store_ok: bool,
    source_counters: dict[str, int],
) -> RankLoad:
    """Load of a rank now. An attempt waits until it has KV memory and its hit; rows are rows left to compute."""
    live = [attempt for attempt in attempts if not attempt.ended]
    waiting = [attempt for attempt in live if attempt.phase not in _STARTED]
    running = [attempt for attempt in live if attempt.phase is AttemptPhase.RUNNING]
    held = [attempt for attempt in live if attempt.phase is AttemptPhase.COMPUTED]
    by_class = [sum(each.rows_left for each in waiting if each.submit.priority == priority) for priority in (1, 2, 3)]
    counters = dict(source_counters)
    counters |= {f"blocks_{name}": count for name, count in kv.blocks.counters().items()}
    counters |= {f"snapshots_{name}": count for name, count in kv.states.counters().items()}
    return RankLoad(
        rank=rank,
        running=len(running),
        waiting=len(waiting),
        waiting_rows=sum(each.rows_left for each in waiting),
        running_rows_left=sum(each.rows_left for each in running),
        waiting_rows_by_class=(by_class[0], by_class[1], by_class[2]),
        kv_tokens_total=kv.capacity_blocks * BLOCK_TOKENS,
        kv_tokens_free=kv.blocks.num_free * BLOCK_TOKENS,
        kv_tokens_held_by_tickets=sum(each.num_blocks for each in held) * BLOCK_TOKENS,
        state_slots_free=kv.states.num_free_states,
        step_counter=step_counter,
        step_model=cost.report(),
        step=step,
        store_ok=store_ok,
        store_lag_blocks=sum(each.blocks_to_store - each.blocks_committed - each.blocks_failed for each in live),
        counters=counters,
        at_ns=time.monotonic_ns(),
    )
