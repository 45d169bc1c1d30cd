"""What a client saw of one attempt, as plain records, and the text timeline made of them.

`client.py` fills the records; `trace.py`, `prefill-engine request` and the demo read them. Pure: no clock, no terminal.
The trap: two clocks. The engine's times count from its acceptance of the attempt, ours from sending; `clock_offset`
joins them. Records carry no token ids but the first token, and no ticket id: they may be printed and written to files.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

import msgspec

from prefill_engine.timeline_bars import PLAIN_STYLE, Span, Style, chart_lines, column_seconds, format_bytes, format_ms

PHASE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "ADMISSION": "admission",
        "QUEUE": "queue",
        "IMAGES": "images",
        "VE_DECODE": "ve decode",
        "VE_QUEUE": "ve queue",
        "VE_ENCODE": "ve encode",
        "VE_ROWS": "ve rows",
        "SWAP_IN": "swap-in",
        "SWAP_IN_GROUP": "group",
        "COMPUTE": "compute",
        "STORE": "store",
        "HANDOFF": "hand-off",
        "PROBE": "probe",
    }
)
"""pe.v1.Phase (without its prefix) -> row of the timeline, in the order of the rows. VE_*, SWAP_IN_GROUP and PROBE are the
client's own."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """Base of the event bodies; durations are seconds, amounts are rows, tokens or bytes as named."""


class Accepted(Event, frozen=True, kw_only=True):
    dp_rank: int
    effective_hit: int
    replay_rows: int
    """A plan; Usage says what was done (C45)."""
    compute_rows: int
    predicted_wait_seconds: float
    predicted_finish_seconds: float
    deduplicated: bool


class Queued(Event, frozen=True, kw_only=True):
    ahead_requests: int
    ahead_rows: int
    waiting_for: str


class ImageReady(Event, frozen=True, kw_only=True):
    index: int
    ready: bool
    rows: int
    took_seconds: float


class SwapIn(Event, frozen=True, kw_only=True):
    layers_ready: int
    layers_total: int
    num_bytes: int
    hit_shrunk_to: int


class ChunkDone(Event, frozen=True, kw_only=True):
    rows_done: int
    rows_total: int
    chunk_rows: int
    step_seconds: float
    step_id: int


class FirstToken(Event, frozen=True, kw_only=True):
    token: int
    logprob: float


class TicketOffered(Event, frozen=True, kw_only=True):
    """The ticket without its secret. components: (pe.v1.ComponentKind without prefix, bytes)."""

    kv_tokens: int
    lease_seconds: float
    components: tuple[tuple[str, int], ...]


class StoreState(Event, frozen=True, kw_only=True):
    blocks_committed: int
    blocks_total: int
    blocks_failed: int
    snapshots: tuple[int, ...]


