"""The encoder process, seen from the RPC process: started, given batches, heard, ended. No torch.

The child's code is named by `module:function` and imported there only. Messages are small and at most one batch is under way, so
neither side ever waits for the pipe.
"""

import asyncio
import importlib
import logging
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from prefill_engine.messages import RankFailed
from prefill_engine.vision.encoder_messages import (
    EncoderArgs,
    EncoderFailed,
    FromEncoder,
    Stop,
    ToEncoder,
    decode_from_encoder,
    encode,
)

logger = logging.getLogger(__name__)

ENCODER_ENTRY = "prefill_engine.vision.encoder_process:encoder_main"
_JOIN_SECONDS = 5.0


class EncoderLink:
    """The running encoder. Create it inside the running loop; `receive` is called with all its messages but the last words."""

    def __init__(self, args: EncoderArgs, *, entry: str, receive: Callable[[FromEncoder], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe(duplex=True)
        self.last_words: list[RankFailed] = []
        self._receive = receive
        self._process = context.Process(
            target=run_encoder, args=(entry, msgspec.msgpack.encode(args), child_end), name="prefill-encoder"
        )
        self._process.start()
        child_end.close()
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._loop.add_reader(self._pipe.fileno(), self._read)
        self._loop.add_reader(self._process.sentinel, self._note_end)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, message: ToEncoder) -> None:
        """Nothing happens if it has ended; `wait` tells."""
        try:
            self._pipe.send_bytes(encode(message))
        except OSError:
            logger.warning("encoder is gone; a message to it was dropped")

    async def wait(self) -> int:
        """Its exit code, as soon as it ends; negative = killed by that signal."""
        await self._ended.wait()
        code = self._process.exitcode
        assert code is not None
        return code

    async def stop(self, *, seconds: float) -> int:
        """Tells it to stop, kills it after `seconds`; 0 then, else its own exit code."""
        if not self._ended.is_set():
            self.send(Stop())
        try:
            return await asyncio.wait_for(self.wait(), seconds)
        except TimeoutError:
            self._process.kill()
            await self.wait()
            return 0

    def kill(self) -> None:
        """Last resort of an end in disorder."""
        if not self._ended.is_set():
            self._process.kill()

    def _read(self) -> None:
        try:
            while self._pipe.poll():
                message = decode_from_encoder(self._pipe.recv_bytes())
                if isinstance(message, EncoderFailed):
                    self.last_words.append(message.words)
                else:
                    self._receive(message)
        except (EOFError, OSError):
            self._loop.remove_reader(self._pipe.fileno())

    def _note_end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._read()
        self._loop.remove_reader(self._pipe.fileno())
        self._process.join(_JOIN_SECONDS)
        self._ended.set()


def run_encoder(entry: str, args_bytes: bytes, pipe: Connection) -> None:
    """Child side. The RPC process alone decides when the encoder stops, not a terminal's Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    module, _, name = entry.partition(":")
    main = getattr(importlib.import_module(module), name)
    main(args_bytes, pipe)
