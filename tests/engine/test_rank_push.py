"""Pushed and store-only attempts on a rank: what goes out and when, and that no slot is free while a write is in flight."""

import itertools
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import msgspec
import pytest

from prefill_engine.handoff_pieces import (
    CHECKS_INDEX,
    PIECE_BYTES,
    ComponentKey,
    PushRegion,
    checksums,
    cut_pieces,
    piece_key,
)
from prefill_engine.messages import (
    Cancel,
    ChunkFinished,
    Computed,
    Expose,
    PushReport,
    ReadRange,
    Release,
    StoreProgress,
    Submit,
)
from prefill_engine.rank.courier import Courier
from prefill_testing.fake_transport import FakeNetwork, FakeTransport
from prefill_testing.rank_harness import ListMailbox, RankHarness, make_submit, tiny_engine_config, tiny_tokens
from prefill_testing.stub_cuda import LateDriver, caches_on_device

BLOCK_KV, REQUEST_ROW = 1, 7
_NUMBERS = itertools.count(1)


class Decode:
    """A decode peer on the courier's loop, with room for one prompt."""

    def __init__(self) -> None:
        self.network = FakeNetwork()
        self.transport = FakeTransport(self.network, endpoint="decode")
        self.network.transports["decode"] = self.transport
        self.memory: dict[int, bytearray] = {}
        self.landed = 0

    def reset(self) -> None:
        self.network.hold, self.landed = False, 0
        self.network.gate.clear()
        self.network.started.clear()
        self.memory = {}

    def grant(self, lengths: dict[int, int], *, piece_bytes: int = 4096) -> tuple[PushRegion, ...]:
        regions = []
        for kind, length in lengths.items():
            memory, key = bytearray(length), secrets.token_bytes(32)
            self.memory[kind] = memory
            for piece in cut_pieces(key, num_bytes=length, piece_bytes=piece_bytes):
                self.transport.accept(piece.key, memoryview(memory)[piece.start : piece.end], self._land)
            regions.append(
                PushRegion(
                    kind=kind,
                    transport="tcp",
                    endpoint="decode",
                    key=key,
                    piece_bytes=piece_bytes,
                    offset=0,
                    num_bytes=length,
                )
            )
        return tuple(regions)

    def _land(self) -> None:
        self.landed += 1


@contextmanager
def running(decode: Decode, *, piece_seconds: float, store: Path | None = None) -> Iterator[RankHarness]:
    def make_courier(mailbox: ListMailbox) -> Courier:
        return Courier(
            lambda: FakeTransport(decode.network),
            piece_seconds=piece_seconds,
            report=mailbox.send,
            wake=mailbox.wake,
        )

    harness = RankHarness(tiny_engine_config(store_path=store), make_courier=make_courier)
    try:
        yield harness
    finally:
        harness.close()


@pytest.fixture(scope="module", params=["host", "device"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RankHarness, Decode]]:
    decode = Decode()
    memory = nullcontext() if request.param == "host" else caches_on_device(LateDriver())
    with memory, running(decode, piece_seconds=30.0, store=tmp_path_factory.mktemp("store")) as harness:
        yield harness, decode


@pytest.fixture
def decode(pair: tuple[RankHarness, Decode]) -> Decode:
    pair[1].reset()
    return pair[1]


@pytest.fixture
def rank(pair: tuple[RankHarness, Decode], decode: Decode) -> RankHarness:
    return pair[0]


