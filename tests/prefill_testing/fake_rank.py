"""A rank without a model: speaks the lanes of messages.py, plays a scripted attempt per Submit, serves patterned KV bytes.

In a test's own loop (`FakeRank`, with stages that can be held) or as a process (`fake_rank_main`, the `--rank-entry` of serve
tests). It keeps the contract's promises: one Released per Cancel or Release, none of it held by more than its tasks.
"""

import asyncio
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import crc32c
import msgspec
import zmq
import zmq.asyncio

from prefill_engine.front.served_model import EngineIdentity, ServedModel, build_served_model
from prefill_engine.messages import (
    AttemptFailed,
    Beat,
    Cancel,
    ChunkFinished,
    Computed,
    Expose,
    FirstTokenReady,
    FromRank,
    Progress,
    RankArgs,
    RankFailed,
    RankLoad,
    RankReady,
    ReadRange,
    ReadReply,
    Region,
    Release,
    Released,
    Resolved,
    Started,
    StepModelReport,
    StepReport,
    Stop,
    StoreProgress,
    Submit,
    ToRank,
    Waiting,
)
from prefill_plan.config import EngineConfig, VisionMode
from prefill_plan.kv_layout import block_layout
from prefill_plan.model_spec import ModelSpec, load_model_spec

BLOCK_TOKENS = 128
ROWS_PER_CHUNK = 256
FIRST_TOKEN = 7
REGIONS = (
    Region(kind=7, num_bytes=40),
    Region(kind=1, num_bytes=3 * (1 << 20) + 17),
    Region(kind=3, num_bytes=4096),
    Region(kind=4, num_bytes=4096),
    Region(kind=5, num_bytes=512),
)
WEIGHTS_DIGEST = bytes(range(32))
TOKENIZER_DIGEST = bytes(range(32, 64))
VISION_DIGEST = bytes(range(64, 96))


