"""kvd over a store that is read slowly on purpose: `prefill-engine kv serve`, but for a wrapper around its store.

Started by local_kv.py for the demo. Why: the demo's hits are a thousand times smaller than those of the released model, its steps
are not shorter, so that from this machine's page cache every layer group of a hit is there before the first layer is computed.
Writes, verification and all behind the store are the product's. The trap: only kvd's reads are slow; a decode side that reads
the store by key is not.
"""

import argparse
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prefill_engine.kv.pool_geometry import PoolGeometry
from prefill_engine.kv.segments import ReadJob, RecordWrite, SegmentInfo, SegmentStore
from prefill_engine.kvd.process import KvdOptions, run_kvd
from prefill_engine.log import setup_logging
from prefill_engine.settings import load_identity, load_kvd_config

_DRAIN_SECONDS = 20.0


class SlowStore:
    """SegmentStore whose reads are told of, piece by piece, no faster than a medium of `bytes_per_second` would bring them.

    group_bytes: of a record's layer groups. sleep: time.sleep; on the threads that read.
    """

    def __init__(
        self,
        store: SegmentStore,
        *,
        group_bytes: Sequence[int],
        bytes_per_second: float,
        sleep: Callable[[float], None],
    ) -> None:
        self.store_id = store.store_id
        self._store = store
        self._group_bytes = tuple(group_bytes)
        self._bytes_per_second = bytes_per_second
        self._sleep = sleep
        self._medium = threading.Lock()

    def read(self, job: ReadJob) -> None:
        """As SegmentStore."""
        told = [0] * len(job.reads)

        def on_group(index: int, groups: int) -> None:
            num_bytes = sum(self._group_bytes[told[index] : groups])
            with self._medium:
                self._sleep(num_bytes / self._bytes_per_second)
            told[index] = groups
            job.on_group(index, groups)

        self._store.read(dataclasses.replace(job, on_group=on_group))

    def publish(self, records: Sequence[RecordWrite], *, tenant: str = "") -> SegmentInfo:
        """As SegmentStore."""
        return self._store.publish(records, tenant=tenant)

    def scan(self) -> Iterator[SegmentInfo]:
        """As SegmentStore."""
        return self._store.scan()

    def collect(
        self,
        *,
        withdraw: Callable[[Sequence[str]], None],
        announce: Callable[[Sequence[SegmentInfo]], None] | None = None,
    ) -> int:
        """As SegmentStore."""
        return self._store.collect(withdraw=withdraw, announce=announce)

    def counters(self) -> dict[str, int]:
        """As SegmentStore."""
        return self._store.counters()

    def close(self) -> None:
        """As SegmentStore."""
        self._store.close()


def main() -> None:
    """Serves until SIGTERM; exit codes are kvd's."""
    parser = argparse.ArgumentParser(prog="prefill_engine.demo_kvd", allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--bytes-per-second", type=float, required=True)
    args = parser.parse_args()
    identity = load_identity()
    setup_logging(level="INFO", constants={"engine_id": identity.engine_id, "service": "kvd"})

    def wrap(store: SegmentStore, geometry: PoolGeometry) -> SegmentStore:
        rate = args.bytes_per_second
        return SlowStore(store, group_bytes=geometry.group_bytes, bytes_per_second=rate, sleep=time.sleep)

    options = KvdOptions(drain_seconds=_DRAIN_SECONDS, announce=_announce, wrap_store=wrap)
    ending = run_kvd(load_kvd_config(args.config, []), identity, options)
    if ending.detail:
        print(f"kvd: {ending.detail}", file=sys.stderr)
    logging.shutdown()
    # As `kv serve`: a thread stuck in a dead mount would keep the process.
    os._exit(int(ending.exit_code))


def _announce(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
