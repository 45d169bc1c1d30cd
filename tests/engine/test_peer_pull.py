"""Components pulled over a data transport: whole and verified or not at all; and stored blocks read by their keys."""

import asyncio
from dataclasses import replace

import pytest

from prefill_engine.client_ticket import PeerPlace
from prefill_engine.handoff_pieces import CHECKS_INDEX, checksums, cut_pieces, piece_key
from prefill_engine.kv.memory_store import MemoryStore
from prefill_engine.kv.transport.contract import PullOutcome, PullState, Source
from prefill_engine.peer_pull import pull_component
from prefill_engine.stored_blocks import read_stored_blocks
from prefill_plan.block_keys import BlockKey
from prefill_plan.config import RecordFormat
from prefill_plan.errors import BlockCorrupt, CallFailed, KvError
from prefill_plan.kv_layout import block_layout
from prefill_plan.model_spec import load_model_spec
from prefill_testing.engine_rig import TINY_MODEL
from prefill_testing.fake_transport import FakeNetwork, FakeTransport

KEY = b"k" * 32
DATA = bytes(i * 7 % 256 for i in range(1050))
PLACE = PeerPlace(kind="tcp", endpoint="fake:1", key=KEY, piece_bytes=100)


def served(data: bytes, *, key: bytes = KEY, piece_bytes: int = 100) -> dict[bytes, bytes]:
    pieces = cut_pieces(key, num_bytes=len(data), piece_bytes=piece_bytes)
    table = {piece.key: data[piece.start : piece.end] for piece in pieces}
    return {**table, piece_key(key, CHECKS_INDEX): checksums(data, piece_bytes=piece_bytes)}


def pull(table: dict[bytes, bytes], *, flip: bool = False, num_bytes: int = len(DATA)) -> bytes:
    async def run() -> bytes:
        network = FakeNetwork(flip=flip)
        source, reader = FakeTransport(network), FakeTransport(network)

        def find(key: bytes) -> Source | None:
            data = table.get(key)
            return None if data is None else Source(view=memoryview(data), fd=-1, offset=0, release=lambda: None)

        await source.listen(find)
        return await pull_component(reader, PLACE, num_bytes=num_bytes, name="BLOCK_KV", piece_seconds=5.0)

    return asyncio.run(run())


def test_component_arrives_whole():
    assert pull(served(DATA)) == DATA


def test_one_flipped_bit_is_found():
    with pytest.raises(BlockCorrupt, match="piece 0 of 11"):
        pull(served(DATA), flip=True)


def test_bytes_that_changed_between_two_pieces_are_found():
    table = served(DATA)
    table[piece_key(KEY, 4)] = bytes(100)
    with pytest.raises(BlockCorrupt, match="piece 4 of 11"):
        pull(table)


@pytest.mark.parametrize("gone", [0, 7, CHECKS_INDEX], ids=["first", "middle", "checksums"])
def test_hand_off_that_ended_while_it_was_read_is_a_failure(gone: int):
    table = served(DATA)
    del table[piece_key(KEY, gone)]
    with pytest.raises(CallFailed, match="absent") as error:
        pull(table)
    assert error.value.reason == "TICKET_GONE"


def test_component_of_another_length_is_a_failure():
    with pytest.raises(CallFailed, match="size"):
        pull(served(DATA), num_bytes=1000 + 60)


def test_late_pull_is_not_over_before_its_memory_is_settled():
    log: list[str] = []

    class Late(FakeTransport):
        async def pull(self, endpoint: str, key: bytes, target: memoryview, *, deadline_seconds: float) -> PullOutcome:
            return PullOutcome(state=PullState.LATE, reason="late", seconds=1.0, settled=lambda: "closed" in log)

        async def close_peer(self, endpoint: str) -> None:
            log.append("closed")

    with pytest.raises(CallFailed) as error:
        asyncio.run(pull_component(Late(FakeNetwork()), PLACE, num_bytes=1050, name="BLOCK_KV", piece_seconds=1.0))
    assert (error.value.reason, log) == ("HANDOFF_TIMEOUT", ["closed"])


LAYOUT = block_layout(load_model_spec(TINY_MODEL), RecordFormat.FP4)
KEYS = [bytes([index]) * 32 for index in range(3)]
PAYLOADS = [bytes([index + 1]) * LAYOUT.payload_bytes for index in range(3)]


def filled_store() -> MemoryStore:
    store = MemoryStore(LAYOUT, max_bytes=1 << 24)
    for index, (key, payload) in enumerate(zip(KEYS, PAYLOADS, strict=True)):
        assert store.write(BlockKey(key), payload, block_index=index, provenance=0)
    return store


def test_stored_blocks_come_in_the_order_of_their_keys():
    assert read_stored_blocks(filled_store(), KEYS, payload_bytes=LAYOUT.payload_bytes) == b"".join(PAYLOADS)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([*KEYS[:2], b"?" * 32], "block 2 of 3 is missing or damaged"),
        ([KEYS[1], KEYS[0]], "block 0 of 2 is stored as block 1"),
    ],
    ids=["missing", "another-block"],
)
def test_store_that_lacks_a_block_refuses_the_whole(keys: list[bytes], message: str):
    with pytest.raises(KvError, match=message):
        read_stored_blocks(filled_store(), keys, payload_bytes=LAYOUT.payload_bytes)


def test_place_keeps_its_key_out_of_its_text():
    assert KEY.decode() not in repr(replace(PLACE, endpoint="x"))