class HandoffState(Event, frozen=True, kw_only=True):
    """state: OFFERED, CLAIMED, MOVING, DELIVERED, ABORTED or EXPIRED; "" where no hand-off was asked for."""

    state: str
    bytes_done: int
    bytes_total: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    replayed_tokens: int
    image_tokens: int
    kv_bytes_moved: int
    already_cached_tokens: int = 0


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A phase as the engine timed it; start counts from acceptance. phase: pe.v1.Phase without its prefix."""

    phase: str
    start_seconds: float
    length_seconds: float
    note: str


class Completed(Event, frozen=True, kw_only=True):
    usage: Usage
    stages: tuple[Stage, ...]
    handoff: HandoffState | None
    store: StoreState | None


EventBody = (
    Accepted
    | Queued
    | ImageReady
    | SwapIn
    | ChunkDone
    | FirstToken
    | TicketOffered
    | StoreState
    | HandoffState
    | Completed
)


class RecordedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """since_accept_seconds: engine's clock, from acceptance. received_seconds: our clock, from sending the request."""

    seq: int
    since_accept_seconds: float
    received_seconds: float
    body: EventBody


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as its client saw it.

    sent_at_seconds: monotonic clock of the client process, one zero for all its records.
    own_stages: what the client did itself (the probe) or was told elsewhere (VE_*, SWAP_IN_GROUP), start counted from sending.
    error: "" = the stream ended well.
    """

    label: str
    request_id: str
    prompt_tokens: int
    sent_at_seconds: float
    events: tuple[RecordedEvent, ...]
    own_stages: tuple[Stage, ...] = ()
    error: str = ""


def clock_offset(record: AttemptRecord) -> float:
    """Seconds from sending to acceptance, by our clock: the smallest delay of any event (0 without events)."""
    return max(0.0, min((e.received_seconds - e.since_accept_seconds for e in record.events), default=0.0))


def build_spans(record: AttemptRecord) -> tuple[Span, ...]:
    """Rows of the timeline, by PHASE_NAMES: the engine's own stages, or what the events of a failed attempt tell."""
    offset = clock_offset(record)
    completed = last_event(record, Completed)
    stages = completed.stages if completed is not None and completed.stages else _stages_from_events(record)
    shifted = [(s.phase, offset + s.start_seconds, s.length_seconds, s.note) for s in stages]
    shifted += [(s.phase, s.start_seconds, s.length_seconds, s.note) for s in record.own_stages]
    spans = [
        Span(name=PHASE_NAMES[phase], start=start, end=start + length, note=_note(record, phase, length) or note)
        for phase, start, length, note in shifted
        if phase in PHASE_NAMES
    ]
    order = list(PHASE_NAMES.values())
    return tuple(sorted(spans, key=lambda span: (order.index(span.name), span.start)))


def window_source(record: AttemptRecord) -> str:
    """Where the window KV before the first computed row came from: "none" (no hit, or not computed), "held" (a snapshot on the
    engine's node), "pulled" (one that was still on its way from a peer when the attempt was accepted), or "replay".

    Accepted tells the plan, which counts on no snapshot that is not there yet; Usage tells what was done (C45).
    """
    accepted, completed = last_event(record, Accepted), last_event(record, Completed)
    if accepted is None or completed is None or not completed.usage.cached_tokens:
        return "none"
    if completed.usage.replayed_tokens:
        return "replay"
    return "pulled" if accepted.replay_rows else "held"


def render_timeline(record: AttemptRecord, *, width: int = 40, style: Style = PLAIN_STYLE) -> str:
    """The attempt as text: headline, one bar per phase over `width` columns, then what was hit, computed and stored.

    Layer groups of a hit have bars of their own; where they all come within a few columns of a slow step, on a scale of theirs.

    The probe is left out: it takes longer than what it probes and would squeeze the picture.

    Raises:
        ValueError: width < 10.
    """
    if width < 10:
        raise ValueError(f"width {width} < 10 columns")
    drawn = tuple(stage for stage in record.own_stages if stage.phase not in _NOT_IN_CHART)
    spans = build_spans(msgspec.structs.replace(record, own_stages=drawn))
    lines = [f"{style.strong}{record.label}{style.reset}: {_headline(record)}"]
    if spans:
        groups = group_spans(record)
        are_wide = len(groups) > 1 and min(s.end - s.start for s in groups) >= column_seconds(spans, width=width)
        parts = {PHASE_NAMES["SWAP_IN"]: groups if are_wide else (), PHASE_NAMES["COMPUTE"]: chunk_spans(record)}
        with_parts = [each for span in spans for each in (span, *parts.get(span.name, ()))]
        lines += chart_lines(with_parts, width=width, style=style)
        origin, zoomed = (0.0, []) if are_wide else _zoom(groups, spans)
        if zoomed:
            title = f"the swap-in by layer groups, on a scale of its own that begins {format_ms(origin)} after sending"
            lines.append(f"  {style.quiet}{title}{style.reset}")
            lines += chart_lines(zoomed, width=width, style=style)
    lines += [f"  {style.quiet}{name:<10}{style.reset} {text}" for name, text in _summary(record)]
    if record.error:
        lines.append(f"  {style.bad}failed{style.reset}     {record.error}")
    return "\n".join(line.rstrip() for line in lines)


