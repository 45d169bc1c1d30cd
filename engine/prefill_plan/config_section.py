"""Typed reading of a foreign JSON object: every fault is a ConfigError with file, path of the key, value, expectation.

Used by model_spec only. Unknown keys are left alone: the file is not ours, and new releases may add harmless ones.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import NoReturn

from prefill_plan.errors import ConfigError


class Section:
    """One object of a config file, e.g. text_config of config.json."""

    def __init__(self, values: Mapping[str, object], *, source: str, path: str = "") -> None:
        self._values = values
        self._source = source
        self._path = path

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raises ConfigError for the value of `key`."""
        where = f"{self._source}: {self._path}{key}"
        if key not in self._values:
            raise ConfigError(f"{where} is missing, expected {expected}", key=self._path + key, expected=expected)
        value = self._values[key]
        raise ConfigError(f"{where} = {value!r}, expected {expected}", key=self._path + key, expected=expected)

    def require(self, condition: bool, key: str, expected: str) -> None:
        """Raises ConfigError for the value of `key` unless the condition holds."""
        if not condition:
            self.refuse(key, expected)

    def section(self, key: str) -> "Section":
        value = self._values.get(key)
        if not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return Section(value, source=self._source, path=f"{self._path}{key}.")

    def integer(self, key: str, *, low: int = 1, high: int | None = None, multiple_of: int = 1) -> int:
        expected = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
        if multiple_of > 1:
            expected += f", multiple of {multiple_of}"
        value = self._values.get(key)
        if type(value) is not int or value < low or (high is not None and value > high) or value % multiple_of:
            self.refuse(key, expected)
        return value

    def number(self, key: str, *, low: float = 0.0) -> float:
        """A finite number > low."""
        value = self._values.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not low < value < inf:
            self.refuse(key, f"a number > {low:g}")
        return float(value)

    def integers(
        self, key: str, *, low: int = 0, high: int | None = None, length: int | None = None
    ) -> tuple[int, ...]:
        expected = f"a list of {'' if length is None else f'{length} '}integers >= {low}"
        if high is not None:
            expected += f" and <= {high}"
        value = self._values.get(key)
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            self.refuse(key, expected)
        out_of_range = any(type(i) is not int or i < low or (high is not None and i > high) for i in value)
        if out_of_range or (length is not None and len(value) != length):
            self.refuse(key, expected)
        return tuple(value)

    def ascending(self, key: str, *, low: int, high: int) -> tuple[int, ...]:
        """A list of integers in low..high, strictly ascending."""
        value = self.integers(key, low=low, high=high)
        if any(a >= b for a, b in pairwise(value)):
            self.refuse(key, f"strictly ascending integers in {low}..{high}")
        return value

    def only(self, key: str, supported: object, *, optional: bool = False) -> None:
        """Refuses everything but the one supported value. An optional key may be missing, and then means that value."""
        if optional and key not in self._values:
            return
        value = self._values.get(key)
        if type(value) is not type(supported) or value != supported:
            self.refuse(key, f"{supported!r} (the only supported value)")
