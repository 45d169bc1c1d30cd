"""Memory of a decode peer under pushes: accepted only whole and in time, free only when nothing can be written there any more."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefill_engine.handoff_pieces import checksums, cut_pieces
from prefill_engine.sink_grants import Reservation, Room, SinkGrants, SinkState

GRANT = b"g" * 16
ATTEMPT = b"a" * 16
CONTENT = bytes(range(200))
CHECKS = {1: checksums(CONTENT, piece_bytes=100)}
CAPACITY = 1000


class Writes:
    """Stands for the transport: a write in flight can't be revoked."""

    def __init__(self) -> None:
        self.in_flight = False

    def revoke(self) -> bool:
        return not self.in_flight


def reserved() -> tuple[SinkGrants, Reservation, Writes]:
    key, writes = b"k" * 32, Writes()
    room = Room(
        kind=1,
        memory=bytearray(len(CONTENT)),
        offset=0,
        piece_bytes=100,
        pieces=cut_pieces(key, num_bytes=len(CONTENT), piece_bytes=100),
        component_key=key,
    )
    reservation = Reservation(
        grant_id=GRANT,
        attempt_id=ATTEMPT,
        kv_tokens=10,
        rooms={1: room},
        ttl_seconds=30.0,
        expires=30.0,
        missing=2,
        revokes=[writes.revoke],
    )
    grants = SinkGrants(CAPACITY, keep_seconds=100.0)
    grants.add(reservation)
    return grants, reservation, writes


def land(grants: SinkGrants, reservation: Reservation) -> None:
    reservation.rooms[1].memory[:] = CONTENT
    grants.landed(reservation)
    grants.landed(reservation)


def offer(grants: SinkGrants, *, now: float = 1.0, **changes: object) -> str:
    terms: dict[str, object] = {"attempt_id": ATTEMPT, "checks": CHECKS, "kv_tokens": 10, "first_token": 7, **changes}
    return grants.offer(GRANT, now=now, **terms)  # type: ignore[arg-type]


def test_whole_hand_over_in_time_is_accepted_once_and_then_a_duplicate():
    grants, reservation, _ = reserved()
    land(grants, reservation)
    assert [offer(grants), offer(grants), offer(grants, now=99.0)] == ["ACCEPTED", "DUPLICATE", "DUPLICATE"]
    assert (reservation.state, reservation.first_token, grants.free_bytes) == (SinkState.ACCEPTED, 7, CAPACITY - 200)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"now": 30.0}, "REFUSED_EXPIRED", id="lease-over"),
        pytest.param({"kv_tokens": 11}, "REFUSED_FORMAT", id="another-length"),
        pytest.param({"attempt_id": b"b" * 16}, "REFUSED_FORMAT", id="another-attempt"),
        pytest.param({"checks": {}}, "REFUSED_CHECKSUM", id="no-checksums"),
        pytest.param({"checks": {1: CHECKS[1][:4]}}, "REFUSED_CHECKSUM", id="too-few-checksums"),
        pytest.param({"checks": {1: CHECKS[1][4:] + CHECKS[1][:4]}}, "REFUSED_CHECKSUM", id="swapped-checksums"),
    ],
)
def test_offer_that_does_not_fit_is_refused(changes: dict[str, object], expected: str):
    grants, reservation, _ = reserved()
    land(grants, reservation)
    assert offer(grants, **changes) == expected
    assert reservation.state is SinkState.RESERVED


def test_offer_before_all_pieces_landed_is_refused_even_if_the_bytes_look_right():
    grants, reservation, _ = reserved()
    reservation.rooms[1].memory[:] = CONTENT
    grants.landed(reservation)
    assert offer(grants) == "REFUSED_CHECKSUM"


def test_one_wrong_bit_is_refused():
    grants, reservation, _ = reserved()
    land(grants, reservation)
    reservation.rooms[1].memory[137] ^= 4
    assert offer(grants) == "REFUSED_CHECKSUM"


def test_offer_of_an_unknown_grant_is_refused():
    grants = SinkGrants(CAPACITY)
    assert offer(grants) == "REFUSED_EXPIRED"


@pytest.mark.parametrize("drained", [True, False])
def test_abandoned_memory_is_free_at_once_when_no_write_is_in_flight(drained: bool):
    grants, reservation, _ = reserved()
    assert grants.abandon(GRANT, writes_drained=drained, now=1.0)
    assert (reservation.state, grants.free_bytes) == (SinkState.FREED, CAPACITY)
    assert offer(grants) == "REFUSED_EXPIRED"


