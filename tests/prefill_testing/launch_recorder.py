"""Counts Triton launches without a GPU: the runtime's launch is replaced by a note of what would run.

For processes in which kernels are not interpreted (the interpreter has launches of its own). Outputs stay unset, so only code
that never asks the host for a value can run under it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """kernel: its name; function: itself. arguments: by position. options: constexprs and launch options by name."""

    kernel: str
    function: JITFunction
    arguments: tuple[Any, ...]
    grid: tuple[int, ...]
    options: dict[str, Any]


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Launches of the body, in order."""
    launches: list[Launch] = []

    def note(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert not warmup
        assert not callable(grid), f"{self.__name__}: the grid depends on tuning, so it is no fixed launch"
        launches.append(
            Launch(kernel=self.__name__, function=self, arguments=arguments, grid=tuple(grid), options=options)
        )

    run = JITFunction.run
    JITFunction.run = note
    try:
        yield launches
    finally:
        JITFunction.run = run
