"""The part of NIXL's Python API that nixl_agent.py uses, between agents of one process, with UCX's bad habits (kv.md 4.4).

Bytes are copied between real addresses, so what was freed or rewritten too early shows. The habits: a transfer goes on when its
handle is released and when the remote agent is removed, and only the end of an agent of either side stops it. What real NIXL
refuses is refused here, too: memory that is not registered, and a remote agent that nobody added.
"""

import ctypes
import json
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Row = tuple[int, int, int] | tuple[int, int, int, str]


class FakeNixlError(Exception):
    pass


@dataclass(eq=False, slots=True)
class _Transfer:
    operation: str
    near: Row
    far: Row
    agent: "weakref.ref[nixl_agent]"
    remote: "weakref.ref[nixl_agent] | None"
    note: bytes
    state: str = "PROC"


@dataclass(eq=False, slots=True)
class _Handle:
    transfer: _Transfer

    def release(self) -> None:
        """Succeeds, and stops nothing."""


@dataclass(eq=False)
class FakeFabric:
    """The agents that see each other. hold: transfers that begin wait for `land`. before_copy: called with a transfer's own bytes
    about to move (tests rewrite memory there). registered: ranges of each living agent, by its name."""

    hold: bool = False
    before_copy: Callable[[], None] = lambda: None
    agents: "weakref.WeakValueDictionary[str, nixl_agent]" = field(default_factory=weakref.WeakValueDictionary)
    under_way: list[_Transfer] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def land(self) -> int:
        """Everything that is under way ends now; how many transfers copied their bytes."""
        with self.lock:
            self.hold = False
            moved, self.under_way = self.under_way, []
            return sum(self._end(transfer) for transfer in moved)

    def registered(self, role: str) -> list[int]:
        """Lengths that agents of a role ("owner", "reader") have registered now."""
        agents = [agent for name, agent in list(self.agents.items()) if name.startswith(role)]
        return sorted(row[1] for agent in agents for rows in agent.registrations for row in rows)

    def begin(self, transfer: _Transfer) -> None:
        with self.lock:
            self.under_way.append(transfer)
            if not self.hold:
                self.under_way.remove(transfer)
                self._end(transfer)

    def _end(self, transfer: _Transfer) -> bool:
        near, far = transfer.agent(), transfer.remote() if transfer.remote is not None else None
        if near is None or far is None:
            transfer.state = "ERR"
            return False
        self.before_copy()
        source, target = (
            (transfer.far, transfer.near) if transfer.operation == "READ" else (transfer.near, transfer.far)
        )
        ctypes.memmove(target[0], source[0], source[1])
        if transfer.note:
            far.notes.setdefault(near.name, []).append(transfer.note)
        transfer.state = "DONE"
        return True


class FakeLibrary:
    """Stands for the module nixl_cu12._api."""

    def __init__(self, fabric: FakeFabric) -> None:
        self._fabric = fabric

    def nixl_agent_config(self, *, enable_prog_thread: bool, backends: Sequence[str]) -> tuple[str, ...]:
        return tuple(backends)

    def nixl_agent(self, name: str, config: tuple[str, ...]) -> "nixl_agent":
        assert config == ("UCX",)
        return nixl_agent(name, self._fabric)


class nixl_agent:
    def __init__(self, name: str, fabric: FakeFabric) -> None:
        self.name = name
        self.registrations: list[list[Row]] = []
        self.notes: dict[str, list[bytes]] = {}
        self._fabric = fabric
        self._remotes: dict[str, list[tuple[int, int]]] = {}
        fabric.agents[name] = self

    def register_memory(self, rows: list[Row], kind: str, *, backends: list[str]) -> list[Row]:
        assert kind == "DRAM"
        self.registrations.append(rows)
        return rows

    def deregister_memory(self, rows: list[Row], *, backends: list[str]) -> None:
        self.registrations.remove(rows)

    def get_partial_agent_metadata(self, rows: list[Row], *, inc_conn_info: bool, backends: list[str]) -> bytes:
        assert rows in self.registrations
        return json.dumps([self.name, [[row[0], row[1]] for row in rows]]).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        name, ranges = json.loads(metadata)
        self._remotes.setdefault(name, []).extend((start, length) for start, length in ranges)
        return str(name)

    def remove_remote_agent(self, name: str) -> None:
        self._remotes.pop(name)

    def get_xfer_descs(self, rows: list[Row], kind: str) -> Row:
        (row,) = rows
        return row

    def initialize_xfer(
        self, operation: str, near: Row, far: Row, remote: str, note: bytes, *, backends: list[str]
    ) -> _Handle:
        own = [(row[0], row[1]) for rows in self.registrations for row in rows]
        if not _covers(own, near) or not _covers(self._remotes.get(remote, []), far):
            raise FakeNixlError("nixlNotFoundError")
        target = self._fabric.agents.get(remote)
        return _Handle(
            _Transfer(operation, near, far, weakref.ref(self), weakref.ref(target) if target else None, note)
        )

    def transfer(self, handle: _Handle) -> str:
        self._fabric.begin(handle.transfer)
        return handle.transfer.state

    def check_xfer_state(self, handle: _Handle) -> str:
        return handle.transfer.state

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        with self._fabric.lock:
            notes, self.notes = self.notes, {}
        return notes


def _covers(ranges: list[tuple[int, int]], row: Row) -> bool:
    return any(start <= row[0] and row[0] + row[1] <= start + length for start, length in ranges)
