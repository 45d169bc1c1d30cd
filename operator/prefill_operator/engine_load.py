"""What engines and encoders say of their load, read out of their messages, and what a VEPool's status makes of it. Pure.

Used by engine_client.py (reading), engine_watch.py (keeping) and status.py. The trap: every change of a status is a write, and
load never stands still; so a pool's figures keep two digits, and equal figures keep the time at which they were measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from prefill_operator.api_status import LoadStatus
from prefill_operator.engine_wire import LoadState
from prefill_operator.model import LoadProgress, PoolLoad

PROGRESS_STEPS = 20
"""Load progress is told in steps of 5 % (k8s.md 3.3)."""
_DIGITS = 2
_MOST_PATCHES = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchCount:
    """Of one encoder at one moment."""

    epoch: int
    """Changes when the encoder starts anew, and with it the count."""
    queued: int
    encoded: int
    """Since it started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One answer of an engine or encoder."""

    state: LoadState = LoadState.STATE_UNSPECIFIED
    """Of encoders it is not read."""
    backlog_milliseconds: float | None = None
    """Until it is through with what it has, by its own step model; None = it does not tell."""
    progress: LoadProgress | None = None
    """Of its weights; None = not loading, or it cannot tell yet."""
    patches: PatchCount | None = None
    """Of encoders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchRate:
    """Of one encoder between two answers."""

    queued: int
    per_second: float


def read_load_report(report: Any) -> EngineReport:
    """pe.v1.LoadReport. A state that only a newer engine has is none that we know."""
    state = LoadState(report.state) if report.state in tuple(LoadState) else LoadState.STATE_UNSPECIFIED
    progress = None
    if state is LoadState.STARTING and report.weight_bytes_total:
        progress = LoadProgress(loaded_bytes=report.weight_bytes_loaded, total_bytes=report.weight_bytes_total)
    backlog = report.backlog.ToNanoseconds() / 1e6 if report.HasField("backlog") else None
    return EngineReport(state=state, backlog_milliseconds=backlog, progress=progress)


def read_encoder_load(report: Any) -> EngineReport:
    """pe.v1.VisionLoad. The backlog is what PEs balance by: milliseconds of the patches before a new image (serving.md 4.4)."""
    queued = report.patches_queued
    backlog = report.a_ms + report.b_ms_per_patch * queued if queued else 0.0
    patches = PatchCount(epoch=report.epoch, queued=queued, encoded=report.patches_encoded)
    return EngineReport(backlog_milliseconds=backlog, patches=patches)


def patch_rate(before: PatchCount | None, after: PatchCount, *, seconds: float) -> PatchRate | None:
    """None: there is nothing to compare with, or the encoder started anew in between."""
    if before is None or before.epoch != after.epoch or after.encoded < before.encoded or seconds <= 0:
        return None
    return PatchRate(queued=after.queued, per_second=(after.encoded - before.encoded) / seconds)


def pool_load(rates: Sequence[PatchRate]) -> PoolLoad | None:
    """Sums over the encoders of a pool, two digits each; None without encoders that tell."""
    if not rates:
        return None
    queued = [rate.queued for rate in rates]
    return PoolLoad(
        pending_patches=round_digits(sum(queued)),
        patches_per_second=round_digits(sum(rate.per_second for rate in rates)),
        imbalance=imbalance_text(queued),
    )


def imbalance_text(queued: Sequence[int]) -> str:
    """Largest over mean in two digits; "1.0" where nothing waits. queued: of one encoder or more."""
    total = sum(queued)
    return f"{max(queued) * len(queued) / total if total else 1.0:.{_DIGITS - 1}f}"


def round_digits(value: float) -> int:
    """To two digits: 12,345 -> 12,000; 7.4 -> 7. At most 10**15: what a broken encoder tells must still fit the CRD."""
    return min(int(float(f"{value:.{_DIGITS}g}")), _MOST_PATCHES)


def load_status(previous: LoadStatus | None, found: PoolLoad | None, *, now: str) -> LoadStatus | None:
    """The one before where nothing new is known, its time included where nothing changed. now: RFC 3339."""
    if found is None:
        return previous
    new = LoadStatus(
        pending_patches=found.pending_patches,
        patches_per_second=found.patches_per_second,
        imbalance=found.imbalance,
        observed_at=now,
    )
    if previous is not None and msgspec.structs.replace(new, observed_at=previous.observed_at) == previous:
        return previous
    return new


def progress_step(progress: LoadProgress | None) -> int | None:
    """0 to 20; None while nothing is known."""
    if progress is None or progress.total_bytes <= 0:
        return None
    return min(progress.total_bytes, progress.loaded_bytes) * PROGRESS_STEPS // progress.total_bytes
