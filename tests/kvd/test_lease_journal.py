from pathlib import Path

import pytest

from prefill_engine.kvd.lease_journal import JournalEntry, LeaseJournal


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
