"""A rank process that stops in the middle of filling a reserved slot of kvd's pool, until told to go on.

    python -m prefill_testing.slow_writer SOCKET

Prints "half" when the first half of a record is in its slot, waits for a line, writes the rest, prints "stored N" with the
blocks that kvd stored, and then turns until its input ends.
"""

import sys
import threading
from collections.abc import Sequence

from prefill_engine.kv.pool_memory import PoolMemory
from prefill_engine.messages import Computed, StoreProgress
from prefill_engine.rank.block_save import CpuSaver
from prefill_testing.kvd_rig import LONG, kvd_config
from prefill_testing.rank_harness import RankHarness, make_submit, tiny_tokens

SEED = 77


def main() -> None:
    rank = RankHarness(kvd_config(sys.argv[1]))
    go_on = threading.Event()
    save = CpuSaver.save

    def save_half(self: CpuSaver, pool: PoolMemory, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        if not go_on.is_set():
            record = pool.record(targets[0])
            record[: len(record) // 2] = b"\xa5" * (len(record) // 2)
            print("half", flush=True)
            go_on.wait()
        save(self, pool, sources=sources, targets=targets)

    CpuSaver.save = save_half
    submit = make_submit(tiny_tokens(LONG, seed=SEED))

    def listen() -> None:
        sys.stdin.readline()
        go_on.set()
        sys.stdin.read()
        ended.set()

    ended = threading.Event()
    threading.Thread(target=listen, daemon=True).start()
    rank.finish(submit, until=Computed)
    rank.run_until(lambda: any(isinstance(event, StoreProgress) and event.done for event in rank.events_of(submit)))
    print(f"stored {rank.event(submit, StoreProgress).committed}", flush=True)
    while not ended.is_set():
        rank.turn()
    rank.close()


if __name__ == "__main__":
    main()
