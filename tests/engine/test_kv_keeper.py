"""What a rank's keeper makes of a load that came to less than was promised; layout and window of the released model."""

import pytest
import torch

from prefill_engine.block_pool import BlockPool
from prefill_engine.kv_cache import KvCache
from prefill_engine.messages import Sampling, Submit
from prefill_engine.rank.attempt import Attempt, read_submit
from prefill_engine.rank.block_source import LoadDone, LookupDone, OpenGate, SnapshotOutlook
from prefill_engine.rank.kv_keeper import KvKeeper
from prefill_engine.rank.payloads import HostPayloads
from prefill_engine.rank.push_sender import PushSender
from prefill_engine.rank.read_server import ReadServer
from prefill_engine.rank.store_worker import StoreWorker
from prefill_engine.swa_pool import SwaPool
from prefill_plan.block_keys import BlockKey
from prefill_plan.config import RecordFormat
from prefill_plan.kv_layout import block_layout, state_layout
from prefill_plan.model_spec import released_model_spec

PROMPT_TOKENS = 1000  # 7 blocks
PROMISED_BLOCKS = 5


class Pending(StoreWorker):
    """A source whose answers the test gives."""

    def __init__(self) -> None:
        pass

    def look_up(self, request: object) -> bool:
        return True

    def load(self, request: object) -> bool:
        return True

    def gate(self, attempt_ids: object, *, is_shared: bool) -> OpenGate:
        return OpenGate()

    def let_go(self, attempt_id: bytes) -> None: ...


@pytest.fixture
def keeper() -> KvKeeper:
    spec = released_model_spec()
    state = state_layout(spec, keep_tokens=140, rollback_tokens=6)
    cache = KvCache(
        spec,
        layout=block_layout(spec, RecordFormat.FP4),
        state=state,
        num_blocks=16,
        num_state_slots=1,
        device=torch.device("cpu"),
    )
    return KvKeeper(
        cache=cache,
        blocks=BlockPool(16),
        states=SwaPool(1, 0),
        source=Pending(),
        reads=ReadServer(),
        pushes=PushSender(None, payloads=HostPayloads(cache)),
        payloads=HostPayloads(cache),
        state_layout=state,
        keep_tokens=140,
    )


def loading_attempt(keeper: KvKeeper, outlook: SnapshotOutlook) -> Attempt:
    """Its look-up found 5 blocks and promised, or not, the snapshot behind them."""
    submit = Submit(
        attempt_id=bytes(16),
        request_id="r",
        tokens=bytes(4 * PROMPT_TOKENS),
        images=(),
        cache_scope=b"",
        offered_hit=None,
        priority=2,
        fairness_key="t",
        weight=1,
        step_cap_ms=None,
        max_compute_rows=None,
        sampling=Sampling(sample=False),
        store="skip",
        handoff=False,
        arrival_ns=0,
    )
    attempt = read_submit(submit, tuple(BlockKey(bytes([index]) * 32) for index in range(7)))
    assert keeper.start_resolving(attempt, step_waits=False)
    keeper.finish_look_up(attempt, LookupDone(attempt_id=attempt.attempt_id, present=PROMISED_BLOCKS, snapshot=outlook))
    assert keeper.admit(attempt)
    assert keeper.start_loading(attempt)
    return attempt


@pytest.mark.parametrize(
    ("come", "hit_tokens", "compute_start"),
    [
        pytest.param(5, 640, 512, id="whole"),
        pytest.param(2, 256, 128, id="cut-to-what-saves-rows"),
        pytest.param(1, 0, 0, id="a-replay-from-the-start-is-not-worth-its-error"),
        pytest.param(0, 0, 0, id="nothing-came"),
    ],
)
@pytest.mark.parametrize("outlook", [SnapshotOutlook.NONE, SnapshotOutlook.HELD])
def test_cut_hit_is_kept_if_it_saves_rows(
    keeper: KvKeeper, outlook: SnapshotOutlook, come: int, hit_tokens: int, compute_start: int
) -> None:
    attempt = loading_attempt(keeper, outlook)

    has_shrunk = keeper.finish_loading(
        attempt,
        LoadDone(attempt_id=attempt.attempt_id, provenances=(0,) * come, num_bytes=0, seconds=0.0, at_ns=0),
    )

    assert has_shrunk == (come < PROMISED_BLOCKS)
    assert (attempt.plan.hit_tokens, attempt.plan.compute_start) == (hit_tokens, compute_start)
    assert len(keeper.blocks.match(attempt.keys)) == attempt.num_published == hit_tokens // 128