def lengths_of(rank: RankHarness, num_tokens: int) -> dict[int, int]:
    layout, blocks = rank.cache.state, -(-num_tokens // 128) * rank.cache.layout.payload_bytes
    lengths = {
        BLOCK_KV: blocks,
        3: layout.snapshot_bytes,
        4: layout.draft_offset - layout.decoder_offset,
        6: layout.compress_state_offset - layout.draft_offset,
        5: layout.compress_state_bytes,
        REQUEST_ROW: 32,
    }
    return {kind: length for kind, length in lengths.items() if length}


def new_submit(num_tokens: int = 700, **changes: object) -> Submit:
    """A prompt that nobody has seen before."""
    number = next(_NUMBERS)
    submit = make_submit(tiny_tokens(num_tokens, seed=number), attempt=number)
    return msgspec.structs.replace(submit, **changes)


def push_of(rank: RankHarness, decode: Decode, *, num_tokens: int = 700, early: bool = True) -> Submit:
    return new_submit(num_tokens, push=decode.grant(lengths_of(rank, num_tokens)), early_send=early)


def reports(rank: RankHarness, submit: Submit) -> list[str]:
    return [event.state for event in rank.events_of(submit) if isinstance(event, PushReport)]


def release(rank: RankHarness, decode: Decode) -> None:
    assert rank.reads.courier is not None
    rank.reads.courier._loop.call_soon_threadsafe(decode.network.release)


def read(rank: RankHarness, submit: Submit, kind: int) -> bytes:
    return rank.reads.read(ReadRange(read_id=1, attempt_id=submit.attempt_id, kind=kind, offset=0, length=1 << 30)).data


@pytest.mark.parametrize("early", [True, False], ids=["early", "at-the-end"])
def test_pushed_bytes_are_those_that_a_pull_would_read(rank: RankHarness, decode: Decode, early: bool):
    submit = push_of(rank, decode, early=early)
    rank.finish(submit, until=Computed)
    rank.run_until(lambda: reports(rank, submit) == ["landed"])
    kinds = [region.kind for region in rank.event(submit, Computed).regions]
    assert {kind: bytes(decode.memory[kind]) for kind in kinds} == {kind: read(rank, submit, kind) for kind in kinds}
    report = rank.event(submit, PushReport)
    assert {part.kind: part.checks for part in report.checks} == {
        kind: checksums(memory, piece_bytes=4096) for kind, memory in decode.memory.items()
    }
    rank.send(Release(attempt_id=submit.attempt_id))
    rank.run_until(lambda: rank.is_released(submit))
    rank.assert_nothing_held()


def test_early_send_moves_whole_pieces_before_the_prompt_is_computed(rank: RankHarness, decode: Decode):
    submit = push_of(rank, decode)
    rank.finish(submit, until=ChunkFinished)
    deadline = time.monotonic() + 30
    while decode.landed < 4:  # 2 blocks of 10,176 bytes in pieces of 4,096; the rank does not turn meanwhile
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert "Computed" not in rank.names(submit)
    rank.send(Cancel(attempt_id=submit.attempt_id))
    rank.run_until(lambda: rank.is_released(submit))
    rank.assert_nothing_held()


def test_without_early_send_nothing_moves_before_the_prompt_is_computed(rank: RankHarness, decode: Decode):
    submit = push_of(rank, decode, early=False)
    rank.finish(submit, until=ChunkFinished)
    assert not decode.network.started.is_set()
    rank.send(Cancel(attempt_id=submit.attempt_id))
    rank.run_until(lambda: rank.is_released(submit))
    assert decode.landed == 0


@pytest.mark.parametrize("end", [Cancel, Release], ids=["cancel", "expiry"])
def test_slots_stay_held_while_a_write_is_in_flight(
    rank: RankHarness, decode: Decode, end: type[Cancel] | type[Release]
):
    decode.network.hold = True
    submit = push_of(rank, decode)
    rank.finish(submit, until=Computed)
    rank.run_until(lambda: rank.event(submit, StoreProgress).done)
    rank.run_until(lambda: decode.network.started.is_set())
    rank.send(end(attempt_id=submit.attempt_id))
    free = rank.kv.blocks.num_free
    for _ in range(5):
        rank.turn()
    assert not rank.is_released(submit)
    assert rank.kv.blocks.num_free == free < rank.kv.blocks.num_blocks - rank.kv.blocks.reserve_blocks
    release(rank, decode)
    rank.run_until(lambda: rank.is_released(submit))
    rank.assert_nothing_held()
    assert reports(rank, submit) == ["drained"]


def test_push_to_a_peer_that_hangs_fails_and_everything_comes_back():
    decode = Decode()
    with running(decode, piece_seconds=0.05) as rank:
        decode.network.hold = True
        submit = push_of(rank, decode)
        rank.finish(submit, until=PushReport)
        assert rank.event(submit, PushReport).reason in ("HANDOFF_TIMEOUT", "")
        rank.send(Cancel(attempt_id=submit.attempt_id))
        rank.run_until(lambda: rank.is_released(submit))
        assert reports(rank, submit) == ["failed", "drained"]
        rank.assert_nothing_held()


def test_push_of_an_attempt_that_is_cancelled_before_it_computes_drains_at_once(rank: RankHarness, decode: Decode):
    submit = push_of(rank, decode)
    rank.submit(submit)
    rank.send(Cancel(attempt_id=submit.attempt_id))
    rank.run_until(lambda: rank.is_released(submit))
    assert (reports(rank, submit), decode.landed) == (["drained"], 0)
    rank.assert_nothing_held()


def test_refused_attempt_with_a_push_comes_back(rank: RankHarness, decode: Decode):
    submit = msgspec.structs.replace(push_of(rank, decode), max_compute_rows=1)
    rank.submit(submit)
    rank.run_until(lambda: rank.is_released(submit))
    rank.assert_nothing_held()


def test_store_only_hands_over_the_partial_block_and_names_the_full_ones(rank: RankHarness, decode: Decode):
    whole = new_submit()
    rank.finish(whole, until=Computed)
    blocks = read(rank, whole, BLOCK_KV)
    short = msgspec.structs.replace(whole, attempt_id=secrets.token_bytes(16), store_only=True)
    rank.finish(short, until=Computed)
    computed = rank.event(short, Computed)
    region = next(region for region in computed.regions if region.kind == BLOCK_KV)
    payload = rank.cache.layout.payload_bytes
    assert (region.offset, region.num_bytes) == (5 * payload, payload)
    assert read(rank, short, BLOCK_KV) == blocks[5 * payload :]
    assert computed.stored_block_keys == b"".join(rank.attempt(short).keys)
    for submit in (whole, short):
        rank.send(Release(attempt_id=submit.attempt_id))
        rank.run_until(lambda submit=submit: rank.is_released(submit))
    rank.assert_nothing_held()


def test_store_only_prompt_of_whole_blocks_hands_over_no_block(rank: RankHarness, decode: Decode):
    submit = new_submit(256, store_only=True)
    rank.finish(submit, until=Computed)
    assert BLOCK_KV not in [region.kind for region in rank.event(submit, Computed).regions]


def test_exposed_pieces_are_served_until_the_attempt_is_released(rank: RankHarness, decode: Decode):
    submit = new_submit()
    rank.finish(submit, until=Computed)
    rank.run_until(lambda: rank.event(submit, StoreProgress).done)
    key = b"k" * 32
    expose = Expose(read_id=1, attempt_id=submit.attempt_id, keys=(ComponentKey(kind=BLOCK_KV, key=key),))
    assert rank.reads.expose(expose).error == ""
    assert rank.reads.expose(expose).error == ""
    blocks = read(rank, submit, BLOCK_KV)
    checks = rank.reads.find(piece_key(key, CHECKS_INDEX))
    piece = rank.reads.find(piece_key(key, 0))
    assert checks is not None
    assert piece is not None
    assert bytes(piece.view) == blocks[:PIECE_BYTES]
    assert bytes(checks.view) == checksums(blocks, piece_bytes=PIECE_BYTES)
    assert rank.reads.find(key) is None
    assert rank.reads.find(piece_key(key, 1)) is None
    rank.send(Release(attempt_id=submit.attempt_id))
    rank.run_until(lambda: rank.is_released(submit))
    assert rank.reads.find(piece_key(key, 0)) is None
    assert rank.reads.expose(expose).error != ""
    assert rank.reads._exposed == {}


def test_attempt_that_is_not_computed_exposes_nothing(rank: RankHarness, decode: Decode):
    assert "nothing to hand over" in rank.reads.expose(Expose(read_id=1, attempt_id=b"?", keys=())).error
