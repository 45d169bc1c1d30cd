"""Times calls on the device, cache flushed before each; on the "meta" device of a dry run it only calls."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 512 << 20
"""Several times the L2 of an H200 (50 MiB) or a B200 (126 MiB)."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds over `runs` calls; None of them in a dry run."""

    median: float | None
    low: float | None
    high: float | None
    runs: int


class Stopwatch:
    """One per run; owns the buffer that flushes the L2 cache."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def time(self, call: Callable[[], object], *, runs: int, warm: int = 2) -> Timing:
        """Median, lowest and highest of `runs` calls after `warm` untimed ones."""
        for _ in range(warm):
            call()
        if self._device.type != "cuda":
            return Timing(None, None, None, 0)
        millis = []
        for _ in range(runs):
            self._flush.fill_(1)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            millis.append(begin.elapsed_time(end))
        return Timing(statistics.median(millis), min(millis), max(millis), runs)
