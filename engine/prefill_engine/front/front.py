"""Front: the running middle of the engine. It joins ranks (lanes), life cycle, load and health, and ends when a rank does.

The servicers call it; serve.py builds and runs it. All its state is touched by one event loop only, so nothing is locked.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

from prefill_engine.front.exits import Ending, judge_rank_loss
from prefill_engine.front.lanes import RankLanes
from prefill_engine.front.lifecycle import Lifecycle
from prefill_engine.front.load import LoadBoard, LoadView
from prefill_engine.front.rank_process import RankProcess
from prefill_engine.front.served_model import ServedModel
from prefill_engine.front.sink_calls import SinkCaller
from prefill_engine.front.telemetry import Telemetry
from prefill_engine.front.vision_side import VisionSide
from prefill_engine.image_messages import ImageRowsDone, ImagesWanted
from prefill_engine.messages import Beat, FromRank, Progress, RankFailed, RankLoad, RankReady, Released, Stop
from prefill_engine.rpc.status import refuse

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.02
_REFRESH_SECONDS = 0.25
LAST_WORDS_SECONDS = 1.0  # C46: how long reports of other ranks are waited for
STOP_SECONDS = 15.0  # k8s.md 4.7 gives the engine 20 s after the drain


class Front:
    """build_served: makes the served model from the ranks' reports and our endpoint. clock: monotonic seconds.

    vision: None = this engine takes no images. endpoint: host:port that peers reach us by; set before ranks start. ready: all
    ranks are. stopping: a signal asked us to end.
    """

    def __init__(
        self,
        *,
        lanes: Mapping[int, RankLanes],
        lifecycle: Lifecycle,
        board: LoadBoard,
        telemetry: Telemetry,
        build_served: Callable[[Sequence[RankReady], str], ServedModel],
        sink_caller: SinkCaller,
        clock: Callable[[], float],
        vision: VisionSide | None = None,
    ) -> None:
        self.lanes = lanes
        self.lifecycle = lifecycle
        self.board = board
        self.telemetry = telemetry
        self.sink_caller = sink_caller
        self.clock = clock
        self.vision = vision
        self.endpoint = ""
        self.ready = asyncio.Event()
        self.stopping = asyncio.Event()
        self.reports: list[RankFailed] = []
        self._build_served = build_served
        self._served: ServedModel | None = None
        self._phase = "start"
        self._last_progress = clock()

    @property
    def served(self) -> ServedModel:
        """What this engine serves.

        Raises:
            ServingFailure: STARTING, until all ranks are ready.
        """
        if self._served is None:
            refuse("STARTING", "this engine still starts; its ranks are not all ready")
        return self._served

    @property
    def phase(self) -> str:
        """Of the engine's life, for the termination message: start, load, warmup, serve, drain."""
        return "drain" if self.lifecycle.drain.is_draining else self._phase

    @property
    def seconds_without_progress(self) -> float:
        return self.clock() - self._last_progress

    def view(self) -> LoadView:
        """Load and state of this moment."""
        working: dict[int, float] = {}
        for attempt in self.lifecycle.attempts.live():
            since = attempt.working_since
            if since is not None:
                working[attempt.rank] = min(working.get(attempt.rank, since), since)
        tickets: dict[int, int] = {}
        for ticket in self.lifecycle.tickets.open_tickets():
            tickets[ticket.rank] = tickets.get(ticket.rank, 0) + 1
        return self.board.view(
            now=self.clock(),
            draining=self.lifecycle.drain.is_draining,
            working_since=working,
            tickets_open=tickets,
        )

    def receive(self, message: FromRank) -> None:
        """Takes in one message of a rank."""
        match message:
            case Beat():
                self.board.note_beat(message)
            case RankLoad():
                self.board.note_load(message)
                self.telemetry.rank_load(message)
            case Progress():
                self._phase = message.stage if message.stage in ("load", "warmup") else self._phase
                self._last_progress = self.clock()
                self.board.note_progress(message)
                self.telemetry.rank_progress(message)
            case RankReady():
                self._note_ready(message)
            case RankFailed():
                self.reports.append(message)
                logger.error(
                    "rank failed", extra={"dp_rank": message.rank, "exit": message.exit_code, "detail": message.detail}
                )
            case ImagesWanted() | ImageRowsDone():
                if self.vision is not None:
                    self.vision.receive(message)
            case _:
                self.lifecycle.apply(message)
                if isinstance(message, Released) and self.vision is not None:
                    self.vision.released(message.attempt_id)

    async def run(self) -> None:
        """Serves the lanes and the timers; ends only by cancellation or an error."""
        async with asyncio.TaskGroup() as tasks:
            for lanes in self.lanes.values():
                tasks.create_task(self._pump(lanes))
                tasks.create_task(lanes.pump_reads())
            tasks.create_task(self._tick())
            tasks.create_task(self._refresh())

    async def rank_loss(self, processes: Sequence[RankProcess]) -> Ending:
        """Waits until a rank ends; answers its work, hears the last words of all, and says how the engine must end."""
        waits = {asyncio.ensure_future(process.wait()): process for process in processes}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            logger.error("rank lost", extra={"dp_ranks": [waits[wait].rank for wait in done]})
            # Ranks step in lockstep: without one, none of them can finish anything (serving.md fact 7).
            self._lose_all()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_reported(processes), LAST_WORDS_SECONDS)
            codes = [(process.rank, code) for process in processes if (code := process.exit_code) is not None]
            return judge_rank_loss(exit_codes=codes, reports=self.reports, phase=self.phase)
        finally:
            for wait in waits:
                wait.cancel()

    async def stop_ranks(self, processes: Sequence[RankProcess]) -> list[tuple[int, int]]:
        """Tells all ranks to stop and waits for them; who does not is killed. (rank, exit code) of those that failed."""
        for lanes in self.lanes.values():
            lanes.send(Stop())
        seconds = STOP_SECONDS if self.ready.is_set() else 0.0
        codes = await asyncio.gather(*(process.end(seconds=seconds) for process in processes))
        return [(process.rank, code) for process, code in zip(processes, codes, strict=True) if code != 0]

    async def _pump(self, lanes: RankLanes) -> None:
        async for message in lanes.events():
            self.receive(message)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.lifecycle.tick()

    async def _refresh(self) -> None:
        while True:
            rows: dict[tuple[int, int], int] = {(rank, priority): 0 for rank in self.lanes for priority in (1, 2, 3)}
            for attempt in self.lifecycle.attempts.live():
                rows[attempt.rank, attempt.call.priority] += attempt.rows_left
            wait = min(self.board.wait_seconds(rank) for rank in self.lanes)
            grants = self.lifecycle.grants.num_open
            self.telemetry.refresh(self.view(), rows_waiting=rows, wait_seconds=wait, grants_open=grants)
            if self.vision is not None:
                self.telemetry.vision(num_encoders=self.vision.num_encoders, used_bytes=self.vision.used_bytes)
            await asyncio.sleep(_REFRESH_SECONDS)

    async def _all_reported(self, processes: Sequence[RankProcess]) -> None:
        # Every dead rank has spoken: no need to sit out the second. A rank that lives on may still have something to say.
        while not all(
            process.exit_code is not None and any(report.rank == process.rank for report in self.reports)
            for process in processes
        ):
            await asyncio.sleep(TICK_SECONDS)

    def _note_ready(self, message: RankReady) -> None:
        self.board.ready[message.rank] = message
        self.telemetry.rank_ready(message)
        self._last_progress = self.clock()
        if self.board.is_ready:
            ranks = [self.board.ready[rank] for rank in sorted(self.board.ready)]
            self._served = self._build_served(ranks, self.endpoint)
            self._phase = "serve"
            if self.vision is not None:
                self.vision.start(self._served)
            self.telemetry.engine_ready(self._served)
            self.ready.set()

    def _lose_all(self) -> None:
        for rank, lanes in self.lanes.items():
            self.board.lost.add(rank)
            lanes.fail_reads()
            self.lifecycle.lose_rank(rank)
