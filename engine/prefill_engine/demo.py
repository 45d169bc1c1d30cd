"""The demo: one conversation of three turns against an engine in a process of its own, each hand-off checked by a probe.

Called by `prefill-engine demo` and by its end-to-end test. Turn 1 is cold; turn 2 is one turn longer and finds the prefix
and its window snapshot; then the engine is killed, and turn 3 finds the prefix in the file store only, so its windows are
rebuilt by encoder replay. The trap: a demo that only prints looks right when nothing is; every turn is held against the
positions that prefill_plan computes and against the probe's reference.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from prefill_engine.client import PrefillClient, PrefillOptions
from prefill_engine.decode_probe import DecodeProbe, join_components, load_probe
from prefill_engine.demo_prompt import Conversation, build_conversation
from prefill_engine.local_engine import LocalEngine
from prefill_engine.model.checkpoint_texts import check_texts, read_preset
from prefill_engine.model.checkpoint_writer import checkpoint_bytes, write_checkpoint
from prefill_engine.probe_report import ProbeReport
from prefill_engine.takeover import Outcome
from prefill_engine.takeover_way import TakeOverWay, send_and_take_over
from prefill_engine.timeline import AttemptRecord, Stage
from prefill_plan.config import RecordFormat, ReplayConfig
from prefill_plan.errors import PeerError, PrefillError
from prefill_plan.model_spec import ModelSpec
from prefill_plan.positions import PrefillPositions, plan_positions

_START_SECONDS = 120.0
_STOP_SECONDS = 30.0
_REQUEST_SECONDS = 120.0
_SHARD_BYTES = 1 << 30
_POOL_TOKENS = 16_384
_STATE_SLOTS = 4
_TINY_KEEP_TOKENS = 24
"""Keep tokens for a window of 16: 140 would keep most of a short prompt and hide the decoder floor (C4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """work_dir: an empty directory. preset: of make-checkpoint. num_tokens: of the three user messages together."""

    work_dir: Path
    preset: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The model and the prompt, before any engine runs. num_bytes: of all tensors."""

    model: Path
    spec: ModelSpec
    num_bytes: int
    write_seconds: float
    conversation: Conversation
    keep_tokens: int
    probe: DecodeProbe


class TurnReport(msgspec.Struct, frozen=True, kw_only=True):
    """One turn, done and checked. problems: empty = it took the expected path and the probe agreed."""

    record: AttemptRecord
    handoff_mode: str
    handoff_transport: str
    handoff_bytes: int
    probe: ProbeReport
    probe_seconds: float
    problems: tuple[str, ...]


class Narrator:
    """What the demo tells while it runs; this one tells nothing."""

    def prepared(self, prepared: Prepared) -> None:
        """Checkpoint written, prompt tokenised."""

    def engine_ready(self, engine: LocalEngine, *, seconds: float, is_restart: bool) -> None:
        """The engine takes requests."""

    def turn_done(self, turn: TurnReport) -> None:
        """A turn is done and checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """restarts_engine: it is killed before the turn, and with it its window snapshots (R4). mode: how its KV is handed over."""

    label: str
    restarts_engine: bool
    mode: str


_TURNS = (
    _Turn(label="turn 1, cold", restarts_engine=False, mode="pull"),
    _Turn(label="turn 2, one turn longer", restarts_engine=False, mode="push"),
    _Turn(label="turn 3, after the engine was killed", restarts_engine=True, mode="pull"),
)


def run_demo(options: DemoOptions, narrator: Narrator) -> tuple[TurnReport, ...]:
    """Runs the three turns; every process it started has ended when it returns or raises.

    Raises:
        ConfigError: no text to send.
        PeerError: the engine could not be started or stopped, or a request failed; the message ends with its log.
    """
    prepared = prepare(options)
    narrator.prepared(prepared)
    overrides = (
        f"replay.keep_tokens={prepared.keep_tokens}",
        f"kv.pool_tokens={_POOL_TOKENS}",
        f"kv.state_slots={_STATE_SLOTS}",
    )
    store = options.work_dir / "store"
    with LocalEngine(prepared.model, run_dir=options.work_dir, store=store, overrides=overrides) as engine:
        _start(engine, narrator, is_restart=False)
        try:
            turns = _converse(engine, prepared, narrator)
        except PrefillError as error:
            raise PeerError(f"{error}\n{engine.log_tail()}") from error
        exit_code = engine.stop(timeout_seconds=_STOP_SECONDS)
        if exit_code != 0:
            raise PeerError(
                f"the engine ended with exit code {exit_code} after SIGTERM, expected 0\n{engine.log_tail()}"
            )
    return turns


def prepare(options: DemoOptions) -> Prepared:
    """Writes the checkpoint, tokenises the conversation, loads the probe's model. Raises ConfigError: no text."""
    start = time.monotonic()
    texts = read_preset(options.preset)
    spec = check_texts(texts, source=f"preset {options.preset}")
    model = options.work_dir / "checkpoint"
    model.mkdir(parents=True)
    write_checkpoint(model, spec, texts, seed=0, shard_bytes=_SHARD_BYTES)
    write_seconds = time.monotonic() - start
    replay = ReplayConfig()
    released_window = replay.keep_tokens >= spec.window_tokens + replay.max_rollback_tokens > _TINY_KEEP_TOKENS
    keep_tokens = replay.keep_tokens if released_window else _TINY_KEEP_TOKENS
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return Prepared(
        model=model,
        spec=spec,
        num_bytes=checkpoint_bytes(spec),
        write_seconds=write_seconds,
        conversation=build_conversation(tokenizer, num_tokens=options.num_tokens),
        keep_tokens=keep_tokens,
        probe=load_probe(
            model,
            record_format=RecordFormat.FP4,
            keep_tokens=keep_tokens,
            window_rows=spec.window_tokens + replay.max_rollback_tokens,
        ),
    )


def _start(engine: LocalEngine, narrator: Narrator, *, is_restart: bool) -> None:
    start = time.monotonic()
    engine.start(timeout_seconds=_START_SECONDS)
    narrator.engine_ready(engine, seconds=time.monotonic() - start, is_restart=is_restart)


def _converse(engine: LocalEngine, prepared: Prepared, narrator: Narrator) -> tuple[TurnReport, ...]:
    reports: list[TurnReport] = []
    tokens: list[int] = []
    known_tokens = 0
    snapshots: frozenset[int] = frozenset()
    for turn, message in zip(_TURNS, prepared.conversation.messages, strict=True):
        if turn.restarts_engine:
            engine.kill()
            _start(engine, narrator, is_restart=True)
            snapshots = frozenset()
        tokens = [*tokens, *message]
        expected = plan_positions(
            len(tokens),
            offered_hit=known_tokens,
            keep_tokens=prepared.keep_tokens,
            window_tokens=prepared.spec.window_tokens,
            snapshot_held=snapshots.__contains__,
        )
        report = _run_turn(turn, engine.endpoint, tokens, prepared.probe, expected)
        narrator.turn_done(report)
        reports.append(report)
        known_tokens = len(tokens)
        snapshots |= frozenset(expected.snapshots)
        tokens = [*tokens, report.probe.first_token]
    return tuple(reports)


def _run_turn(
    turn: _Turn, endpoint: str, tokens: list[int], probe: DecodeProbe, expected: PrefillPositions
) -> TurnReport:
    record, outcome = asyncio.run(_send(turn, endpoint, tokens))
    assert outcome.taken_over is not None, "every turn asks for a ticket"
    usage = outcome.completed.usage
    start = time.monotonic()
    handed = join_components(outcome.taken_over.components, probe.state)
    verdict = probe.verify(handed, tokens, replayed_hit=usage.cached_tokens if usage.replayed_tokens else None)
    probe_seconds = time.monotonic() - start
    stage = Stage(
        phase="PROBE", start_seconds=start - record.sent_at_seconds, length_seconds=probe_seconds, note="decode probe"
    )
    return TurnReport(
        record=msgspec.structs.replace(record, own_stages=(stage,)),
        handoff_mode=turn.mode,
        handoff_transport=outcome.taken_over.transport,
        handoff_bytes=outcome.taken_over.num_bytes,
        probe=verdict,
        probe_seconds=probe_seconds,
        problems=(*_path_problems(outcome, expected), *verdict.problems),
    )


async def _send(turn: _Turn, endpoint: str, tokens: list[int]) -> tuple[AttemptRecord, Outcome]:
    async with PrefillClient(endpoint) as client:
        info = await client.server_info()
        options = PrefillOptions(store="required", mode=turn.mode)
        attempt = client.prefill(tokens, options, timeout_seconds=_REQUEST_SECONDS)
        way = TakeOverWay(mode=turn.mode, transport="tcp", model=None, store=None, kv_format=info.format)
        outcome = await send_and_take_over(attempt, way, endpoint=endpoint)
    return attempt.record(turn.label), outcome


def _path_problems(outcome: Outcome, expected: PrefillPositions) -> list[str]:
    """What the engine did against what prefill_plan says it must do."""
    usage, store, handoff = outcome.completed.usage, outcome.completed.store, outcome.completed.handoff
    pairs = (
        ("hit", usage.cached_tokens, expected.hit_tokens),
        ("replayed rows", usage.replayed_tokens, expected.replay_tokens),
        ("computed rows", usage.computed_tokens, expected.new_tokens),
        ("stored blocks", store.blocks_committed if store else 0, expected.end_new_block - expected.first_new_block),
        ("window snapshots", store.snapshots if store else (), expected.snapshots),
        ("hand-off", handoff.state if handoff else "", "DELIVERED"),
    )
    return [f"{name}: {found}, expected {wanted}" for name, found, wanted in pairs if found != wanted]
