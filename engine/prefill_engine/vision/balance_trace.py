"""Traces of images for `ve-balance`: recorded ones, and made ones with bursts of screenshots. Pure.

The trap: time in a trace is when an image is handed to a balancer, so a trace recorded behind a full queue hides its bursts.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from prefill_plan.errors import ConfigError

SCREENSHOT_PATCHES = (1521, 1610, 4070, 4784, 5390, 7980, 8418, 8580)
"""Patches of vision.md 9's sizes: 544x544 and below, 640x480, 1024x768, 1280x720, 1366x768, 1080x2400, 1920x1080, A4 page."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One image. time: seconds from any start. Other fields of a line are ignored, so log lines may be replayed as they are."""

    time: float
    patches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a trace is made from. patches_per_second: mean. burst: images that arrive at once, each drawn from the mix."""

    images: int
    burst: int
    patches_per_second: float
    mix: tuple[int, ...] = SCREENSHOT_PATCHES


def make_trace(traffic: Traffic, *, seed: int) -> tuple[Arrival, ...]:
    """Bursts at exponential gaps; the same seed gives the same trace."""
    random_numbers = random.Random(seed)
    mean_gap = traffic.burst * sum(traffic.mix) / len(traffic.mix) / traffic.patches_per_second
    trace: list[Arrival] = []
    now = 0.0
    while len(trace) < traffic.images:
        now += random_numbers.expovariate(1 / mean_gap)
        count = min(traffic.burst, traffic.images - len(trace))
        trace += [Arrival(time=now, patches=random_numbers.choice(traffic.mix)) for _ in range(count)]
    return tuple(trace)


def read_trace(lines: Iterable[str | bytes], *, name: str, max_patches: int) -> tuple[Arrival, ...]:
    """JSON lines of time and patches, sorted by time; empty lines are ignored.

    Args:
        max_patches: of one image, i.e. of a batch.

    Raises:
        ConfigError: a line that is none, with its number; no line at all.
    """
    trace: list[Arrival] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            arrival = msgspec.json.decode(line, type=Arrival)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name} line {number}: {error}; nothing was replayed") from None
        if not 1 <= arrival.patches <= max_patches:
            text = f"{arrival.patches} patches, expected 1 to {max_patches}, which is a batch"
            raise ConfigError(f"{name} line {number}: {text}; nothing was replayed")
        trace.append(arrival)
    if not trace:
        raise ConfigError(f"{name} has no images; expected lines such as {_EXAMPLE}")
    return tuple(sorted(trace, key=lambda arrival: arrival.time))


_EXAMPLE = '{"time": 12.5, "patches": 8418}'
