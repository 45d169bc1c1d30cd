"""prefill_operator.lease: one leader at a time, judged by clocks of our own."""

import asyncio

import pytest

from prefill_operator.errors import LeaseLost
from prefill_operator.lease import LeaderLease
from prefill_operator.names import LEASE_NAME
from prefill_operator.resources import LEASES, Json
from prefill_operator.settings import LeaseTimes
from prefill_testing.fake_api import FakeApi, Fault
from prefill_testing.fake_cluster import FakeCluster
from prefill_testing.in_loop import in_loop


class Bench:
    """Candidates for one Lease, and their clock: a sleep lets time pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.api = FakeApi(clock=lambda: 1e9 + self.now)
        self.times = LeaseTimes()

    def candidate(self, identity: str) -> LeaderLease:
        return LeaderLease(
            FakeCluster(self.api),
            namespace="home",
            identity=identity,
            times=self.times,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    def spec(self) -> Json:
        spec: Json = self.api.get(LEASES, LEASE_NAME, "home")["spec"]
        return spec


def test_times_leave_room_between_the_last_write_and_a_takeover() -> None:
    """k8s.md 2 row 63 and 4.11."""
    times = LeaseTimes()

    assert (times.duration_seconds, times.renew_deadline_seconds, times.retry_seconds) == (15.0, 10.0, 2.0)


@in_loop
async def test_free_lease_is_taken_at_once() -> None:
    bench = Bench()
    lease = bench.candidate("a")
    assert not lease.valid()

    await lease.acquire()

    assert lease.valid()
    assert bench.now == 0.0
    assert (bench.spec()["holderIdentity"], bench.spec()["leaseDurationSeconds"]) == ("a", 15)


@in_loop
async def test_standby_takes_over_once_the_record_stood_still_for_its_duration() -> None:
    bench = Bench()
    await bench.candidate("a").acquire()
    standby = bench.candidate("b")

    await standby.acquire()

    assert 15.0 <= bench.now <= 15.0 + bench.times.retry_seconds
    assert (bench.spec()["holderIdentity"], bench.spec()["leaseTransitions"]) == ("b", 1)


@in_loop
async def test_renewed_lease_is_never_taken() -> None:
    bench = Bench()
    leader, standby = bench.candidate("a"), bench.candidate("b")
    await leader.acquire()
    for _ in range(30):
        assert not await standby.try_hold()
        await bench.sleep(bench.times.retry_seconds)
        assert await leader.try_hold()

    assert bench.now == 60.0


@pytest.mark.parametrize("renewed", ["1999-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z", "nonsense"])
@in_loop
async def test_clock_of_the_holder_does_not_matter(renewed: str) -> None:
    bench = Bench()
    await bench.candidate("a").acquire()
    lease = bench.api.get(LEASES, LEASE_NAME, "home")
    bench.api.put(LEASES, {**lease, "spec": {**lease["spec"], "renewTime": renewed}})

    await bench.candidate("b").acquire()

    assert bench.now >= 15.0


@in_loop
async def test_process_that_was_stopped_knows_before_it_writes() -> None:
    bench = Bench()
    leader = bench.candidate("a")
    await leader.acquire()

    bench.now += 10.0

    assert not leader.valid()
    with pytest.raises(LeaseLost, match="nothing was written"):
        leader.check()


@in_loop
async def test_leader_gives_up_before_others_may_take_over() -> None:
    bench = Bench()
    leader = bench.candidate("a")
    await leader.acquire()
    bench.api.faults.append(Fault(resource="leases", times=1000))

    with pytest.raises(LeaseLost):
        await leader.keep()

    assert bench.now <= bench.times.renew_deadline_seconds + bench.times.retry_seconds
    assert bench.now < bench.times.duration_seconds


@in_loop
async def test_leader_outlives_a_short_outage() -> None:
    bench = Bench()
    leader = bench.candidate("a")
    await leader.acquire()
    bench.api.faults.append(Fault(resource="leases", status=503, times=3))
    for _ in range(4):
        await bench.sleep(bench.times.retry_seconds)
        await leader.try_hold()

    assert leader.valid()


@in_loop
async def test_leader_whose_lease_was_taken_stops_at_once() -> None:
    bench = Bench()
    leader = bench.candidate("a")
    await leader.acquire()
    lease = bench.api.get(LEASES, LEASE_NAME, "home")
    bench.api.put(LEASES, {**lease, "spec": {**lease["spec"], "holderIdentity": "b"}})

    assert not await leader.try_hold()
    assert not leader.valid()


@in_loop
async def test_of_two_that_see_a_free_lease_one_wins() -> None:
    bench = Bench()
    first, second = bench.candidate("a"), bench.candidate("b")

    held = await asyncio.gather(first.try_hold(), second.try_hold())

    assert sorted(held) == [False, True]


@in_loop
async def test_released_lease_is_taken_without_waiting() -> None:
    bench = Bench()
    leader = bench.candidate("a")
    await leader.acquire()
    await leader.release()
    assert not leader.valid()

    await bench.candidate("b").acquire()

    assert bench.now == 0.0


@in_loop
async def test_release_leaves_the_lease_of_others_alone() -> None:
    bench = Bench()
    leader = bench.candidate("a")
    await leader.acquire()
    lease = bench.api.get(LEASES, LEASE_NAME, "home")
    bench.api.put(LEASES, {**lease, "spec": {**lease["spec"], "holderIdentity": "b"}})

    await leader.release()

    assert bench.spec()["holderIdentity"] == "b"


@in_loop
async def test_restarted_process_of_the_same_name_goes_on() -> None:
    bench = Bench()
    await bench.candidate("pod-0").acquire()

    await bench.candidate("pod-0").acquire()

    assert bench.now == 0.0
    assert bench.spec()["leaseTransitions"] == 0


@in_loop
async def test_hanging_api_server_does_not_hold_the_renewal_beyond_its_deadline() -> None:
    bench = Bench()
    bench.times = LeaseTimes(duration_seconds=0.3, renew_deadline_seconds=0.05, retry_seconds=0.01)
    lease = bench.candidate("a")
    cluster = lease._cluster

    async def hang(*_: object, **__: object) -> Json:
        await asyncio.sleep(60)
        raise AssertionError

    cluster.find = hang  # type: ignore[method-assign]

    assert not await lease.try_hold()