BodyT = TypeVar("BodyT", bound=Event)
_NOT_IN_CHART = ("PROBE", "SWAP_IN_GROUP")
_ZOOM_SHARE = 0.25
_ZOOM_MARGIN = 1.15
_MOST_CHUNKS = 4


def last_event(record: AttemptRecord, kind: type[BodyT]) -> BodyT | None:
    """The newest event of one kind, None if there was none."""
    return next((event.body for event in reversed(record.events) if isinstance(event.body, kind)), None)


def _chunks(record: AttemptRecord) -> list[RecordedEvent]:
    return [event for event in record.events if isinstance(event.body, ChunkDone)]


def _stages_from_events(record: AttemptRecord) -> tuple[Stage, ...]:
    """A coarse picture for attempts that failed before the engine could send its own stages."""
    if not record.events:
        return ()
    end = record.events[-1].since_accept_seconds
    chunks = _chunks(record)
    if not chunks:
        return (Stage(phase="QUEUE", start_seconds=0.0, length_seconds=end, note=""),)
    first = chunks[0]
    assert isinstance(first.body, ChunkDone)
    start = max(0.0, first.since_accept_seconds - first.body.step_seconds)
    length = chunks[-1].since_accept_seconds - start
    return (
        Stage(phase="QUEUE", start_seconds=0.0, length_seconds=start, note=""),
        Stage(phase="COMPUTE", start_seconds=start, length_seconds=length, note=""),
    )


def group_spans(record: AttemptRecord) -> tuple[Span, ...]:
    """When the layer groups of the hit came; each begins where the one before it ends, those that came together are one.

    From own stages where there are any, else from events: each carries the time at which its group came.
    """
    completed = last_event(record, Completed)
    stages = completed.stages if completed is not None else ()
    stage = next((stage for stage in stages if stage.phase == "SWAP_IN"), None)
    if stage is None:
        return ()
    offset = clock_offset(record)
    own = [each for each in record.own_stages if each.phase == "SWAP_IN_GROUP"]
    came = [(index + 1, len(own), each.start_seconds + each.length_seconds) for index, each in enumerate(own)]
    if not came:
        bodies = ((event, event.body) for event in record.events)
        came = [
            (body.layers_ready, body.layers_total, offset + event.since_accept_seconds)
            for event, body in bodies
            if isinstance(body, SwapIn)
        ]
    start, first = offset + stage.start_seconds, 1
    spans = []
    for index, (ready, total, at) in enumerate(came):
        is_with_next = index + 1 < len(came) and came[index + 1][2] <= at
        if ready < first or is_with_next:
            continue
        end = max(start, at)
        name = f"group {first}/{total}" if ready == first else f"group {first}-{ready}"
        spans.append(Span(name=name, start=start, end=end, note=f"{start * 1e3:,.1f} to {end * 1e3:,.1f} ms"))
        start, first = end, ready + 1
    return tuple(spans)


def chunk_spans(record: AttemptRecord) -> tuple[Span, ...]:
    """The steps of an attempt that took a few; () = one, or too many to draw."""
    chunks = _chunks(record)
    if not 1 < len(chunks) <= _MOST_CHUNKS:
        return ()
    offset = clock_offset(record)
    images = [event.since_accept_seconds for event in record.events if isinstance(event.body, ImageReady)]
    spans = []
    for index, event in enumerate(chunks):
        assert isinstance(event.body, ChunkDone)
        start = event.since_accept_seconds - event.body.step_seconds
        note = f"{event.body.chunk_rows:,} rows" + (", images still coming" if start < max(images, default=0.0) else "")
        name = f"chunk {index + 1}/{len(chunks)}"
        spans.append(Span(name=name, start=offset + start, end=offset + event.since_accept_seconds, note=note))
    return tuple(spans)


