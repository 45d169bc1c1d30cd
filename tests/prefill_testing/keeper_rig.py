"""A Keeper with a real pool, a real directory in process, and a store and peers that fail on demand."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from prefill_engine.kv.directory import Holder
from prefill_engine.kv.pool_memory import PoolMemory
from prefill_engine.kvd.commits import SlotKey
from prefill_engine.kvd.directory_local import LocalDirectory, new_local_state
from prefill_engine.kvd.keeper import Keeper
from prefill_engine.kvd.kvd_metrics import KvdMetrics
from prefill_engine.kvd.opens import OpenAnswer, OpenAsk
from prefill_engine.kvd.store_link import StoreLink
from prefill_plan.block_keys import BlockKey, snapshot_key
from prefill_plan.kvd_config import KvdConfig
from prefill_testing.kvd_fakes import GEOMETRY, Clock, FakeStore, FakeTransport, make_record, make_snapshot

NUM_BLOCKS = 40
NUM_SNAPSHOTS = 3
OWNER = 77


@dataclass
class Rig:
    keeper: Keeper
    pool: PoolMemory
    """The rank's mapping."""
    store: FakeStore
    transport: FakeTransport
    directory: LocalDirectory
    clock: Clock
    registry: CollectorRegistry
    state: Any
    shared: Any
    """The directory's state, which peers share."""

    def metric(self, name: str, /, **labels: str) -> float:
        return self.registry.get_sample_value(f"kv_{name}", labels) or 0.0

    async def open(self, keys: list[BlockKey], **changes: Any) -> OpenAnswer:
        fields: dict[str, Any] = {
            "resident_blocks": 0,
            "tenant": "",
            "want_snapshot": False,
            "limit_seconds": 30.0,
            "refuse_replayed": False,
        }
        return await self.keeper.open(OWNER, OpenAsk(keys=keys, **{**fields, **changes}))

    def row(self, answer: OpenAnswer) -> Any:
        record = self.pool.lease(answer.row)
        assert record.lease_id == answer.lease_id
        return record

    async def save(self, keys: list[BlockKey], *, snapshots: list[BlockKey] | None = None, tenant: str = "") -> Any:
        num_snapshots = len(snapshots or ())
        reservation = self.keeper.reserve(OWNER, num_blocks=len(keys), num_snapshots=num_snapshots, tenant=tenant)
        assert reservation is not None
        blocks = [SlotKey(slot=slot, key=key) for slot, key in zip(reservation.slots, keys, strict=False)]
        for index, one in enumerate(blocks):
            self.pool.record(one.slot)[:] = make_record(BlockKey(one.key), index=index)
        snaps = []
        for slot, key in zip(reservation.snapshot_slots, snapshots or (), strict=False):
            self.pool.snapshot(slot)[:] = make_snapshot(key)
            snaps.append(SlotKey(slot=slot, key=snapshot_key(key)))
        return await self.keeper.commit(reservation.lease_id, blocks, snaps)

    def assert_bytes(self, answer: OpenAnswer, keys: list[BlockKey]) -> None:
        for slot, key in zip(answer.slots, keys, strict=True):
            assert bytes(self.pool.payload(slot)) == make_record(key)[GEOMETRY.header_bytes :]

    async def assert_nothing_leaks(self) -> None:
        await until(lambda: self.state().is_idle)
        assert len(self.state().leases) == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def run(test: Callable[[Rig], Coroutine[Any, Any, None]], tmp_path: Path, **config: Any) -> None:
    async def main() -> None:
        async with open_rig(tmp_path, **config) as rig:
            await test(rig)

    asyncio.run(main())


@asynccontextmanager
async def open_rig(tmp_path: Path, *, has_store: bool = True, epoch: int = 9, **changes: Any) -> AsyncIterator[Rig]:
    """epoch: of the kvd; a later one on the same path finds what an earlier one left."""
    snapshot_bytes = NUM_SNAPSHOTS * GEOMETRY.snapshot_record_bytes
    pool_bytes = 4096 + 4096 * 64 + NUM_BLOCKS * GEOMETRY.record_bytes + snapshot_bytes
    config = KvdConfig(pool_bytes=pool_bytes, snapshot_bytes=snapshot_bytes, **{"lease_grace_seconds": 5.0, **changes})
    memory = PoolMemory.create(str(tmp_path / "pool"), pool_bytes=pool_bytes, epoch=epoch)
    store, transport, clock, registry = FakeStore(), FakeTransport(), Clock(), CollectorRegistry()
    shared = new_local_state()
    directory = LocalDirectory(shared, Holder(holder_id="me", epoch=epoch, endpoint="127.0.0.1:1"), clock=clock)
    link = StoreLink((lambda _geometry: store) if has_store else None, directory)
    keeper = Keeper(
        config,
        memory,
        store=link,
        directory=directory,
        transport=transport,
        metrics=KvdMetrics(registry),
        clock=clock,
    )
    keeper.start()
    session, _ = await keeper.connect(owner_epoch=OWNER, engine_id="e", rank=0, geometry=GEOMETRY, held_leases=())
    rank = PoolMemory.attach(memory.path, nonce=memory.nonce)
    rank.set_echo(session.echo_index, OWNER)
    keeper.attach(session)
    if has_store:
        await until(lambda: link.reader() is not None)
    rig = Rig(
        keeper=keeper,
        pool=rank,
        store=store,
        transport=transport,
        directory=directory,
        clock=clock,
        registry=registry,
        state=lambda: keeper.state,
        shared=shared,
    )
    try:
        yield rig
    finally:
        if store.hang is not None:
            store.hang.set()
        await keeper.stop()
        transport.regions.clear()
        rank.close()
        memory.close()


async def tell_peer_has(rig: Rig, key: BlockKey, thing: bytes) -> None:
    peer = LocalDirectory(
        rig.shared,
        Holder(holder_id="peer", epoch=1, endpoint="10.0.0.1:7"),
        clock=rig.clock,
    )
    await peer.publish_snapshots([snapshot_key(key)])
    rig.transport.things[key] = thing


async def commit_snapshot(rig: Rig, key: BlockKey, record: bytes, *, tenant: str = "") -> None:
    reservation = rig.keeper.reserve(OWNER, num_blocks=0, num_snapshots=1, tenant=tenant)
    assert reservation is not None
    (slot,) = reservation.snapshot_slots
    rig.pool.snapshot(slot)[:] = record
    await rig.keeper.commit(reservation.lease_id, [], [SlotKey(slot=slot, key=snapshot_key(key))])
