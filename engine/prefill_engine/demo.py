"""The demo: one conversation of five turns over two nodes on loopback, each hand-off checked by a decode probe.

Called by `prefill-engine demo` and by its end-to-end test. Turns: cold; one turn longer; after the engine was killed; on the
other node, whose kvd pulls the window snapshot from the first one's; and back, after that node's kvd was killed, so that the
window is replayed. The trap: a demo that only prints looks right when nothing is; every turn is held against the positions that
prefill_plan computes, against where the window must come from, and against the probe's reference.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from prefill_engine.client import PrefillClient, PrefillOptions
from prefill_engine.decode_probe import DecodeProbe, join_components, load_probe
from prefill_engine.demo_nodes import NODE_NAMES, Cluster, Node
from prefill_engine.demo_prompt import NUM_TURNS, Conversation, build_conversation
from prefill_engine.demo_report import KvdFigures, TurnReport, read_figures
from prefill_engine.demo_traffic import busy_with_others
from prefill_engine.model.checkpoint_texts import check_texts, read_preset
from prefill_engine.model.checkpoint_writer import checkpoint_bytes, write_checkpoint
from prefill_engine.takeover import Outcome
from prefill_engine.takeover_way import TakeOverWay, send_and_take_over
from prefill_engine.timeline import AttemptRecord, Stage, window_source
from prefill_plan.config import RecordFormat, ReplayConfig
from prefill_plan.errors import PeerError, PrefillError
from prefill_plan.model_spec import ModelSpec
from prefill_plan.positions import PrefillPositions, plan_positions

_REQUEST_SECONDS = 120.0
_SHARD_BYTES = 1 << 30
_POOL_TOKENS = 16_384
_STATE_SLOTS = 4
_TINY_KEEP_TOKENS = 24
"""Keep tokens for a window of 16: 140 would keep most of a short prompt and hide the decoder floor (C4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """work_dir: an empty directory. preset: of make-checkpoint. num_tokens: of all user messages together."""

    work_dir: Path
    preset: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The model and the prompt, before any process runs. num_bytes: of all tensors."""

    model: Path
    spec: ModelSpec
    num_bytes: int
    write_seconds: float
    conversation: Conversation
    keep_tokens: int
    probe: DecodeProbe


class Narrator:
    """What the demo tells while it runs; this one tells nothing."""

    def prepared(self, prepared: Prepared) -> None:
        """Checkpoint written, prompt tokenised."""

    def started(self, cluster: Cluster, *, seconds: float) -> None:
        """Every process runs, both engines take requests."""

    def happened(self, what: str, *lines: str) -> None:
        """Something was done to the cluster between two turns. what: one word."""

    def turn_done(self, turn: TurnReport) -> None:
        """A turn is done and checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """mode: how its KV is handed over. restarts: its node's engine is killed after the turn before. kills_kvd: of this node,
    before it. is_queued: others' prompts are computed first."""

    label: str
    node: str
    mode: str
    restarts: bool = False
    kills_kvd: str = ""
    is_queued: bool = False


_TURNS = (
    _Turn(label="turn 1, node A, cold", node="A", mode="pull"),
    _Turn(label="turn 2, node A, one turn longer", node="A", mode="push"),
    _Turn(label="turn 3, node A, its engine was killed (-9) and restarted", node="A", mode="pull", restarts=True),
    _Turn(label="turn 4, the conversation moves to node B", node="B", mode="store-only", is_queued=True),
    _Turn(label="turn 5, back to node A, node B's kvd was killed (-9)", node="A", mode="pull", kills_kvd="B"),
)
assert len(_TURNS) == NUM_TURNS


@dataclass(slots=True, kw_only=True)
class _Known:
    """What was left where so far. num_tokens: of the last prompt, whose whole blocks are in the store. snapshots: positions, by
    node. living: nodes whose kvd runs."""

    num_tokens: int = 0
    snapshots: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in NODE_NAMES})
    living: set[str] = field(default_factory=lambda: set(NODE_NAMES))

    def source(self, position: int, node: str) -> str:
        """Where a turn on that node must have its window from: window_source's words."""
        if position == 0:
            return "none"
        if position in self.snapshots[node]:
            return "held"
        others = self.living - {node}
        return "pulled" if any(position in self.snapshots[other] for other in others) else "replay"


def run_demo(options: DemoOptions, narrator: Narrator) -> tuple[TurnReport, ...]:
    """Runs the turns; every process it started has ended when it returns or raises, and the shared memory is free.

    Raises:
        ConfigError: no text to send, or no /dev/shm.
        PeerError: a process could not be started or stopped, or a request failed; the message ends with their logs.
    """
    prepared = prepare(options)
    narrator.prepared(prepared)
    overrides = (
        f"replay.keep_tokens={prepared.keep_tokens}",
        f"kv.pool_tokens={_POOL_TOKENS}",
        f"kv.state_slots={_STATE_SLOTS}",
    )
    with Cluster(prepared.model, work_dir=options.work_dir, overrides=overrides) as cluster:
        start = time.monotonic()
        cluster.start()
        narrator.started(cluster, seconds=time.monotonic() - start)
        try:
            turns = _converse(cluster, prepared, narrator)
        except PrefillError as error:
            raise PeerError(f"{error}\n{cluster.log_tails()}") from error
        cluster.stop()
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


