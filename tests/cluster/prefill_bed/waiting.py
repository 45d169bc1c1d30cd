"""Waiting on states, never on time: a check is a function of plain asserts, tried until it holds or its deadline passes."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class NotYetError(AssertionError):
    """The awaited state did not come about in time; the text holds what was seen last."""


def until(what: str, check: Callable[[], T], *, seconds: float = 120.0, interval: float = 0.25) -> T:
    """The value of `check`, once it raises no AssertionError. Raises NotYetError with its last complaint after `seconds`."""
    start = time.monotonic()
    while True:
        try:
            return check()
        except AssertionError as error:
            waited = time.monotonic() - start
            if waited > seconds:
                raise NotYetError(f"waited {waited:.0f} s for {what}; last seen: {error}") from error
        time.sleep(interval)


def holds(what: str, check: Callable[[], object], *, seconds: float, interval: float = 0.25) -> None:
    """Watches that `check` stays true for `seconds`: for states that must not be left, where there is no event to wait for."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            check()
        except AssertionError as error:
            raise AssertionError(f"{what} did not hold: {error}") from error
        time.sleep(interval)
