"""One request to an engine that may be killed under it, and the proof that what it handed over is right.

A request runs in a thread of its own, so that a test can watch its events and hold its hand-off half-read. The trap: bytes of a
replay differ from those of a cold run by design, and blocks that a replay has left are hits later; so a prompt's hit is limited
to the blocks that no replay has touched, and each answer then has exactly one right value (decode_probe.py).
"""

import asyncio
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

from prefill_engine.client import PrefillClient, PrefillOptions, block_keys_of
from prefill_engine.client_ticket import Ticket
from prefill_engine.decode_probe import DecodeProbe, join_components, load_probe
from prefill_engine.handoff_client import HandoffClient
from prefill_engine.timeline import ChunkDone, Completed, RecordedEvent
from prefill_plan.config import RecordFormat
from prefill_plan.errors import CallFailed

PATIENCE_SECONDS = 90.0
KEEP_TOKENS = 24
_WINDOW_ROWS = 16 + 6


class KillRequest(threading.Thread):
    """Sends a prompt and takes its hand-off over. Starts at once."""

    def __init__(
        self, endpoint: str, tokens: Sequence[int], *, hit_blocks: int | None = None, hold_handoff: bool = False
    ) -> None:
        """hit_blocks: largest hit allowed. hold_handoff: stops after the first component until go_on is set."""
        super().__init__(daemon=True)
        self.tokens = list(tokens)
        self.events: list[RecordedEvent] = []
        self.components: dict[int, bytes] | None = None
        self.completed: Completed | None = None
        self.failure: BaseException | None = None
        self.reading, self.go_on = threading.Event(), threading.Event()
        self._endpoint, self._hit_blocks = endpoint, hit_blocks
        if not hold_handoff:
            self.go_on.set()
        self.start()

    @property
    def is_running(self) -> bool:
        """It computes, and is not done."""
        chunks = [event.body for event in self.events if isinstance(event.body, ChunkDone)]
        return bool(chunks) and chunks[-1].rows_done < chunks[-1].rows_total

    @property
    def is_answered(self) -> bool:
        return self.components is not None

    @property
    def is_whole(self) -> bool:
        """Completed, no row replayed."""
        return self.completed is not None and not self.completed.usage.replayed_tokens

    def run(self) -> None:
        try:
            asyncio.run(self._send())
        except Exception as failure:
            self.failure = failure

    def end(self) -> None:
        """Waits for the end; a failure other than the engine's is one of the test."""
        self.go_on.set()
        self.join(PATIENCE_SECONDS)
        assert not self.is_alive(), f"no end within {PATIENCE_SECONDS:g} s; {self.events[-3:]}"
        if self.failure is not None and not isinstance(self.failure, CallFailed):
            raise self.failure

    async def _send(self) -> None:
        async with PrefillClient(self._endpoint) as client:
            keys = None
            if self._hit_blocks is not None:
                info = await client.server_info()
                keys = block_keys_of(info, self.tokens, cache_scope=b"")[: self._hit_blocks]
            attempt = client.prefill(self.tokens, PrefillOptions(hit_keys=keys), timeout_seconds=PATIENCE_SECONDS)
            self.events = attempt.events
            transfer = None
            try:
                async for event in attempt:
                    if attempt.ticket is not None and transfer is None:
                        transfer = asyncio.create_task(self._take(attempt.ticket))
                    if isinstance(event.body, Completed):
                        self.completed = event.body
                if transfer is not None:
                    await transfer
            finally:
                if transfer is not None:
                    transfer.cancel()
                    await asyncio.gather(transfer, return_exceptions=True)

    async def _take(self, ticket: Ticket) -> None:
        async with HandoffClient(self._endpoint, engine_id="probe", epoch=1) as client:
            await client.hello()
            claim = await client.claim(ticket)
            components: dict[int, bytes] = {}
            for kind in claim.ticket.component_bytes:
                components[kind] = await client.read(claim, kind)
                self.reading.set()
                await asyncio.to_thread(self.go_on.wait, PATIENCE_SECONDS)
            if await client.settle(
                claim, delivered=True, num_bytes=sum(map(len, components.values())), took_seconds=0.1
            ):
                self.components = components


class Verifier:
    """Says whether an answer is right."""

    def __init__(self, model: Path) -> None:
        self._probe: DecodeProbe = load_probe(
            model, record_format=RecordFormat.FP4, keep_tokens=KEEP_TOKENS, window_rows=_WINDOW_ROWS
        )

    def check(self, request: KillRequest, *, replayed_hits: Collection[int] = ()) -> bool:
        """Of an answered request whose hit has no block of a replay: every complete block, the windows and the next token's
        logits are those of a run of our own. replayed_hits: where a snapshot may be that of an earlier replay. True = what it
        computed descends from a replay."""
        assert request.failure is None, request.failure
        assert request.components is not None
        assert request.completed is not None
        usage = request.completed.usage
        handed = join_components(request.components, self._probe.state)
        is_replay = usage.replayed_tokens > 0
        hit = usage.cached_tokens if is_replay else None
        report = self._probe.verify(handed, request.tokens, replayed_hit=hit)
        problems = report.problems
        if problems and not is_replay and usage.cached_tokens in replayed_hits:
            report = self._probe.verify(handed, request.tokens, replayed_hit=usage.cached_tokens)
            # Its row says from where its own run has the window; the rest must be the replay's.
            problems = tuple(text for text in report.problems if not text.startswith("request row: window_floor"))
            is_replay = True
        assert problems == (), (problems, usage)
        return is_replay
