"""One decode worker, seen from the RPC process: started, fed, read, watched, ended. Used by worker_pool.py only.

The traps: a worker has decoded attackers' bytes, so it is never believed: its answers are parsed, and its memory file is read
with pread (a mapping would raise SIGBUS here if it cut the file short). Copies go in pieces with the loop running in between, so
that a large image delays nobody's call.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from prefill_engine.vision.decode_messages import (
    CANVAS_OFFSET,
    MAX_MESSAGE_BYTES,
    CanvasReady,
    DecodeJob,
    JobRejected,
    WorkerArgs,
    WorkerMessage,
    WorkerReady,
    decode_worker_message,
    encode,
)
from prefill_plan.errors import PeerError
from prefill_plan.model_parts import VisionSpec

WORKER_MODULE = "prefill_engine.vision.decode_worker"
_PIECE_BYTES = 1 << 20
_KEPT_INPUT_BYTES = 4 << 20
"""Pages of a larger input are given back after its image."""
_END_SECONDS = 5.0


class WorkerLost(PeerError):
    """A decode worker ended with the image it worked on, and not by the image's fault. exit_code: negative = that signal; None:
    it was ended for talking nonsense."""

    code = "WORKER_LOST"

    def __init__(self, message: str, *, exit_code: int | None) -> None:
        super().__init__(message, exit_code=exit_code)
        self.exit_code = exit_code


class WorkerProcess:
    """A running worker. Create it inside the running loop. Raises OSError if it can't be started.

    module: of the worker's code, WORKER_MODULE but in tests. memory_bytes, image_cpu_seconds: see WorkerArgs.
    """

    def __init__(self, spec: VisionSpec, *, module: str, memory_bytes: int, image_cpu_seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._on_end: Callable[[], None] = lambda: None
        self._large_input = False
        with contextlib.ExitStack() as undo:
            self._data_fd = os.memfd_create("prefill-decode", os.MFD_CLOEXEC)
            undo.callback(os.close, self._data_fd)
            self._control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self._control.close)
            self._control.setblocking(False)
            args = WorkerArgs(
                control_fd=child_end.fileno(),
                data_fd=self._data_fd,
                spec=spec,
                memory_bytes=memory_bytes,
                image_cpu_seconds=image_cpu_seconds,
            )
            with child_end:
                self._process = _spawn(module, args)
            undo.callback(self._process.kill)
            self._pid_fd = os.pidfd_open(self._process.pid)
            undo.pop_all()
        self._loop.add_reader(self._pid_fd, self._note_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def on_end(self, notify: Callable[[], None]) -> None:
        """Calls `notify` in the loop when it ends."""
        self._on_end = notify

    async def ready(self) -> WorkerReady:
        """Its first message. Raises WorkerLost."""
        message = await self._receive()
        if not isinstance(message, WorkerReady):
            raise self._nonsense()
        return message

    async def decode(self, data: bytes, job: DecodeJob) -> CanvasReady | JobRejected:
        """Has one image decoded; the canvas is then in its file. Cancelled, it leaves the worker at work: end it.

        Raises:
            WorkerLost: it ended.
        """
        await self._write_input(data)
        try:
            await self._loop.sock_sendall(self._control, encode(job))
        except OSError:
            raise await self._lost() from None
        message = await self._receive()
        if isinstance(message, WorkerReady):
            raise self._nonsense()
        return message

    async def read_canvas(self, into: memoryview, *, is_wanted: Callable[[], bool]) -> bool:
        """Copies the canvas, until `is_wanted` says no; nothing is written after that. True: all of `into` is written.

        Raises:
            WorkerLost: its file is shorter.
        """
        at = 0
        while at < len(into):
            if not is_wanted():
                return False
            count = os.preadv(self._data_fd, [into[at : at + _PIECE_BYTES]], CANVAS_OFFSET + at)
            if not count:
                raise self._nonsense()
            at += count
            await asyncio.sleep(0)
        return is_wanted()

    def kill(self) -> None:
        """Nothing happens if it has ended."""
        if not self._ended.is_set():
            self._process.kill()

    async def end(self) -> None:
        """Ends it whatever it does, and frees its memory."""
        self.kill()
        await self._ended.wait()
        self._control.close()
        os.close(self._data_fd)

    async def wait(self) -> int:
        """Its exit code, as soon as it ends."""
        await self._ended.wait()
        return int(self._process.returncode)

    async def _write_input(self, data: bytes) -> None:
        if self._large_input:
            os.ftruncate(self._data_fd, 0)
        self._large_input = len(data) > _KEPT_INPUT_BYTES
        rest, at = memoryview(data), 0
        while rest:
            at += os.pwrite(self._data_fd, rest[:_PIECE_BYTES], at)
            rest = memoryview(data)[at:]
            if rest:
                await asyncio.sleep(0)

    async def _receive(self) -> WorkerMessage:
        try:
            packet = await self._loop.sock_recv(self._control, MAX_MESSAGE_BYTES)
        except OSError:
            packet = b""
        if not packet:
            raise await self._lost()
        try:
            message: WorkerMessage = decode_worker_message(packet)
        except msgspec.MsgspecError:
            raise self._nonsense() from None
        return message

    async def _lost(self) -> WorkerLost:
        """Its socket is closed, so it ends now; one that only closed its socket is ended."""
        try:
            exit_code = await asyncio.wait_for(self.wait(), _END_SECONDS)
        except TimeoutError:
            return self._nonsense()
        return WorkerLost(f"decode worker {self.pid} ended with code {exit_code}", exit_code=exit_code)

    def _nonsense(self) -> WorkerLost:
        self.kill()
        return WorkerLost(f"decode worker {self.pid} broke the protocol and was ended", exit_code=None)

    def _note_end(self) -> None:
        self._loop.remove_reader(self._pid_fd)
        os.close(self._pid_fd)
        self._process.wait()
        self._ended.set()
        self._on_end()


def _spawn(module: str, args: WorkerArgs) -> "subprocess.Popen[bytes]":
    """A session of its own: Ctrl-C is for the RPC process. The environment is ours alone: no secrets, one math thread."""
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        "LC_ALL": "C.UTF-8",
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, encode(args).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(args.control_fd, args.data_fd),
        env=environment,
        start_new_session=True,
    )