@pytest.mark.parametrize("drained", [True, False])
def test_abandoned_memory_stays_quarantined_while_a_write_is_in_flight(drained: bool):
    grants, reservation, writes = reserved()
    writes.in_flight = True
    assert not grants.abandon(GRANT, writes_drained=drained, now=1.0)
    grants.sweep(now=1e6)
    assert (reservation.state, grants.free_bytes) == (SinkState.QUARANTINED, CAPACITY - 200)
    writes.in_flight = False
    assert grants.abandon(GRANT, writes_drained=True, now=2e6)
    assert grants.free_bytes == CAPACITY


def test_lease_that_runs_out_begins_a_quarantine_and_frees_nothing_by_itself():
    grants, reservation, writes = reserved()
    writes.in_flight = True
    assert grants.sweep(now=29.9) == []
    assert grants.sweep(now=30.0) == [reservation]
    assert (reservation.state, grants.free_bytes) == (SinkState.QUARANTINED, CAPACITY - 200)
    assert not grants.renew(GRANT, now=31.0)
    writes.in_flight = False
    grants.sweep(now=31.0)
    assert grants.free_bytes == CAPACITY


def test_renewal_counts_from_now_and_not_after_the_end():
    grants, reservation, _ = reserved()
    assert grants.renew(GRANT, now=20.0)
    assert reservation.expires == 50.0
    assert not grants.renew(GRANT, now=50.0)
    assert not grants.renew(b"?", now=1.0)


def test_abandon_after_acceptance_leaves_the_request_its_memory():
    grants, reservation, _ = reserved()
    land(grants, reservation)
    offer(grants)
    assert not grants.abandon(GRANT, writes_drained=True, now=2.0)
    assert bytes(reservation.rooms[1].memory) == CONTENT
    grants.release(GRANT, now=3.0)
    assert grants.free_bytes == CAPACITY


def test_ended_reservation_is_remembered_then_forgotten():
    grants, _, _ = reserved()
    grants.abandon(GRANT, writes_drained=True, now=1.0)
    assert grants.find(GRANT) is not None
    assert grants.abandon(GRANT, writes_drained=True, now=2.0)
    grants.sweep(now=102.0)
    assert grants.find(GRANT) is None


def test_open_reservation_of_an_attempt_is_found_and_an_ended_one_is_not():
    grants, reservation, _ = reserved()
    assert grants.of_attempt(ATTEMPT) is reservation
    grants.abandon(GRANT, writes_drained=True, now=1.0)
    assert grants.of_attempt(ATTEMPT) is None


class SinkLife(RuleBasedStateMachine):
    """Writes, verdicts, abandons and time in any order: memory is never free under a write, and never used half written."""

    @initialize()
    def start(self) -> None:
        self.grants, self.reservation, self.writes = reserved()
        self.now = 0.0
        self.written = 0

    @rule(step=st.floats(0, 20))
    def pass_time(self, step: float) -> None:
        self.now += step

    @rule()
    def begin_write(self) -> None:
        if self.reservation.state is SinkState.RESERVED and self.written < 2:
            self.writes.in_flight = True

    @rule()
    def end_write(self) -> None:
        if self.writes.in_flight:
            self.writes.in_flight = False
            if self.reservation.state is SinkState.RESERVED:
                start = self.written * 100
                self.reservation.rooms[1].memory[start : start + 100] = CONTENT[start : start + 100]
                self.written += 1
                self.grants.landed(self.reservation)

    @rule()
    def offer(self) -> None:
        verdict = offer(self.grants, now=self.now)
        assert (verdict in ("ACCEPTED", "DUPLICATE")) == (self.reservation.state is SinkState.ACCEPTED)
        if verdict == "ACCEPTED":
            assert (self.written, bytes(self.reservation.rooms[1].memory)) == (2, CONTENT)

    @rule(drained=st.booleans())
    def abandon(self, drained: bool) -> None:
        self.grants.abandon(GRANT, writes_drained=drained, now=self.now)

    @rule()
    def renew(self) -> None:
        self.grants.renew(GRANT, now=self.now)

    @rule()
    def sweep(self) -> None:
        self.grants.sweep(now=self.now)

    @invariant()
    def never_free_under_a_write(self) -> None:
        if hasattr(self, "writes") and self.writes.in_flight:
            assert self.reservation.state is not SinkState.FREED
            assert self.grants.free_bytes == CAPACITY - 200


TestSinkLife = SinkLife.TestCase
TestSinkLife.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
