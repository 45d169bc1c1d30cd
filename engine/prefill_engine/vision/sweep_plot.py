"""The sweep as a picture: time over patches with its fitted line, and patches per second over batch size. Needs matplotlib.

Called by cli/ve_sweep.py with --plot. The trap: matplotlib is in the extra `plots` only, so it is imported when asked for, and
looked for before anything is measured.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prefill_engine.vision.sweep_points import SweepFit, SweepPoint
from prefill_plan.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = (("#1f4e79", "o"), ("#b5532a", "x"))


def check_plot(path: Path) -> None:
    """Raises ConfigError: no matplotlib, or no place to write to."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'prefill[plots]', or leave --plot out; nothing "
            "was measured"
        )
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: expected a name that ends in .png; nothing was measured")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no directory {path.parent}; nothing was measured")


def draw_sweep(path: Path, points: Sequence[SweepPoint], fits: Sequence[SweepFit], *, title: str) -> None:
    """Writes the PNG. points: those of every fit's way.

    Raises:
        OSError: it can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    times, rates = figure.subplots(1, 2)
    figure.suptitle(title)
    for fit, (colour, marker) in zip(fits, _STYLES, strict=False):
        ours = [point for point in points if point.way == fit.way]
        _draw_times(times, ours, fit, colour)
        _draw_rates(rates, ours, marker)
    times.set(xlabel="patches at once", ylabel="ms: median, least to most", xlim=(0, None), ylim=(0, None))
    rates.set(xlabel="images at once", ylabel="patches per second", ylim=(0, None))
    for axes in (times, rates):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110, format="png")


def _draw_times(axes: "Axes", points: Sequence[SweepPoint], fit: SweepFit, colour: str) -> None:
    patches = [point.case.total_patches for point in points]
    medians = [point.median_ms for point in points]
    below = [point.median_ms - min(point.ms) for point in points]
    above = [max(point.ms) - point.median_ms for point in points]
    axes.errorbar(patches, medians, yerr=(below, above), fmt="o", markersize=4, capsize=2, color=colour, label=fit.way)
    ends = [0, max(patches)]
    label = f"{fit.a_ms:.2f} ms + {fit.b_ms * 1e3:.3g} us per patch"
    axes.plot(ends, [fit.a_ms + fit.b_ms * end for end in ends], color=colour, linewidth=1, label=label)


def _draw_rates(axes: "Axes", points: Sequence[SweepPoint], marker: str) -> None:
    """One line per size; its colour is the size's in every way."""
    axes.set_xticks(sorted({point.case.images for point in points}))
    for index, patches in enumerate(sorted({point.case.patches for point in points})):
        ours = sorted((p for p in points if p.case.patches == patches), key=lambda point: point.case.images)
        axes.plot(
            [point.case.images for point in ours],
            [point.patches_per_second for point in ours],
            marker=marker,
            markersize=4,
            linewidth=1,
            color=f"C{index % 10}",
            label=f"{ours[0].case.width}x{ours[0].case.height}, {ours[0].way}",
        )