def component_bytes(kind: int) -> bytes:
    """The bytes that every fake attempt hands over for a component; no two kinds are alike."""
    length = next(region.num_bytes for region in REGIONS if region.kind == kind)
    period = bytes((kind * 37 + i) % 251 for i in range(251))
    return (period * (length // 251 + 1))[:length]


def ready_message(
    rank: int, spec: ModelSpec, config: EngineConfig, *, data_port: int = -1, data_transport: str = "tcp"
) -> RankReady:
    """data_port: of a data transport, -1 = the rank has none."""
    return RankReady(
        rank=rank,
        kv_tokens_total=config.kv.pool_tokens,
        state_slots_total=config.kv.state_slots,
        weights_digest=WEIGHTS_DIGEST,
        tokenizer_digest=TOKENIZER_DIGEST,
        layout_digest=block_layout(spec, config.kv.record_format).digest(),
        numerics_class="ref-bf16",
        store_kind=config.store.kind.value,
        data_transport=data_transport if data_port >= 0 else "",
        data_port=data_port,
        vision_digest=VISION_DIGEST if config.vision.mode is not VisionMode.NONE else b"",
    )


def tiny_served_model(config: EngineConfig, *, data_port: int = 7) -> ServedModel:
    """What an engine with one such rank serves."""
    spec = load_model_spec(Path(config.model.path))
    identity = EngineIdentity(engine_id="engine", epoch=1, endpoint="127.0.0.1:1", zone="", build="")
    return build_served_model(
        config, spec, identity=identity, ranks=[ready_message(0, spec, config, data_port=data_port)]
    )


def load_message(
    rank: int, *, running: int = 0, waiting_rows: int = 0, store_ok: bool = True, steps: int = 1
) -> RankLoad:
    return RankLoad(
        rank=rank,
        running=running,
        waiting=0,
        waiting_rows=waiting_rows,
        running_rows_left=0,
        waiting_rows_by_class=(0, waiting_rows, 0),
        kv_tokens_total=1000,
        kv_tokens_free=600,
        kv_tokens_held_by_tickets=200,
        state_slots_free=3,
        step_counter=steps,
        step_model=StepModelReport(
            a_ms=10.0, enc_ms_per_row=0.5, dec_ms_per_row=0.1, ctx_ms_per_mega=1.0, residual_p95_ms=2.0, samples=30
        ),
        step=StepReport(kind="real", seconds=0.03, encoder_rows=100, decoder_rows=10, replay_rows=0),
        store_ok=store_ok,
        store_lag_blocks=0,
        counters={"store_writes": 4},
        at_ns=time.monotonic_ns(),
    )


@dataclass(slots=True, kw_only=True)
class FakeRank:
    """One fake rank in the running loop; use as `async with`. hold: names of stages that wait for `resume(stage)`:
    resolve, queue, start, chunk, token, computed, store. read_delay_seconds: of each data-lane reply."""

    socket_dir: str
    rank: int
    hold: set[str] = field(default_factory=set)
    fail_store: bool = False
    send_started: bool = True
    send_released: bool = True
    read_delay_seconds: float = 0.0
    received: list[ToRank] = field(default_factory=list)
    reads: list[ReadRange] = field(default_factory=list)
    exposed: list[Expose] = field(default_factory=list)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    _gates: dict[str, asyncio.Event] = field(default_factory=dict)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    _plays: dict[bytes, "asyncio.Task[None]"] = field(default_factory=dict)
    _context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)
    _sockets: dict[str, zmq.asyncio.Socket] = field(default_factory=dict)

    async def __aenter__(self) -> "FakeRank":
        kinds = {"submit": zmq.PULL, "control": zmq.PULL, "data": zmq.DEALER, "events": zmq.PUSH}
        for lane, kind in kinds.items():
            socket = self._context.socket(kind)
            socket.set_hwm(0)
            socket.linger = 1000
            socket.connect(f"ipc://{self.socket_dir}/{lane}-{self.rank}")
            self._sockets[lane] = socket
        for lane in ("submit", "control"):
            self._tasks.append(asyncio.create_task(self._listen(lane)))
        self._tasks.append(asyncio.create_task(self._serve_reads()))
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._tasks, *self._plays.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for socket in self._sockets.values():
            socket.close()
        self._context.term()

    async def send(self, message: FromRank) -> None:
        await self._sockets["events"].send(msgspec.msgpack.encode(message))

    def resume(self, stage: str) -> None:
        self.hold.discard(stage)
        self._gates.setdefault(stage, asyncio.Event()).set()

    def messages(self, kind: type) -> list[ToRank]:
        return [message for message in self.received if isinstance(message, kind)]

    async def _pass(self, stage: str) -> int:
        if stage in self.hold:
            await self._gates.setdefault(stage, asyncio.Event()).wait()
        return time.monotonic_ns()

    async def _listen(self, lane: str) -> None:
        decoder = msgspec.msgpack.Decoder(ToRank)
        while True:
            message = decoder.decode(await self._sockets[lane].recv())
            self.received.append(message)
            match message:
                case Submit():
                    self._plays[message.attempt_id] = asyncio.create_task(self._play(message))
                case Cancel() | Release():
                    play = self._plays.pop(message.attempt_id, None)
                    if play is not None and isinstance(message, Cancel):
                        play.cancel()
                    if self.send_released:
                        await self.send(Released(attempt_id=message.attempt_id, at_ns=time.monotonic_ns()))
                case Stop():
                    self.stopped.set()

    async def _serve_reads(self) -> None:
        socket = self._sockets["data"]
        while True:
            request = msgspec.msgpack.decode(await socket.recv(), type=ReadRange | Expose)
            if isinstance(request, Expose):
                self.exposed.append(request)
                await socket.send(
                    msgspec.msgpack.encode(ReadReply(read_id=request.read_id, data=b"", crc32c=0, error=""))
                )
                continue
            self.reads.append(request)
            if self.read_delay_seconds:
                await asyncio.sleep(self.read_delay_seconds)
            data = component_bytes(request.kind)[request.offset : request.offset + request.length]
            reply = ReadReply(read_id=request.read_id, data=data, crc32c=crc32c.crc32c(data), error="")
            await socket.send(msgspec.msgpack.encode(reply))

    async def _play(self, submit: Submit) -> None:
        """One attempt with a hit of whatever was offered, computed in chunks of 256 rows."""
        attempt_id = submit.attempt_id
        total = len(submit.tokens) // 4
        hit = min(submit.offered_hit or 0, (total - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        rows = total - hit
        at = await self._pass("resolve")
        resolved = Resolved(
            attempt_id=attempt_id,
            effective_hit=hit,
            replay_rows=0,
            compute_rows=rows,
            swa_source="local" if hit else "none",
            predicted_wait_seconds=0.1,
            predicted_finish_seconds=0.6,
            at_ns=at,
        )
        await self.send(resolved)
        at = await self._pass("queue")
        await self.send(Waiting(attempt_id=attempt_id, ahead_requests=0, ahead_rows=0, waiting_for="queue", at_ns=at))
        at = await self._pass("start")
        if self.send_started:
            await self.send(Started(attempt_id=attempt_id, at_ns=at))
        await self._compute(attempt_id, rows)
        at = await self._pass("token")
        if submit.sampling.sample:
            token = FIRST_TOKEN if submit.sampling.forced_token < 0 else submit.sampling.forced_token
            await self.send(
                FirstTokenReady(
                    attempt_id=attempt_id,
                    token=token,
                    logprob=-0.5,
                    alt_tokens=(token,),
                    alt_logprobs=(-0.5,),
                    at_ns=at,
                )
            )
        at = await self._pass("computed")
        await self.send(
            Computed(
                attempt_id=attempt_id,
                kv_tokens=total,
                regions=REGIONS if submit.handoff else (),
                cached_tokens=hit,
                computed_tokens=rows,
                replayed_tokens=0,
                image_tokens=0,
                provenance=0,
                at_ns=at,
            )
        )
        at = await self._store(submit, total // BLOCK_TOKENS - hit // BLOCK_TOKENS)
        if not submit.handoff:
            await self.send(Released(attempt_id=attempt_id, at_ns=at))

    async def _compute(self, attempt_id: bytes, rows: int) -> None:
        done = 0
        while done < rows:
            at = await self._pass("chunk")
            chunk = min(ROWS_PER_CHUNK, rows - done)
            done += chunk
            await self.send(
                ChunkFinished(
                    attempt_id=attempt_id,
                    rows_done=done,
                    rows_total=rows,
                    chunk_rows=chunk,
                    step_seconds=0.001,
                    step_id=done,
                    at_ns=at,
                )
            )

    async def _store(self, submit: Submit, blocks: int) -> int:
        """Reports the writes; when that was, in nanoseconds."""
        at = await self._pass("store")
        if submit.store != "skip":
            failed = blocks if self.fail_store else 0
            await self.send(
                StoreProgress(
                    attempt_id=submit.attempt_id,
                    committed=blocks - failed,
                    total=blocks,
                    failed=failed,
                    snapshots=(len(submit.tokens) // 4 // BLOCK_TOKENS * BLOCK_TOKENS,),
                    done=True,
                    at_ns=at,
                )
            )
        return at


def failed_message(attempt_id: bytes, *, reason: str = "KERNEL_FAULT") -> AttemptFailed:
    return AttemptFailed(
        attempt_id=attempt_id,
        reason=reason,
        retry="ONCE_THEN_FAIL",
        phase="COMPUTE",
        public_message="the fake kernel failed",
        operator_detail="test",
        rows_computed=5,
        at_ns=time.monotonic_ns(),
    )


def fake_rank_main(args_json: bytes, parent_pipe: Connection) -> None:
    """Process entry. fault: `exit=CODE[@PHASE]` leaves last words and exits in that phase (default serve); `kill@serve` leaves
    none; `hold=STAGE` holds every attempt at a stage."""
    args = msgspec.json.decode(args_json, type=RankArgs)
    threading.Thread(target=_end_with_parent, args=(parent_pipe,), daemon=True).start()
    asyncio.run(_rank_process(args))


async def _rank_process(args: RankArgs) -> None:
    config = msgspec.json.decode(args.config, type=EngineConfig)
    spec = load_model_spec(Path(config.model.path))
    hold = {args.fault.removeprefix("hold=")} if args.fault.startswith("hold=") else set()
    async with FakeRank(socket_dir=args.socket_dir, rank=args.dp_rank, hold=hold) as fake:
        for phase in ("load", "warmup"):
            await _maybe_fail(fake, args, phase)
            await fake.send(_progress(args.dp_rank, phase))
        await fake.send(ready_message(args.dp_rank, spec, config))
        await _maybe_fail(fake, args, "serve")
        for steps in range(1, 1 << 30):
            await fake.send(
                Beat(rank=args.dp_rank, step_id=steps, layer=0, predicted_layer_ms=1.0, at_ns=time.monotonic_ns())
            )
            await fake.send(load_message(args.dp_rank, steps=steps))
            try:
                await asyncio.wait_for(fake.stopped.wait(), 0.2)
            except TimeoutError:
                continue
            break
        await _maybe_fail(fake, args, "drain")


async def _maybe_fail(fake: FakeRank, args: RankArgs, phase: str) -> None:
    action, _, at = args.fault.partition("@")
    if (at or "serve") != phase:
        return
    if action == "kill":
        os._exit(99)
    if action.startswith("exit="):
        code = int(action.removeprefix("exit="))
        await fake.send(RankFailed(rank=args.dp_rank, exit_code=code, code="Fake", phase=phase, detail="injected"))
        # The words must be out before the process is gone: the socket lingers while the context closes.
        await fake.__aexit__()
        os._exit(code)


def _progress(rank: int, stage: str) -> Progress:
    return Progress(rank=rank, stage=stage, done=1, total=2, unit="bytes", item="shard", at_ns=time.monotonic_ns())


def _end_with_parent(pipe: Connection) -> None:
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(0)


def rows_of(messages: Iterable[ToRank]) -> list[int]:
    """Prompt lengths of the submits among the messages."""
    return [len(message.tokens) // 4 for message in messages if isinstance(message, Submit)]
