"""The demo: one conversation over two nodes on loopback, each hand-off checked by a decode probe.

Called by `prefill-engine demo` and by its end-to-end test. Turns (demo_turns.py): cold; one turn longer; after the engine was
killed; on the other node and with a screenshot, whose rows a vision encoder makes while blocks come from the store and the
window snapshot from the first node's kvd; that turn once more, the image inside the hit; and back, after the other node's kvd
was killed, so that the window is replayed. The trap: a demo that only prints looks right when nothing is; every turn is held
against what prefill_plan computes, against the encoder's own counters and against the probe's reference.
"""

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from prefill_engine.batch import SpanEmbeddings
from prefill_engine.client import PrefillClient, PrefillOptions
from prefill_engine.decode_probe import DecodeProbe, join_components, load_probe
from prefill_engine.demo_nodes import Cluster, Node
from prefill_engine.demo_prompt import Conversation, Prompt, add_message, build_conversation
from prefill_engine.demo_report import (
    EncoderFigures,
    KvdFigures,
    SwapFigures,
    TurnReport,
    encoder_stages,
    group_stages,
    num_swapped_groups,
    read_encoder_figures,
    read_figures,
    read_swap_figures,
)
from prefill_engine.demo_turns import TURNS, Expected, Known, Turn, answer_problems, path_problems
from prefill_engine.model.checkpoint_texts import check_texts, read_preset
from prefill_engine.model.checkpoint_writer import checkpoint_bytes, write_checkpoint
from prefill_engine.takeover import Outcome
from prefill_engine.takeover_way import TakeOverWay, send_and_take_over
from prefill_engine.timeline import AttemptRecord, Stage, window_source
from prefill_engine.vision.embed_images import embed_images
from prefill_plan.config import RecordFormat, ReplayConfig
from prefill_plan.errors import PeerError, PrefillError
from prefill_plan.model_spec import ModelSpec

_REQUEST_SECONDS = 120.0
_FIGURES_SECONDS = 30.0
_POLL_SECONDS = 0.05
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
    """The model and the prompt, before any process runs. num_bytes: of all tensors. screenshot_rows: what an encoder must make of
    the screenshot, computed here; its start means nothing."""

    model: Path
    spec: ModelSpec
    num_bytes: int
    write_seconds: float
    conversation: Conversation
    keep_tokens: int
    probe: DecodeProbe
    screenshot_rows: SpanEmbeddings


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
    conversation = build_conversation(tokenizer, num_tokens=options.num_tokens, image_token_id=spec.image_token_id)
    (screenshot_rows,) = embed_images(model, [(0, conversation.screenshot)])
    return Prepared(
        model=model,
        spec=spec,
        num_bytes=checkpoint_bytes(spec),
        write_seconds=write_seconds,
        conversation=conversation,
        keep_tokens=keep_tokens,
        probe=load_probe(
            model,
            record_format=RecordFormat.FP4,
            keep_tokens=keep_tokens,
            window_rows=spec.window_tokens + replay.max_rollback_tokens,
        ),
        screenshot_rows=screenshot_rows,
    )


def _converse(cluster: Cluster, prepared: Prepared, narrator: Narrator) -> tuple[TurnReport, ...]:
    reports: list[TurnReport] = []
    known = Known(keep_tokens=prepared.keep_tokens, window_tokens=prepared.spec.window_tokens)
    messages = iter(prepared.conversation.messages)
    vision_digest = asyncio.run(_vision_digest(cluster.nodes[TURNS[0].node]))
    prompt = Prompt()
    restarted = time.monotonic()
    for index, turn in enumerate(TURNS):
        node = cluster.nodes[turn.node]
        if turn.restarts:
            cluster.wait_for_engine(node)
            seconds = time.monotonic() - restarted
            narrator.happened("restart", *_restart_lines(node, seconds))
        if turn.kills_kvd:
            cluster.nodes[turn.kills_kvd].kvd.kill()
            known.living.discard(turn.kills_kvd)
            narrator.happened("kill -9", f"kvd of node {turn.kills_kvd}: what was in its memory only is gone")
        if not turn.is_repeated:
            prompt = prompt.with_answer(reports[-1].probe.first_token) if reports else prompt
            prompt = add_message(
                prompt,
                next(messages),
                screenshot=prepared.conversation.screenshot,
                spec=prepared.spec,
                vision_digest=vision_digest,
            )
        expected = known.expect(turn, prompt)
        sent = _send_turn(cluster, prepared, turn, prompt)
        if index + 1 < len(TURNS) and TURNS[index + 1].restarts:
            # It loads while the probe computes.
            restarted = time.monotonic()
            cluster.nodes[TURNS[index + 1].node].engine.kill()
            cluster.nodes[TURNS[index + 1].node].engine.launch()
        report = _check_turn(turn, sent, prompt, prepared, expected)
        if turn.is_repeated:
            different = answer_problems(report, reports[-1])
            report = msgspec.structs.replace(report, problems=(*report.problems, *different))
        narrator.turn_done(report)
        reports.append(report)
        known.note(turn, prompt, expected)
    return tuple(reports)


