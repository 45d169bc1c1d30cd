"""One incarnation of a NIXL agent (UCX), all its calls on one thread of its own. Used by nixl.py only.

The trap (kv.md 4.4, ai-dynamo/nixl#2067): nothing but the end of the agent stops a transfer. Releasing its handle or removing
the remote agent succeed, and the bytes still arrive. So `destroy` is the way to settle what does not complete.
"""

import asyncio
import ctypes
import importlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from prefill_plan.errors import ConfigError

T = TypeVar("T")

LIBRARIES = ("nixl_cu12", "nixl_cu13")
INSTALL_LINE = "pip install --no-deps nixl-cu12==1.5.1 && pip install numpy"
_BACKEND = "UCX"
_POLL_SECONDS = 0.00005
_TURN_SECONDS = 0.001


class Place(msgspec.Struct, frozen=True):
    """Where a peer's bytes stand: what a PLACE frame carries. metadata: NIXL's own, to reach the agent and that memory."""

    agent: str
    address: int
    length: int
    metadata: bytes


class NixlFailed(Exception):
    """A NIXL call failed or the agent is gone. Never leaves the transport."""


def load_library() -> Any:
    """The NIXL module that is installed. Raises ConfigError with the way to install it."""
    reasons = []
    for name in LIBRARIES:
        try:
            library = importlib.import_module(f"{name}._api")
        except ImportError as error:
            reasons.append(f"{name}: {error}")
        else:
            # It prints every agent on stdout, where our own lines for machines go.
            logging.getLogger("nixl").setLevel(logging.WARNING)
            return library
    raise ConfigError(f"transport.kind nixl: {'; '.join(reasons)}; expected the nixl extra ({INSTALL_LINE})")


def address_of(view: memoryview) -> int:
    """Of a writable view's first byte; a view of nothing has none."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0


class NixlAgent:
    """Owner of the agent, its registrations and its open transfers.

    regions: registered for the whole life. is_served: peers touch its memory, so a thread of NIXL's moves it on at all times, and
    never sleeps; else it moves on while it is polled, which is quicker and costs nothing between transfers.
    """

    def __init__(self, library: Any, label: str, regions: Sequence[memoryview], *, is_served: bool) -> None:
        self.name = f"{label}-{secrets.token_hex(6)}"
        self.is_dead = False
        self.gone = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self.name)
        self._library = library
        self._is_served = is_served
        self._regions = [(address_of(view), len(view), view) for view in regions]
        self._agent: Any = None
        self._region_descs: Any = None
        # number -> (handle, name of the remote agent)
        self._handles: dict[int, tuple[Any, str]] = {}
        self._next_handle = 0
        # Remote agent -> metadata that was loaded for it. A remote with a transfer in flight is never removed: NIXL would then
        # call the transfer ended while it still writes.
        self._remotes: dict[str, set[bytes]] = {}
        self._notes: set[bytes] = set()

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Runs one of the `_in_thread` methods. Raises NixlFailed."""
        if self.is_dead:
            raise NixlFailed("agent was recycled")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        except NixlFailed:
            raise
        except Exception as error:
            raise NixlFailed(f"{type(error).__name__}: {error}") from error

    async def destroy(self) -> None:
        """Ends the agent; when this returns, nothing of it writes any more."""
        self.is_dead = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._destroy_in_thread)
        self._thread.shutdown(wait=False)
        self.gone.set()

    def start_in_thread(self) -> None:
        config = self._library.nixl_agent_config(enable_prog_thread=self._is_served, backends=[_BACKEND])
        self._agent = self._library.nixl_agent(self.name, config)
        if self._regions:
            rows = [(address, length, 0, "") for address, length, _ in self._regions]
            self._region_descs = self._agent.register_memory(rows, "DRAM", backends=[_BACKEND])

    def hold_in_thread(self, view: memoryview) -> Any:
        """Makes a view transferable; None when a region covers it, else what `drop_in_thread` takes."""
        address = address_of(view)
        if any(start <= address and address + len(view) <= start + size for start, size, _ in self._regions):
            return None
        return self._agent.register_memory([(address, len(view), 0, "")], "DRAM", backends=[_BACKEND])

    def drop_in_thread(self, held: Any) -> None:
        if held is not None and self._agent is not None:
            self._agent.deregister_memory(held, backends=[_BACKEND])

    def place_in_thread(self, view: memoryview, held: Any) -> Place:
        """Of a view, with what hold_in_thread gave for it."""
        descs = held if held is not None else self._region_descs
        metadata = b""
        if descs is not None and len(view):
            metadata = self._agent.get_partial_agent_metadata(descs, inc_conn_info=True, backends=[_BACKEND])
        return Place(agent=self.name, address=address_of(view), length=len(view), metadata=metadata)

    def begin_in_thread(self, operation: str, view: memoryview, place: Place, note: bytes) -> int:
        """Starts READ or WRITE between a held view and a peer's place; the transfer's number."""
        known = self._remotes.setdefault(place.agent, set())
        if place.metadata not in known:
            self._agent.add_remote_agent(place.metadata)
            known.add(place.metadata)
        near = self._agent.get_xfer_descs([(address_of(view), len(view), 0)], "DRAM")
        far = self._agent.get_xfer_descs([(place.address, place.length, 0)], "DRAM")
        handle = self._agent.initialize_xfer(operation, near, far, place.agent, note, backends=[_BACKEND])
        self._next_handle += 1
        number = self._next_handle
        self._handles[number] = (handle, place.agent)
        try:
            state = self._agent.transfer(handle)
        except Exception:
            self._end(number, failed=True)
            raise
        if state == "ERR":
            self._end(number, failed=True)
            raise NixlFailed(f"{operation} could not be started")
        return number

    def poll_in_thread(self, number: int) -> bool:
        """True once the transfer is done; waits a millisecond at most. Raises NixlFailed when it failed: then it is over, too."""
        stop = time.monotonic() + _TURN_SECONDS
        while True:
            try:
                state = self._agent.check_xfer_state(self._handles[number][0])
            except Exception:
                self._end(number, failed=True)
                raise
            if state == "PROC":
                if time.monotonic() > stop:
                    return False
                time.sleep(_POLL_SECONDS)
                continue
            self._end(number, failed=state != "DONE")
            if state != "DONE":
                raise NixlFailed(f"transfer ended as {state}")
            return True

    def has_note_in_thread(self, note: bytes) -> bool:
        """Whether a peer's WRITE with this note has arrived in full; says yes once."""
        for notes in self._agent.get_new_notifs().values():
            self._notes.update(notes)
        found = note in self._notes
        self._notes.discard(note)
        return found

    def _end(self, number: int, *, failed: bool) -> None:
        handle, remote = self._handles.pop(number)
        handle.release()
        if failed and not any(other == remote for _, other in self._handles.values()):
            # It has probably restarted, under another name.
            del self._remotes[remote]
            self._agent.remove_remote_agent(remote)

    def _destroy_in_thread(self) -> None:
        for number in list(self._handles):
            self._handles.pop(number)[0].release()
        self._agent = None
