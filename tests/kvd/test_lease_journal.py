from dataclasses import replace
from pathlib import Path

import pytest

from prefill_engine.kv.pool_memory import PoolMemory
from prefill_engine.kvd.lease_journal import JournalEntry, LeaseJournal, check_room
from prefill_engine.kvd.pool_state import PoolState
from prefill_engine.kvd.recovery import restore_leases
from prefill_engine.kvd.sessions import Sessions
from prefill_engine.kvd.slot_pool import SlotState
from prefill_plan.errors import ConfigError
from prefill_testing.kvd_fakes import GEOMETRY, Clock


def entry(lease_id: int, *, num_slots: int = 3, row: int = 5) -> JournalEntry:
    slots = tuple(range(lease_id, lease_id + num_slots))
    return JournalEntry(
        lease_id=lease_id, owner_epoch=2**64 - 1, row=row, echo_index=7, slots=slots, snapshot_slots=(9,)
    )


def test_next_life_knows_what_is_open(tmp_path: Path) -> None:
    path = str(tmp_path / "leases")
    journal = LeaseJournal(path)
    for number in (1, 2, 3):
        journal.put(entry(number))
    journal.put(entry(2, num_slots=1, row=-1))
    journal.remove(1)
    journal.remove(99)

    after_kill = LeaseJournal(path)

    assert {one.lease_id: one for one in after_kill.entries} == {3: entry(3), 2: entry(2, num_slots=1, row=-1)}
    assert LeaseJournal(path).entries == after_kill.entries
    journal.close()
    after_kill.close()


@pytest.mark.parametrize("cut", range(1, 40, 7))
def test_half_written_last_entry_is_ignored(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "leases"
    journal = LeaseJournal(str(path))
    journal.put(entry(1))
    whole = path.stat().st_size
    journal.put(entry(2))
    journal.close()
    data = path.read_bytes()
    path.write_bytes(data[: whole + cut])
    journal = LeaseJournal(str(path))
    assert journal.entries == [entry(1)]
    journal.close()


def test_damaged_entry_ends_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    journal = LeaseJournal(str(path))
    journal.put(entry(1))
    first = path.stat().st_size
    journal.put(entry(2))
    journal.close()
    data = bytearray(path.read_bytes())
    data[first + 9] ^= 1
    path.write_bytes(data)
    journal = LeaseJournal(str(path))
    assert journal.entries == [entry(1)]
    journal.close()


def test_file_does_not_grow_with_the_number_of_leases_ever_opened(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    journal = LeaseJournal(str(path))
    journal.put(entry(10**6))
    for number in range(3000):
        journal.put(entry(number, num_slots=300))
        journal.remove(number)
    assert path.stat().st_size < 2 << 20
    assert journal.entries == [entry(10**6)]
    journal.close()


def test_reservations_that_share_a_slot_do_not_keep_kvd_from_starting(tmp_path: Path) -> None:
    """The end of the older one was not written down, for want of room; its slot was then given away again."""
    memory = PoolMemory.create(str(tmp_path / "pool"), pool_bytes=1 << 20, epoch=1)
    memory.lay_out(GEOMETRY, 4 * GEOMETRY.snapshot_record_bytes)
    journal = LeaseJournal(str(tmp_path / "leases"))
    for lease_id in (1, 2):
        journal.put(replace(entry(lease_id, row=-1), slots=(0, lease_id), snapshot_slots=(0,)))
    state = PoolState(memory, journal, tenant_share=1.0, on_group_ready=lambda _group, _seconds: None)
    sessions = Sessions(grace_seconds=1.0, is_alive=lambda _index: False, clock=Clock())
    assert restore_leases(state, sessions) == 2
    for lease in state.leases:
        state.end_lease(lease)
    assert [state.blocks.state(slot) for slot in (0, 1, 2, 3)] == [SlotState.FREE] * 3 + [SlotState.QUARANTINED]
    assert journal.entries == []
    journal.close()
    memory.close()


def test_too_little_room_beside_the_pool_is_told_at_the_start() -> None:
    check_room("/dev/shm/kvd.p.leases", free_bytes=2 << 20)
    with pytest.raises(
        ConfigError, match=r"4096 bytes are left .*kvd\.p\.leases, expected 2097152: .*engine\.extraShm"
    ):
        check_room("/dev/shm/kvd.p.leases", free_bytes=4096)
