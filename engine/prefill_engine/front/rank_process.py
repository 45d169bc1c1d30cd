"""Starts rank processes and waits for their end. One process per rank; they end when their pipe to this one closes (C46).

The rank's code is named by `module:function` and imported in the child only: the front never loads torch.
"""

import asyncio
import importlib
import multiprocessing
import signal
from multiprocessing.connection import Connection

import msgspec

from prefill_engine.messages import RankArgs

RANK_ENTRY = "prefill_engine.rank.process:rank_main"
_JOIN_SECONDS = 5.0


class RankProcess:
    """One running rank. Start it inside the running loop."""

    def __init__(self, args: RankArgs, *, entry: str) -> None:
        context = multiprocessing.get_context("spawn")
        # Our end stays open as long as we live; the child sees end-of-file when we are gone, however we went.
        child_end, self._pipe = context.Pipe(duplex=False)
        self.rank = args.dp_rank
        self._process = context.Process(
            target=run_rank,
            args=(entry, msgspec.json.encode(args), child_end),
            name=f"prefill-rank-{args.dp_rank}",
        )
        self._process.start()
        child_end.close()
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._process.sentinel, self._note_end)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative = killed by that signal."""
        return self._process.exitcode

    async def wait(self) -> int:
        """Its exit code, as soon as it ends."""
        await self._ended.wait()
        code = self._process.exitcode
        assert code is not None
        return code

    async def end(self, *, seconds: float) -> int:
        """Waits for a rank that was told to stop, and kills it after `seconds`; 0 then, else its own exit code."""
        killed = False
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            killed = True
            self._process.kill()
            await self._ended.wait()
        code = self._process.exitcode
        assert code is not None
        self._pipe.close()
        self._process.close()
        return 0 if killed else code

    def kill(self) -> None:
        """Last resort of a front that ends in disorder; nothing happens if the rank has ended."""
        if not self._ended.is_set():
            self._process.kill()

    def _note_end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._process.join(_JOIN_SECONDS)
        self._ended.set()


def run_rank(entry: str, args_json: bytes, parent_pipe: Connection) -> None:
    """Child side. A terminal's Ctrl-C reaches the whole process group: the front alone decides when ranks stop."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    module, _, name = entry.partition(":")
    main = getattr(importlib.import_module(module), name)
    main(args_json, parent_pipe)
