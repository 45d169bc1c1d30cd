"""Bars over a time axis, as text: what timeline.py draws with. Pure; no records, no clock, no terminal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One row of the timeline, seconds since the request was sent."""

    name: str
    start: float
    end: float
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How text is decorated: escape codes and the character of a bar. PLAIN_STYLE where there is no terminal."""

    strong: str = ""
    quiet: str = ""
    good: str = ""
    bad: str = ""
    reset: str = ""
    bar: str = "#"
    bar_end: str = "|"


PLAIN_STYLE = Style()
TERMINAL_STYLE = Style(
    strong="\x1b[1m", quiet="\x1b[2m", good="\x1b[32m", bad="\x1b[31m", reset="\x1b[0m", bar="█", bar_end="▏"
)


def format_bytes(num_bytes: float) -> str:
    """Decimal units, three digits: 155 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{num_bytes:.0f} B"


def format_ms(seconds: float) -> str:
    """Milliseconds with a unit; one decimal below 10 ms."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:.1f} ms" if milliseconds < 9.95 else f"{milliseconds:,.0f} ms"


def axis_steps(seconds: float) -> tuple[float, int]:
    """Tick distance and number of ticks that cover `seconds`: 1, 2 or 5 times a power of ten, 3 to 5 ticks."""
    seconds = max(seconds, 1e-4)
    magnitude = 10.0 ** math.floor(math.log10(seconds))
    steps = [magnitude * factor for factor in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)]
    step = next(step for step in steps if seconds / step <= 5.0)
    return step, math.ceil(seconds / step - 1e-9)


def axis_line(step: float, num_steps: int, width: int) -> str:
    line = [" "] * (width + 12)
    decimals = 0 if step >= 1e-3 else 1 if step >= 1e-4 else 2
    for tick in range(num_steps + 1):
        text = f"{tick * step * 1e3:,.{decimals}f}" if tick else "0 ms"
        column = round(tick * width / num_steps)
        line[column : column + len(text)] = text
    return "".join(line)


def bar_line(span: Span, seconds_per_column: float, width: int, style: Style) -> str:
    start = min(width, round(span.start / seconds_per_column))
    end = min(width, max(start, round(span.end / seconds_per_column)))
    bar = " " * start + style.bar * (end - start) + style.bar_end
    took = format_ms(span.end - span.start)
    return f"  {span.name:<10} {bar:<{width + 1}} {took:>9}  {style.quiet}{span.note}{style.reset}"


def column_seconds(spans: Sequence[Span], *, width: int) -> float:
    """What one column of their chart stands for."""
    step, num_steps = axis_steps(max(span.end for span in spans))
    return step * num_steps / width


def chart_lines(spans: Sequence[Span], *, width: int, style: Style) -> list[str]:
    """An axis from zero that reaches the last end, and a bar per span."""
    step, num_steps = axis_steps(max(span.end for span in spans))
    seconds_per_column = column_seconds(spans, width=width)
    bars = [bar_line(span, seconds_per_column, width, style) for span in spans]
    return [f"  {'':<10} {axis_line(step, num_steps, width)}", *bars]
