"""A rank's end of kvd's socket when answers do not come: what was granted meanwhile is given back, and it is said once."""

import logging
from collections.abc import Iterator

import pytest

from prefill_engine.rank.kvd_client import KvdClient
from prefill_engine.rpc import kv_pb2
from prefill_plan.config import KvdLink
from prefill_testing.fake_kvd import FakeKvd
from prefill_testing.kvd_fakes import GEOMETRY, chain
from prefill_testing.kvd_process import wait_until


@pytest.fixture
def kvd() -> Iterator[FakeKvd]:
    with FakeKvd.running(pool_bytes=4 << 20) as fake:
        yield fake


@pytest.fixture
def client(kvd: FakeKvd, monkeypatch: pytest.MonkeyPatch) -> Iterator[KvdClient]:
    """Its calls end soon."""
    for name in ("_CALL_SECONDS", "_COMMIT_SECONDS", "_LATE_SECONDS"):
        monkeypatch.setattr(f"prefill_engine.rank.kvd_client.{name}", 0.2)
    settings = KvdLink(socket=kvd.socket, connect_seconds=20.0, open_seconds=0.1)
    client = KvdClient(settings, geometry=GEOMETRY, rank=0, held_leases=lambda: (), on_change=lambda: None)
    client.start()
    yield client
    client.stop()


def reserve(client: KvdClient) -> kv_pb2.ReserveSlotsResponse | None:
    assert client.link is not None
    return client.reserve(client.link, kv_pb2.ReserveSlotsRequest(owner_epoch=client.owner_epoch, num_blocks=2))


def test_reservation_whose_answer_never_came_is_given_back(kvd: FakeKvd, client: KvdClient) -> None:
    kvd.silent = {"Reserve"}
    assert reserve(client) is None
    wait_until(lambda: "Reserve" in kvd.calls and kvd.reservations == {}, "the reservation's end")
    kvd.silent.clear()
    kept = reserve(client)
    assert kept is not None
    assert list(kvd.reservations) == [kept.reservation_id], "only the call without an answer was given back"


def test_lease_whose_answer_never_came_is_given_back(kvd: FakeKvd, client: KvdClient) -> None:
    (key,) = chain("a", 1)
    kvd.blocks[key] = 0
    kvd.silent = {"Open"}
    answers: list[kv_pb2.OpenResponse | None] = []
    client.open(kv_pb2.OpenRequest(owner_epoch=client.owner_epoch, keys=key), answers.append)
    wait_until(lambda: answers == [None], "the end of the wait")
    wait_until(lambda: kvd.leases == {}, "the lease's end")
    assert kvd.calls.count("abandon") == 1


def test_reservation_of_a_commit_without_an_answer_is_closed(kvd: FakeKvd, client: KvdClient) -> None:
    granted = reserve(client)
    assert granted is not None
    assert client.link is not None
    kvd.mute = {"Commit"}
    answers: list[kv_pb2.CommitResponse | None] = []
    client.commit(client.link, kv_pb2.CommitRequest(reservation_id=granted.reservation_id), answers.append)
    wait_until(lambda: answers == [None], "the end of the wait")
    wait_until(lambda: kvd.reservations == {}, "the reservation's end")


def test_close_without_an_answer_is_said_again(kvd: FakeKvd, client: KvdClient) -> None:
    granted = reserve(client)
    assert granted is not None
    kvd.mute = {"Close"}
    client.close([granted.reservation_id])
    wait_until(lambda: kvd.calls.count("Close") > 1, "a second try")
    kvd.mute.clear()
    wait_until(lambda: kvd.reservations == {}, "the reservation's end")


def test_kvd_that_refuses_is_told_of_once(
    kvd: FakeKvd, client: KvdClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again five times a second, for as long as another model's rank holds the pool."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("prefill_engine.rank.kvd_client._RETRY_SECONDS", 0.01)
    kvd.refuses = True
    kvd.kill()
    kvd.start()
    tried = kvd.calls.count("Session")
    wait_until(lambda: kvd.calls.count("Session") > tried + 4, "further tries")
    refused = [record for record in caplog.records if "refuses this rank" in str(record.__dict__.get("error"))]
    assert len(refused) == 1
    kvd.refuses = False
    wait_until(lambda: client.link is not None, "a session")


def test_kvd_that_drains_is_asked_for_no_slots_until_another_one_serves(kvd: FakeKvd, client: KvdClient) -> None:
    kvd.kill()
    kvd.is_draining = True
    kvd.start()
    wait_until(lambda: client.link is not None and client.link.is_current and client._is_draining, "the notice")
    num_asked = kvd.calls.count("Reserve")
    assert reserve(client) is None
    assert kvd.calls.count("Reserve") == num_asked
    kvd.kill()
    kvd.is_draining = False
    kvd.start()
    wait_until(lambda: client.link is not None and client.link.is_current and not client._is_draining, "a new session")
    wait_until(lambda: reserve(client) is not None, "slots")
