"""Other people's prompts, so that a turn of the demo has to wait for the engine. Used by demo.py.

A snapshot that is pulled from a peer is used if it is there when the first rows are computed; on an idle engine it races with the
blocks. Here it can't lose: while the first prompt is computed, ours and a second one arrive; the rank takes both in together,
asks its kvd about ours, and computes the second one while kvd pulls.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from prefill_engine.client import PrefillAttempt, PrefillClient, PrefillOptions
from prefill_engine.timeline import Accepted

_FIRST_TOKENS = 300
_SECOND_TOKENS = 120
"""Shorter than a block and what must be computed after a hit: nothing is looked up, so it can run at once."""


@contextlib.asynccontextmanager
async def busy_with_others(client: PrefillClient, tokens: Sequence[int]) -> AsyncIterator[None]:
    """The block begins while the first prompt is computed and the second one is being sent; at its end both are done.

    Raises:
        CallFailed: one of them failed.
    """
    others = tuple(reversed(tokens))
    options = PrefillOptions(store="skip", handoff=False)
    first = client.prefill(others[:_FIRST_TOKENS], options)
    second = client.prefill(others[_FIRST_TOKENS : _FIRST_TOKENS + _SECOND_TOKENS], options)
    is_accepted = asyncio.Event()
    accepting = asyncio.create_task(is_accepted.wait())
    tasks: list[asyncio.Task[object]] = [asyncio.create_task(_follow(first, is_accepted))]
    try:
        await asyncio.wait([accepting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        tasks.append(asyncio.create_task(second.finish()))
        yield
        await asyncio.gather(*tasks)
    finally:
        for task in (accepting, *tasks):
            task.cancel()
        await asyncio.gather(accepting, *tasks, return_exceptions=True)


async def _follow(attempt: PrefillAttempt, is_accepted: asyncio.Event) -> None:
    async for event in attempt:
        if isinstance(event.body, Accepted):
            is_accepted.set()
