"""What the demo knows of a turn, and the table of all of them. Pure; for demo.py and `prefill-engine demo`."""

from collections.abc import Mapping, Sequence

import msgspec

from prefill_engine.probe_report import ProbeReport
from prefill_engine.timeline import (
    AttemptRecord,
    Completed,
    FirstToken,
    ImageReady,
    Stage,
    SwapIn,
    clock_offset,
    last_event,
)
from prefill_engine.timeline_bars import format_bytes, format_ms

WINDOW_WORDS: Mapping[str, str] = {
    "none": "-",
    "held": "own kvd",
    "pulled": "PULLED from peer",
    "replay": "lost, REPLAYED",
}
"""timeline.window_source -> what the table says."""
_FAILURES = {"failed": "the peer's kvd is gone", "late": "the peer's kvd did not answer in time"}
_SWAP_IN = 'kv_swapin_bytes_total{src="%s"}'
_FAILURE = 'kv_swa_pull_fail_total{reason="'
_ENDED_IMAGES = "ve_images_total{"
_STAGE = 've_stage_seconds_sum{stage="%s"}'
_GROUP_READY = 'pe_kv_group_ready_seconds_%s{group="%d"}'
_STALL = "kv_swapin_stall_seconds_total"
_BATCH_STAGES = ("h2d", "vit", "align", "deliver")


class KvdFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's kvd counted during a turn. *_bytes: made ready for the rank, from its pool, the store, the peer.
    pull_seconds: of a snapshot that arrived. pull_failures: reasons of those that did not."""

    pool_bytes: int
    store_bytes: int
    peer_bytes: int
    pull_seconds: float
    pull_failures: tuple[str, ...]


class EncoderFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the vision encoder counted during a turn. num_images: ended calls for an image, whatever their end, cached ones too.
    decode_seconds: CPU time of its decode worker. queue_seconds: before and after decoding. encode_seconds: of the batch.
    total_seconds: from a call's arrival to its answer. streamed_bytes: of rows that went through gRPC."""

    num_images: int
    num_patches: int
    decode_seconds: float
    queue_seconds: float
    encode_seconds: float
    total_seconds: float
    streamed_bytes: int


class SwapFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine counted during a turn. ready_seconds: from the start of the swap-in until each layer group of the hit was in
    the KV cache; () = no hit was swapped in whole. stall_seconds: of steps at the gates of layers whose group was not there."""

    ready_seconds: tuple[float, ...]
    stall_seconds: float


class TurnReport(msgspec.Struct, frozen=True, kw_only=True):
    """One turn, done and checked. window_from: as timeline.window_source. stored_bytes: that the decode side read from the store.
    handed_sha256: of Block KV and windows as decode has them. is_repeated: the prompt of the turn
    before. problems: empty = it took the expected path and the probe agreed."""

    record: AttemptRecord
    node: str
    window_from: str
    kvd: KvdFigures
    swap: SwapFigures
    encoder: EncoderFigures
    image_tokens: int
    is_repeated: bool
    handoff_mode: str
    handoff_transport: str
    handoff_bytes: int
    stored_bytes: int
    handed_sha256: str
    probe: ProbeReport
    probe_seconds: float
    problems: tuple[str, ...]


def read_figures(before: Mapping[str, float], after: Mapping[str, float]) -> KvdFigures:
    """The difference of two readings of kvd's metrics."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    failed = [name for name in after if name.startswith(_FAILURE) and grown(name) > 0]
    return KvdFigures(
        pool_bytes=int(grown(_SWAP_IN % "shm")),
        store_bytes=int(grown(_SWAP_IN % "fs")),
        peer_bytes=int(grown(_SWAP_IN % "peer")),
        pull_seconds=grown("kv_swa_pull_seconds_sum"),
        pull_failures=tuple(name.removeprefix(_FAILURE).removesuffix('"}') for name in failed),
    )