def _zoom(groups: tuple[Span, ...], spans: tuple[Span, ...]) -> tuple[float, list[Span]]:
    """Where the swap-in begins, its groups counted from there, and the computation beside them; no spans if the chart shows them
    well enough."""
    compute = next((span for span in spans if span.name == PHASE_NAMES["COMPUTE"]), None)
    if not groups or compute is None or groups[-1].end - groups[0].start > _ZOOM_SHARE * max(s.end for s in spans):
        return 0.0, []
    origin = groups[0].start
    end = origin + (max(groups[-1].end, compute.start) - origin) * _ZOOM_MARGIN
    note = f"from {compute.start * 1e3:,.1f} ms on; only this much of it is drawn"
    shown = [*groups, Span(name=compute.name, start=compute.start, end=end, note=note)]
    return origin, [replace(span, start=span.start - origin, end=span.end - origin) for span in shown]


def _note(record: AttemptRecord, phase: str, seconds: float) -> str:
    """What happened in a phase, from the events; "" = nothing to add to the engine's own note."""
    if phase == "IMAGES" and (images := [e.body for e in record.events if isinstance(e.body, ImageReady)]):
        rows = sum(image.rows for image in images)
        slowest = max(image.took_seconds for image in images)
        count = "1 image" if len(images) == 1 else f"{len(images)} images, slowest {format_ms(slowest)}"
        return f"{rows:,} rows of {count} from the vision encoder"
    if phase == "SWAP_IN" and (swap := last_event(record, SwapIn)) is not None:
        rate = f", {format_bytes(swap.num_bytes / seconds)}/s" if seconds > 0 else ""
        shrunk = f", hit shrunk to {swap.hit_shrunk_to:,}" if swap.hit_shrunk_to > 0 else ""
        return f"{format_bytes(swap.num_bytes)} of hit blocks{rate}{shrunk}"
    if phase == "COMPUTE" and (chunk := last_event(record, ChunkDone)) is not None:
        num_chunks = len(_chunks(record))
        return f"{chunk.rows_done:,} rows in {num_chunks} {'chunk' if num_chunks == 1 else 'chunks'}"
    if phase == "STORE" and (store := last_event(record, StoreState)) is not None:
        return f"{store.blocks_committed}/{store.blocks_total} blocks"
    if phase == "HANDOFF" and (handoff := last_event(record, HandoffState)) is not None:
        return f"{format_bytes(handoff.bytes_done)}, {handoff.state}"
    return ""


def _headline(record: AttemptRecord) -> str:
    accepted = last_event(record, Accepted)
    if accepted is None:
        return f"prompt {record.prompt_tokens:,} tokens, not accepted"
    hit = accepted.effective_hit
    new = record.prompt_tokens - hit
    return f"rank {accepted.dp_rank}, prompt {record.prompt_tokens:,} tokens = {hit:,} hit + {new:,} new"


def _summary(record: AttemptRecord) -> list[tuple[str, str]]:
    rows = []
    completed = last_event(record, Completed)
    if completed is not None:
        usage = completed.usage
        replayed = f", {usage.replayed_tokens:,} replayed to rebuild window KV" if usage.replayed_tokens else ""
        cached = f"{usage.cached_tokens:,} from the cache"
        rows.append(("tokens", f"{usage.prompt_tokens:,} = {cached} + {usage.computed_tokens:,} computed{replayed}"))
        if usage.image_tokens and not any(isinstance(e.body, ImageReady) for e in record.events):
            rows.append(("images", f"{usage.image_tokens:,} tokens, all in the cache; no vision encoder was asked"))
    store = completed.store if completed is not None and completed.store is not None else last_event(record, StoreState)
    if store is not None:
        rows.append(("blocks", _store_text(store)))
    token = _first(record, FirstToken)
    if token is not None:
        rows.append(("TTFT", f"{format_ms(token.received_seconds)} from sending to the first token"))
    return rows


def _store_text(store: StoreState) -> str:
    failed = f", {store.blocks_failed} FAILED" if store.blocks_failed else ""
    positions = " and ".join(f"{position:,}" for position in store.snapshots)
    plural = "s" if len(store.snapshots) > 1 else ""
    snapshots = f"window snapshot{plural} at {positions}" if positions else "no window snapshot"
    return f"{store.blocks_committed} of {store.blocks_total} new blocks stored{failed}, {snapshots}"


def _first(record: AttemptRecord, kind: type[Event]) -> RecordedEvent | None:
    return next((event for event in record.events if isinstance(event.body, kind)), None)
