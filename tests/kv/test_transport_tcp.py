"""TcpTransport against peers that send garbage, too much, too little, or stop; and its limits."""

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from prefill_engine.kv.transport.contract import PullState, Source
from prefill_engine.kv.transport.frame import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    Op,
    encode,
)
from prefill_plan.errors import ConfigError
from prefill_testing.in_loop import in_loop
from prefill_testing.raw_peer import Writer, raw_client, raw_server, read_frame, until
from prefill_testing.tcp_scene import DATA, HELD, KEY, SECONDS, find, pull, transport


def data_frame(question: Frame, **changes: object) -> bytes:
    return encode(replace(question, op=Op.DATA, **changes))  # type: ignore[arg-type]


Answer = Callable[[Frame, Writer], Awaitable[None]]


def say(make: Callable[[Frame], bytes], *, close: bool = False) -> Answer:
    async def answer(question: Frame, writer: Writer) -> None:
        writer.write(make(question))
        if close:
            await writer.drain()
            writer.close()

    return answer


BAD_ANSWERS = {
    "garbage": say(lambda _q: b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(HEADER_BYTES)),
    "other version": say(lambda q: data_frame(q)[:4] + b"\x09" + data_frame(q)[5:] + DATA),
    "unknown op": say(lambda q: data_frame(q)[:5] + b"\xee" + data_frame(q)[6:] + DATA),
    "longer": say(lambda q: data_frame(q, length=9) + DATA + b"i"),
    "shorter": say(lambda q: data_frame(q, length=7) + DATA),
    "length without end": say(lambda q: data_frame(q)[:16] + struct.pack("<Q", 1 << 60) + data_frame(q)[24:]),
    "of another exchange": say(lambda q: data_frame(q, exchange=q.exchange + 1) + DATA),
    "of another key": say(lambda q: data_frame(q, key=bytes(33)) + DATA),
    "another kind": say(lambda q: encode(replace(q, op=Op.STORED))),
    "nothing, then the end": say(lambda _q: b"", close=True),
    "half a header, then the end": say(lambda q: data_frame(q)[:30], close=True),
    "half the payload, then the end": say(lambda q: data_frame(q) + DATA[:4], close=True),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
@in_loop
async def test_a_wrong_answer_is_a_failure_and_the_connection_is_dropped(name: str) -> None:
    side = transport()
    try:
        async with raw_server(BAD_ANSWERS[name]) as server:
            for attempt in (1, 2):
                outcome = await pull(side, server.endpoint, bytearray(8))
                assert (outcome.state, outcome.settled()) == (PullState.FAILED, True)
                assert outcome.reason
                assert server.connections == attempt
    finally:
        await side.close()


@in_loop
async def test_too_many_bytes_end_the_connection_but_not_the_pull() -> None:
    side = transport()
    try:
        async with raw_server(say(lambda q: data_frame(q) + DATA + b"more")) as server:
            for attempt in (1, 2):
                target = bytearray(8)
                outcome = await pull(side, server.endpoint, target)
                assert (outcome.state, target, server.connections) == (PullState.DONE, DATA, attempt)
    finally:
        await side.close()


@pytest.mark.parametrize("sent", [0, 30, HEADER_BYTES, HEADER_BYTES + 4])
@in_loop
async def test_a_peer_that_stops_is_late_and_what_it_sends_later_lands_nowhere(sent: int) -> None:
    rest: list[bytes] = []

    async def stop(question: Frame, writer: Writer) -> None:
        whole = data_frame(question) + DATA
        writer.write(whole[:sent])
        rest.append(whole[sent:])

    side = transport()
    try:
        async with raw_server(stop) as server:
            target = bytearray(8)
            outcome = await pull(side, server.endpoint, target, seconds=0.1)
            assert (outcome.state, outcome.settled()) == (PullState.LATE, True)
            target[:] = b"reused!!"
            server.writers[0].write(rest[0])
            await asyncio.gather(server.writers[0].drain(), return_exceptions=True)
            # A further exchange has passed through the loop: what could land would have landed.
            await pull(side, server.endpoint, bytearray(8), seconds=0.1)
            assert target == b"reused!!"
    finally:
        await side.close()


@in_loop
async def test_connections_are_reused_and_a_stale_one_is_replaced_in_the_same_pull() -> None:
    side, first = transport(), transport()
    endpoint = await first.listen(find)
    port = int(endpoint.rpartition(":")[2])
    try:
        for _ in range(5):
            assert (await pull(side, endpoint, bytearray(8))).state is PullState.DONE
        assert first.counters["served"] == 5
        await first.close()
        second = transport(port=port)
        await second.listen(find)
        try:
            assert (await pull(side, endpoint, bytearray(8))).state is PullState.DONE
        finally:
            await second.close()
    finally:
        await side.close()
    assert HELD == []


@in_loop
async def test_a_connection_that_outlived_its_caller_and_went_stale_is_replaced() -> None:
    side, first = transport(), transport()
    endpoint = await first.listen(find)
    try:
        assert (await pull(side, endpoint, bytearray(8), seconds=1e-6)).state is PullState.LATE
        # The attempt goes on without its caller; who comes next takes its connection.
        assert (await pull(side, endpoint, bytearray(8))).state is PullState.DONE
        await first.close()
        second = transport(port=int(endpoint.rpartition(":")[2]))
        await second.listen(find)
        try:
            assert (await pull(side, endpoint, bytearray(8))).state is PullState.DONE
        finally:
            await second.close()
    finally:
        await side.close()


@in_loop
async def test_pulls_at_once_wait_for_one_connection_attempt() -> None:
    side = transport(out=3)
    server = transport()
    endpoint = await server.listen(find)
    try:
        outcomes = await asyncio.gather(*(pull(side, endpoint, bytearray(8)) for _ in range(30)))
        assert {one.state for one in outcomes} == {PullState.DONE}
    finally:
        await side.close()
        await server.close()
    assert server.counters["served"] == 30
    assert server.counters.get("refused", 0) == 0


@in_loop
async def test_a_dead_link_is_late_and_a_refused_one_fails_for_all_who_wait() -> None:
    side = transport()
    try:
        # TEST-NET-1 answers nothing (or says at once that there is no route).
        outcome = await pull(side, "192.0.2.1:9", bytearray(8), seconds=0.05)
        assert outcome.state in (PullState.LATE, PullState.FAILED)
        assert outcome.settled()
        outcomes = await asyncio.gather(*(pull(side, "127.0.0.1:1", bytearray(8)) for _ in range(5)))
        assert {one.state for one in outcomes} == {PullState.FAILED}
        assert (await pull(side, "nowhere", bytearray(8))).state is PullState.FAILED
    finally:
        await side.close()


@in_loop
async def test_connections_beyond_the_limit_are_refused_and_come_back() -> None:
    server = transport(links=2)
    endpoint = await server.listen(find)
    side = transport()
    try:
        async with raw_client(endpoint), raw_client(endpoint):
            await until(lambda: True)
            outcome = await pull(side, endpoint, bytearray(8))
            assert (outcome.state, outcome.reason) == (PullState.FAILED, "refused: busy")
        await until(lambda: server.counters.get("lost", 0) == 2)
        assert (await pull(side, endpoint, bytearray(8))).state is PullState.DONE
    finally:
        await side.close()
        await server.close()


QUESTIONS = {
    "garbage": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(HEADER_BYTES),
    "an answer": encode(Frame(op=Op.DATA, exchange=1, key=KEY)),
    "length beyond the limit": encode(Frame(op=Op.PUT, exchange=1, key=KEY))[:16]
    + struct.pack("<Q", MAX_PAYLOAD_BYTES + 1)
    + encode(Frame(op=Op.PUT, exchange=1, key=KEY))[24:],
    "a key too short": encode(Frame(op=Op.GET, exchange=1, key=KEY))[:7]
    + b"\x04"
    + encode(Frame(op=Op.GET, exchange=1, key=KEY))[8:],
}


@pytest.mark.parametrize("name", QUESTIONS)
@in_loop
async def test_a_wrong_question_ends_its_connection_only(name: str) -> None:
    server, side = transport(), transport()
    endpoint = await server.listen(find)
    try:
        async with raw_client(endpoint) as (reader, writer):
            writer.write(QUESTIONS[name])
            assert await reader.read() == b""
            assert server.counters["protocol_errors"] == 1
            assert (await pull(side, endpoint, bytearray(8))).state is PullState.DONE
    finally:
        await side.close()
        await server.close()


@in_loop
async def test_a_caller_that_stops_in_its_header_holds_up_nobody() -> None:
    server, side = transport(), transport()
    endpoint = await server.listen(find)
    try:
        async with raw_client(endpoint) as (_, writer):
            writer.write(encode(Frame(op=Op.GET, exchange=1, key=KEY, length=8))[:20])
            await writer.drain()
            assert (await pull(side, endpoint, bytearray(8))).state is PullState.DONE
    finally:
        await side.close()
        await server.close()


@in_loop
async def test_a_caller_that_never_reads_pins_its_source_for_a_bounded_time() -> None:
    big = bytes(64 << 20)
    held: list[int] = []

    def find_big(_key: bytes) -> Source:
        held.append(1)
        return Source(view=memoryview(big), fd=-1, offset=0, release=held.pop)

    server = transport()
    endpoint = await server.listen(find_big)
    try:
        async with raw_client(endpoint) as (_, writer):
            writer.write(encode(Frame(op=Op.GET, exchange=1, key=KEY, length=len(big), patience_ms=50)))
            await until(lambda: held == [1])
            await until(lambda: held == [])
    finally:
        await server.close()


@in_loop
async def test_revoking_in_mid_push_ends_it_at_once() -> None:
    size = 8 << 20
    server = transport()
    endpoint = await server.listen(find)
    target = bytearray(size)
    done: list[int] = []
    revoke = server.accept(KEY, memoryview(target), lambda: done.append(1))
    try:
        async with raw_client(endpoint) as (reader, writer):
            writer.write(encode(Frame(op=Op.PUT, exchange=1, key=KEY, length=size)))
            assert (await read_frame(reader)).op is Op.GRANTED
            writer.write(b"x" * (size // 2))
            await until(lambda: target[0] == ord("x"))
            assert revoke()
            target[:] = bytes(size)
            writer.write(b"x" * (size // 2))
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        assert (target == bytes(size), done) == (True, [])
    finally:
        await server.close()


@in_loop
async def test_a_push_that_breaks_off_may_be_tried_again() -> None:
    server, side = transport(), transport()
    endpoint = await server.listen(find)
    target = bytearray(8)
    done: list[int] = []
    server.accept(KEY, memoryview(target), lambda: done.append(1))
    try:
        async with raw_client(endpoint) as (reader, writer):
            writer.write(encode(Frame(op=Op.PUT, exchange=1, key=KEY, length=8)) + b"abcd")
            assert (await read_frame(reader)).op is Op.GRANTED
            busy = await side.push(endpoint, KEY, memoryview(DATA), deadline_seconds=SECONDS)
            assert (busy.state, busy.reason) == (PullState.FAILED, "refused: no_grant")
        await until(lambda: server.counters.get("lost", 0) == 1)
        assert done == []
        outcome = await side.push(endpoint, KEY, memoryview(DATA), deadline_seconds=SECONDS)
        assert (outcome.state, target, done) == (PullState.DONE, DATA, [1])
    finally:
        await side.close()
        await server.close()


@in_loop
async def test_closing_a_peer_ends_the_pulls_from_it() -> None:
    async def silence(_question: Frame, _writer: Writer) -> None:
        return

    side = transport()
    try:
        async with raw_server(silence) as server:
            pending = asyncio.create_task(pull(side, server.endpoint, bytearray(8)))
            await until(lambda: server.connections == 1)
            await side.close_peer(server.endpoint)
            outcome = await pending
            assert (outcome.state, outcome.reason, outcome.settled()) == (PullState.FAILED, "closed by us", True)
    finally:
        await side.close()


@in_loop
async def test_an_error_of_our_own_while_serving_ends_that_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    def broken(key: bytes) -> Source | None:
        if key == KEY:
            raise RuntimeError("pool is gone")
        return None

    server, side = transport(), transport()
    endpoint = await server.listen(broken)
    try:
        assert (await pull(side, endpoint, bytearray(8))).state is PullState.FAILED
        other = await side.pull(endpoint, bytes(32), memoryview(bytearray(8)), deadline_seconds=SECONDS)
        assert other.state is PullState.ABSENT
    finally:
        await side.close()
        await server.close()
    assert "pool is gone" in caplog.text


@in_loop
async def test_a_taken_port_is_a_configuration_error() -> None:
    first, second = transport(), transport()
    port = int((await first.listen(find)).rpartition(":")[2])
    try:
        taken = transport(port=port)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be bound"):
            await taken.listen(find)
    finally:
        await first.close()
        await second.close()