def read_encoder_figures(before: Mapping[str, float], after: Mapping[str, float]) -> EncoderFigures:
    """The difference of two readings of the vision encoder's metrics."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    return EncoderFigures(
        num_images=round(sum(grown(name) for name in after if name.startswith(_ENDED_IMAGES))),
        num_patches=round(grown("ve_patches_total")),
        decode_seconds=grown(_STAGE % "decode"),
        queue_seconds=grown(_STAGE % "queue"),
        encode_seconds=sum(grown(_STAGE % stage) for stage in _BATCH_STAGES),
        total_seconds=grown("ve_image_seconds_sum"),
        streamed_bytes=round(grown("ve_sent_bytes_total")),
    )


def read_swap_figures(before: Mapping[str, float], after: Mapping[str, float]) -> SwapFigures:
    """The difference of two readings of an engine's metrics, with at most one swap-in between them."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    seconds: list[float] = []
    while grown(_GROUP_READY % ("count", len(seconds))) > 0:
        seconds.append(grown(_GROUP_READY % ("sum", len(seconds))))
    stalls = [grown(name) for name in after if name.startswith(_STALL)]
    return SwapFigures(ready_seconds=tuple(seconds), stall_seconds=sum(stalls))


def num_swapped_groups(record: AttemptRecord) -> int:
    """Layer groups that an engine's figures must tell of, once they are up to date."""
    swap = last_event(record, SwapIn)
    return swap.layers_total if swap is not None and swap.layers_ready == swap.layers_total else 0


def group_stages(record: AttemptRecord, figures: SwapFigures) -> tuple[Stage, ...]:
    """The layer groups of a hit, for its timeline."""
    completed = last_event(record, Completed)
    stages = completed.stages if completed is not None else ()
    whole = next((stage for stage in stages if stage.phase == "SWAP_IN"), None)
    if whole is None:
        return ()
    start = clock_offset(record) + whole.start_seconds
    begins = (0.0, *figures.ready_seconds[:-1])
    return tuple(
        Stage(phase="SWAP_IN_GROUP", start_seconds=start + begin, length_seconds=end - begin, note=f"group {index + 1}")
        for index, (begin, end) in enumerate(zip(begins, figures.ready_seconds, strict=False))
    )


def encoder_stages(record: AttemptRecord, figures: EncoderFigures) -> tuple[Stage, ...]:
    """The encoder's work on the one image of an attempt, for its timeline; () = it was not asked, or for several.

    Lengths are the encoder's own, the end of all is the engine's event; where each begins is worked out from these, for an
    encoder that had nothing else to do.
    """
    ready = [event for event in record.events if isinstance(event.body, ImageReady)]
    if len(ready) != 1 or figures.num_images != 1:
        return ()
    image = ready[0].body
    assert isinstance(image, ImageReady)
    end = clock_offset(record) + ready[0].since_accept_seconds
    start = end - image.took_seconds
    answered = min(end, start + figures.total_seconds)
    how = "through gRPC" if figures.streamed_bytes else "from its shared memory"
    rows = (
        ("VE_DECODE", start, figures.decode_seconds, "CPU time of a confined worker"),
        ("VE_QUEUE", start + figures.decode_seconds, figures.queue_seconds, "waiting there"),
        ("VE_ENCODE", answered - figures.encode_seconds, figures.encode_seconds, f"{figures.num_patches:,} patches"),
        ("VE_ROWS", answered, end - answered, f"to the engine, {how}, checked"),
    )
    return tuple(
        Stage(phase=phase, start_seconds=at, length_seconds=length, note=note) for phase, at, length, note in rows
    )


