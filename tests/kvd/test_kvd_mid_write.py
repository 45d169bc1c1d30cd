"""kvd killed (-9) while it writes a segment: with half of its bytes written, and with all of them but not synced."""

import signal
import threading
from pathlib import Path

import grpc
import pytest

from prefill_testing.fault_shim import FaultShim, compile_shim
from prefill_testing.kvd_fakes import chain
from prefill_testing.kvd_process import NUM_BLOCKS, KvdProcess, RankClient, wait_until

KEYS = chain("k", 6)


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("is_pool_lost", [False, True], ids=["pool-stays", "pool-lost"])
def test_killed_in_mid_write_leaves_a_temporary_file_and_no_hit_in_the_store(
    tmp_path: Path, call: str, is_pool_lost: bool
) -> None:
    store = tmp_path / "store"
    faults = FaultShim(compile_shim(tmp_path), tmp_path / "faults", store=store)
    kvd = KvdProcess(tmp_path, wrapper=faults.wrapper)
    rank = RankClient(kvd.socket)
    wait_until(lambda: kvd.metric("store_up") == 1, "the store, which has files of its own to write")
    is_held = faults.hold(call)
    saving = threading.Thread(target=save, args=(rank,))
    saving.start()
    wait_until(is_held, "a write in the middle of a segment")
    kvd.process.send_signal(signal.SIGSTOP)
    (temporary,) = [path for path in store.rglob(".tmp/*") if path.is_file()]
    assert temporary.stat().st_size > 0
    kvd.kill()
    saving.join(60)
    assert not saving.is_alive(), "the commit that kvd must not answer has not ended within 60 s"
    faults.clear()
    assert list(store.rglob("*.seg")) == []
    rank.leave()
    if is_pool_lost:
        Path(str(kvd.config["pool_path"])).unlink()

    kvd.start()

    rank = RankClient(kvd.socket, owner=2)
    wait_until(lambda: kvd.num_usable_blocks() == NUM_BLOCKS, "every slot")
    answer = rank.open(KEYS)
    # The bytes had been verified before the write began: in the pool they are as good as before.
    assert answer.found_blocks == (0 if is_pool_lost else 6)
    if answer.lease_id:
        assert rank.read(answer, KEYS) == 6
        rank.close_leases(answer.lease_id)
    assert rank.save(KEYS).stored_blocks == 6
    assert len(list(store.rglob("*.seg"))) == 1
    rank.leave()
    kvd.kill()


def save(rank: RankClient) -> None:
    try:
        rank.save(KEYS)
    except grpc.RpcError:
        return
    raise AssertionError("kvd answered a commit that it had not written")
