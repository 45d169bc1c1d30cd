"""What kvd shows of others' counts: as counters that never fall."""

from pathlib import Path

import pytest

from prefill_testing.keeper_rig import Rig, run


def test_counts_of_store_transport_and_directory_are_shown(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        rig.store.num_reads = 3
        rig.transport.counters = {"reconnects": 2, "served": 5}
        for _ in range(2):
            await rig.keeper._tick()
        assert rig.metric("store_events_total", name="opens") == 3
        assert rig.metric("transport_events_total", name="reconnects") == 2
        rig.transport.counters["served"] = 6
        await rig.keeper._tick()
        assert rig.metric("transport_events_total", name="served") == 6

    run(test, tmp_path)


@pytest.mark.parametrize("is_seen_away", [True, False])
def test_store_that_was_opened_again_counts_on(
    tmp_path: Path, is_seen_away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(rig: Rig) -> None:
        rig.store.num_reads = 10
        await rig.keeper._tick()
        if is_seen_away:
            with monkeypatch.context() as patch:
                patch.setattr(rig.keeper.store, "_store", None)
                await rig.keeper._tick()
        rig.store.num_reads = 4
        await rig.keeper._tick()
        assert rig.metric("store_events_total", name="opens") == 14

    run(test, tmp_path)