def summary_lines(turns: Sequence[TurnReport]) -> list[str]:
    """A header and one line per turn, at most 118 columns wide."""
    rows: list[tuple[str, ...]] = [
        (
            "turn",
            "node",
            "prompt",
            "hit",
            "computed",
            "replayed",
            "VE",
            "window KV",
            "hand-off",
            "TTFT",
            "total",
            "probe",
        )
    ]
    rows += [_summary_row(index + 1, turn) for index, turn in enumerate(turns)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    is_text = [column in (1, 7, 8, 11) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(row, widths, is_text, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _summary_row(number: int, turn: TurnReport) -> tuple[str, ...]:
    record = turn.record
    completed = last_event(record, Completed)
    assert completed is not None, "only turns that ended are reported"
    usage = completed.usage
    token = next((event for event in record.events if isinstance(event.body, FirstToken)), None)
    return (
        str(number),
        turn.node,
        f"{usage.prompt_tokens:,}",
        f"{usage.cached_tokens:,}",
        f"{usage.computed_tokens:,}",
        f"{usage.replayed_tokens:,}",
        f"{turn.encoder.num_images}",
        WINDOW_WORDS[turn.window_from],
        f"{turn.handoff_mode}/{turn.handoff_transport}",
        format_ms(token.received_seconds) if token is not None else "-",
        format_ms(record.events[-1].received_seconds),
        "WRONG" if turn.probe.problems else "right" if not turn.problems else "right, PATH NOT",
    )


def window_line(turn: TurnReport) -> str:
    """Where the window KV of the hit came from, as a sentence; "" = there was no hit."""
    kvd = turn.kvd
    if turn.window_from == "pulled":
        size, took = format_bytes(kvd.peer_bytes), format_ms(kvd.pull_seconds)
        return f"snapshot PULLED from the peer's kvd over TCP: {size} in {took}, as kvd counted; no replay"
    if turn.window_from == "replay":
        why = " and ".join(_FAILURES.get(reason, reason) for reason in kvd.pull_failures) or "no kvd has it"
        return f"snapshot LOST: {why}; the last rows before the hit were replayed"
    return "snapshot HELD by this node's kvd; no replay" if turn.window_from == "held" else ""


def blocks_line(turn: TurnReport) -> str:
    """Where kvd had the hit blocks that the rank did not have itself; "" = it was asked for none."""
    kvd = turn.kvd
    if not kvd.pool_bytes and not kvd.store_bytes:
        return ""
    stall = f"steps stood still for {format_ms(turn.swap.stall_seconds)} at layer gates"
    return (
        f"{format_bytes(kvd.pool_bytes)} were in this node's kvd, {format_bytes(kvd.store_bytes)} it read from the store; "
        f"{stall}"
    )


def encoder_line(turn: TurnReport) -> str:
    """What the vision encoder says of the turn's image; "" = the prompt has none."""
    if not turn.image_tokens:
        return ""
    figures = turn.encoder
    if not figures.num_images:
        return "NOT CALLED, by its own counters: 0 images and 0 patches since the turn before"
    times = (figures.decode_seconds, figures.queue_seconds, figures.encode_seconds)
    decode, queue, encode = (format_ms(seconds) for seconds in times)
    times_called = "once" if figures.num_images == 1 else f"{figures.num_images} times"
    return (
        f"called {times_called}, by its own counters: "
        f"{figures.num_patches:,} patches; decode {decode}, queue {queue}, encode {encode}"
    )


def repeat_line(turn: TurnReport) -> str:
    """For a turn that repeats the one before and gave no other answer; "" otherwise."""
    if not turn.is_repeated or turn.problems:
        return ""
    return "equal to the turn before: the same first token and log-probability, the same KV for decode byte for byte"


def handoff_lines(turn: TurnReport) -> list[str]:
    """How the KV reached the decode side."""
    how = {
        "pull": "pulled, lease held; checksums right",
        "push": "pushed into a decode peer's memory, accepted; checksums right",
        "store-only": "the last, partial block and the windows pulled, lease held; checksums right",
    }[turn.handoff_mode]
    lines = [f"{format_bytes(turn.handoff_bytes)} by {turn.handoff_transport}: {how}"]
    if turn.stored_bytes:
        lines.append(f"{format_bytes(turn.stored_bytes)} of whole blocks read by key from the block store")
    return lines
