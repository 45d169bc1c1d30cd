"""Figures that have a goal: a bench takes all of them first, and fails in the end, naming every goal that was missed."""

from collections.abc import Callable, Sequence


class Goals:
    """Of one case. figure: puts a line into the report."""

    def __init__(self, figure: Callable[[str], None]) -> None:
        self._figure = figure
        self._missed: list[str] = []

    def note(self, text: str) -> None:
        """A figure without a goal."""
        self._figure(text)

    def less(self, what: str, value: float, goal: float, unit: str) -> None:
        """value is to be less than goal."""
        is_missed = not value < goal
        text = f"{what} {value:.1f} {unit} (goal {goal:g}{', missed' if is_missed else ''})"
        self._figure(text)
        if is_missed:
            self._missed.append(text)

    def none(self, what: str, found: Sequence[object]) -> None:
        """There is to be none of these."""
        self._figure(f"{len(found)} {what}")
        if found:
            self._missed.append(f"{len(found)} {what}: {list(found[:3])}")

    def check(self) -> None:
        """Raises AssertionError if a goal was missed."""
        assert not self._missed, f"missed: {'; '.join(self._missed)}"