def _converse(cluster: Cluster, prepared: Prepared, narrator: Narrator) -> tuple[TurnReport, ...]:
    reports: list[TurnReport] = []
    known = _Known()
    tokens: list[int] = []
    restarted = time.monotonic()
    for index, (turn, message) in enumerate(zip(_TURNS, prepared.conversation.messages, strict=True)):
        node = cluster.nodes[turn.node]
        if turn.restarts:
            cluster.wait_for_engine(node)
            seconds = time.monotonic() - restarted
            narrator.happened("restart", *_restart_lines(node, seconds))
        if turn.kills_kvd:
            cluster.nodes[turn.kills_kvd].kvd.kill()
            known.living.discard(turn.kills_kvd)
            narrator.happened("kill -9", f"kvd of node {turn.kills_kvd}: what was in its memory only is gone")
        if turn.is_queued:
            narrator.happened(
                "others", f"node {turn.node} computes two other prompts first: the pull runs while this turn waits"
            )
        tokens = [*tokens, *message]
        expected = _expect(known, turn.node, len(tokens), prepared)
        sent = _send_turn(cluster, prepared, turn, tokens)
        if index + 1 < len(_TURNS) and _TURNS[index + 1].restarts:
            # It loads while the probe computes.
            restarted = time.monotonic()
            cluster.nodes[_TURNS[index + 1].node].engine.kill()
            cluster.nodes[_TURNS[index + 1].node].engine.launch()
        source = known.source(expected.hit_tokens, turn.node)
        report = _check_turn(turn, sent, tokens, prepared.probe, expected, source)
        narrator.turn_done(report)
        reports.append(report)
        known.num_tokens = len(tokens)
        known.snapshots[turn.node] |= {*expected.snapshots, *([expected.hit_tokens] if source == "pulled" else [])}
        tokens = [*tokens, report.probe.first_token]
    return tuple(reports)


def _restart_lines(node: Node, seconds: float) -> tuple[str, str]:
    return (
        f"engine of node {node.name}: killed (-9) and started again, pid {node.engine.pid}  ({seconds:.1f} s)",
        "its KV cache is gone; blocks and window snapshots are in its kvd, which ran on",
    )


def _expect(known: _Known, node: str, num_tokens: int, prepared: Prepared) -> PrefillPositions:
    return plan_positions(
        num_tokens,
        offered_hit=known.num_tokens,
        keep_tokens=prepared.keep_tokens,
        window_tokens=prepared.spec.window_tokens,
        snapshot_held=lambda position: known.source(position, node) in ("held", "pulled"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    record: AttemptRecord
    outcome: Outcome
    figures: KvdFigures


def _send_turn(cluster: Cluster, prepared: Prepared, turn: _Turn, tokens: list[int]) -> _Sent:
    node = cluster.nodes[turn.node]
    before = node.kvd.figures()
    record, outcome = asyncio.run(_send(turn, node, tokens, model=prepared.model, store=cluster.store))
    return _Sent(record=record, outcome=outcome, figures=read_figures(before, node.kvd.figures()))


async def _send(
    turn: _Turn, node: Node, tokens: Sequence[int], *, model: Path, store: Path
) -> tuple[AttemptRecord, Outcome]:
    endpoint = node.engine.endpoint
    async with PrefillClient(endpoint) as client:
        info = await client.server_info()
        options = PrefillOptions(store="required", mode=turn.mode)
        attempt = client.prefill(tokens, options, timeout_seconds=_REQUEST_SECONDS)
        way = TakeOverWay(mode=turn.mode, transport="tcp", model=model, store=store, kv_format=info.format)
        if turn.is_queued:
            async with busy_with_others(client, tokens):
                outcome = await send_and_take_over(attempt, way, endpoint=endpoint)
        else:
            outcome = await send_and_take_over(attempt, way, endpoint=endpoint)
    return attempt.record(turn.label), outcome


def _check_turn(
    turn: _Turn, sent: _Sent, tokens: list[int], probe: DecodeProbe, expected: PrefillPositions, source: str
) -> TurnReport:
    record, outcome = sent.record, sent.outcome
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
        node=turn.node,
        window_from=window_source(record),
        kvd=sent.figures,
        handoff_mode=turn.mode,
        handoff_transport=outcome.taken_over.transport,
        handoff_bytes=outcome.taken_over.num_bytes,
        stored_bytes=outcome.taken_over.stored_bytes,
        probe=verdict,
        probe_seconds=probe_seconds,
        problems=(*_path_problems(record, outcome, expected, source), *verdict.problems),
    )


def _path_problems(record: AttemptRecord, outcome: Outcome, expected: PrefillPositions, source: str) -> list[str]:
    """What the engine did against what prefill_plan says it must do."""
    usage, store, handoff = outcome.completed.usage, outcome.completed.store, outcome.completed.handoff
    pairs = (
        ("hit", usage.cached_tokens, expected.hit_tokens),
        ("window KV from", window_source(record), source),
        ("replayed rows", usage.replayed_tokens, expected.replay_tokens),
        ("computed rows", usage.computed_tokens, expected.new_tokens),
        ("stored blocks", store.blocks_committed if store else 0, expected.end_new_block - expected.first_new_block),
        ("window snapshots", store.snapshots if store else (), expected.snapshots),
        ("hand-off", handoff.state if handoff else "", "DELIVERED"),
    )
    return [f"{name}: {found}, expected {wanted}" for name, found, wanted in pairs if found != wanted]
