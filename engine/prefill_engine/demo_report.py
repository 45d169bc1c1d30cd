"""What the demo knows of a turn, and the table of all of them. Pure; for demo.py and `prefill-engine demo`."""

from collections.abc import Mapping, Sequence

import msgspec

from prefill_engine.probe_report import ProbeReport
from prefill_engine.timeline import (
    AttemptRecord,
    Completed,
    FirstToken,
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


class KvdFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's kvd counted during a turn. *_bytes: made ready for the rank, from its pool, the store, the peer.
    pull_seconds: of a snapshot that arrived. pull_failures: reasons of those that did not."""

    pool_bytes: int
    store_bytes: int
    peer_bytes: int
    pull_seconds: float
    pull_failures: tuple[str, ...]


class TurnReport(msgspec.Struct, frozen=True, kw_only=True):
    """One turn, done and checked. window_from: as timeline.window_source. stored_bytes: that the decode side read from the store.
    problems: empty = it took the expected path and the probe agreed."""

    record: AttemptRecord
    node: str
    window_from: str
    kvd: KvdFigures
    handoff_mode: str
    handoff_transport: str
    handoff_bytes: int
    stored_bytes: int
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


def summary_lines(turns: Sequence[TurnReport]) -> list[str]:
    """A header and one line per turn, at most 118 columns wide."""
    rows: list[tuple[str, ...]] = [
        ("turn", "node", "prompt", "hit", "computed", "replayed", "window KV", "hand-off", "TTFT", "total", "probe")
    ]
    rows += [_summary_row(index + 1, turn) for index, turn in enumerate(turns)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    is_text = [column in (1, 6, 7, 10) for column in range(len(rows[0]))]
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
    return f"{format_bytes(kvd.pool_bytes)} were in this node's kvd, {format_bytes(kvd.store_bytes)} it read from the store"


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
