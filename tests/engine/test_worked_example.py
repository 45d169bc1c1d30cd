"""The worked example of mission.md and serving.md 0.1 as the demo prints it."""

import pytest

from prefill_engine.worked_example import plan_variant, worked_example_lines
from prefill_plan.model_spec import released_model_spec


def test_table_has_the_numbers_of_both_variants() -> None:
    rows = {line[:36].strip(): line[36:].split("  ") for line in worked_example_lines()}
    cells = {name: [cell.strip() for cell in row if cell.strip()] for name, row in rows.items()}
    assert cells["prefix hit (Block KV)"] == ["96,896 = 757 blocks"] * 2
    assert cells["computation starts at"] == ["96,896", "96,768"]
    assert cells["encoder rows"] == ["3,104", "3,232 = 128 replayed + 3,104"]
    assert cells["rows that write Block KV"] == ["3,104"] * 2
    assert cells["decoder rows (KEEP_TOKENS)"] == ["140"] * 2
    assert cells["new blocks to the store"] == ["24, 758 to 781"] * 2
    assert cells["window snapshots at"] == ["99,840 and 99,968"] * 2
    assert cells["swap-in of the hit"] == ["86,237,440 B"] * 2
    assert cells["written to the store"] == ["2,734,080 B"] * 2
    assert cells["window snapshot read"] == ["1,415,040 B", "none, rebuilt by replay"]
    assert cells["hand-over: 782 blocks + state"] == [f"{782 * 113_920 + 3_128_928:,} B"] * 2


@pytest.mark.parametrize(("snapshot_held", "replayed"), [(True, 0), (False, 128)])
def test_lost_snapshot_replays_one_window(snapshot_held: bool, replayed: int) -> None:
    positions = plan_variant(released_model_spec(), snapshot_held=snapshot_held)
    assert (positions.hit_tokens, positions.replay_tokens) == (96_896, replayed)


def test_table_is_plain_text_of_at_most_100_columns() -> None:
    lines = list(worked_example_lines())
    assert [line for line in lines if len(line) > 100 or not line.isascii() or line != line.rstrip()] == []