def _restart_lines(node: Node, seconds: float) -> tuple[str, str]:
    return (
        f"engine of node {node.name}: killed (-9) and started again, pid {node.engine.pid}  ({seconds:.1f} s)",
        "its KV cache is gone; blocks and window snapshots are in its kvd, which ran on",
    )


async def _vision_digest(node: Node) -> bytes:
    async with PrefillClient(node.engine.endpoint) as client:
        return (await client.server_info()).vision_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    record: AttemptRecord
    outcome: Outcome
    kvd: KvdFigures
    swap: SwapFigures
    encoder: EncoderFigures


def _send_turn(cluster: Cluster, prepared: Prepared, turn: Turn, prompt: Prompt) -> _Sent:
    node, encoder = cluster.nodes[turn.node], cluster.encoder
    before = (node.kvd.figures(), node.engine.figures(), encoder.figures())
    record, outcome = asyncio.run(_send(turn, node, prompt, model=prepared.model, store=cluster.store))
    swap = _wait_for_groups(node, before[1], num_swapped_groups(record))
    images = read_encoder_figures(before[2], encoder.figures())
    stages = (*group_stages(record, swap), *encoder_stages(record, images))
    return _Sent(
        record=msgspec.structs.replace(record, own_stages=stages),
        outcome=outcome,
        kvd=read_figures(before[0], node.kvd.figures()),
        swap=swap,
        encoder=images,
    )


def _wait_for_groups(node: Node, before: Mapping[str, float], num_groups: int) -> SwapFigures:
    """The engine's figures as soon as they tell of so many layer groups: its rank reports a few times a second."""
    deadline = time.monotonic() + _FIGURES_SECONDS
    while True:
        swap = read_swap_figures(before, node.engine.figures())
        if len(swap.ready_seconds) >= num_groups:
            return swap
        if time.monotonic() > deadline:
            raise PeerError(
                f"the engine of node {node.name} tells of {len(swap.ready_seconds)} layer groups {_FIGURES_SECONDS:.0f} s "
                f"after a swap-in of {num_groups}; the turn is not shown"
            )
        time.sleep(_POLL_SECONDS)


async def _send(turn: Turn, node: Node, prompt: Prompt, *, model: Path, store: Path) -> tuple[AttemptRecord, Outcome]:
    endpoint = node.engine.endpoint
    async with PrefillClient(endpoint) as client:
        info = await client.server_info()
        # Pixels go along always: whether they are needed is the engine's to find out.
        options = PrefillOptions(store="required", mode=turn.mode, images=prompt.images)
        attempt = client.prefill(prompt.tokens, options, timeout_seconds=_REQUEST_SECONDS)
        way = TakeOverWay(mode=turn.mode, transport="tcp", model=model, store=store, kv_format=info.format)
        outcome = await send_and_take_over(attempt, way, endpoint=endpoint)
    return attempt.record(turn.label), outcome


def _check_turn(turn: Turn, sent: _Sent, prompt: Prompt, prepared: Prepared, expected: Expected) -> TurnReport:
    record, outcome, probe = sent.record, sent.outcome, prepared.probe
    assert outcome.taken_over is not None, "every turn asks for a ticket"
    usage = outcome.completed.usage
    start = time.monotonic()
    handed = join_components(outcome.taken_over.components, probe.state)
    verdict = probe.verify(
        handed,
        prompt.tokens,
        replayed_hit=usage.cached_tokens if usage.replayed_tokens else None,
        images=tuple(replace(prepared.screenshot_rows, start=image.start) for image in prompt.images),
    )
    probe_seconds = time.monotonic() - start
    stage = Stage(
        phase="PROBE", start_seconds=start - record.sent_at_seconds, length_seconds=probe_seconds, note="decode probe"
    )
    return TurnReport(
        record=msgspec.structs.replace(record, own_stages=(*record.own_stages, stage)),
        node=turn.node,
        window_from=window_source(record),
        kvd=sent.kvd,
        swap=sent.swap,
        encoder=sent.encoder,
        image_tokens=sum(image.tokens for image in prompt.images),
        is_repeated=turn.is_repeated,
        handoff_mode=turn.mode,
        handoff_transport=outcome.taken_over.transport,
        handoff_bytes=outcome.taken_over.num_bytes,
        stored_bytes=outcome.taken_over.stored_bytes,
        handed_sha256=hashlib.sha256(handed.blocks + handed.state).hexdigest(),
        probe=verdict,
        probe_seconds=probe_seconds,
        problems=(*path_problems(record, expected, sent.encoder), *verdict.problems),
    )
