"""Values of an engine's configuration that make no sense: named with their range before anything starts."""

from math import inf, nan

import msgspec
import pytest

from prefill_plan.config import EngineConfig, ModelConfig, Struct
from prefill_plan.errors import ConfigError
from prefill_plan.ranges import ENGINE_RANGES, check_engine_ranges

LARGE = 1 << 60
CHECKED_ELSEWHERE = {"replay.keep_tokens", "handoff.staging_bytes"}
"""By the model's window, by the data port."""


def config_with(field: str, value: float) -> EngineConfig:
    tree = msgspec.to_builtins(EngineConfig(model=ModelConfig(path="/models/x")))
    *parts, name = field.split(".")
    node = tree
    for part in parts:
        node = node[part]
    node[name] = int(value) if isinstance(node[name], int) else float(value)
    return msgspec.convert(tree, EngineConfig)


def numeric_fields(kind: type[Struct], prefix: str = "") -> set[str]:
    """int, float and float | None, with the parts they are in."""
    found: set[str] = set()
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found |= numeric_fields(field.type, f"{prefix}{field.name}.")
        elif field.type in (int, float) or field.type == float | None:
            found.add(prefix + field.name)
    return found


def test_every_number_of_the_configuration_has_a_range() -> None:
    assert {field for field, _, _ in ENGINE_RANGES} == numeric_fields(EngineConfig) - CHECKED_ELSEWHERE


@pytest.mark.parametrize(("field", "low", "high"), ENGINE_RANGES, ids=[field for field, _, _ in ENGINE_RANGES])
def test_ends_of_a_range_are_right_and_what_lies_beyond_is_named(field: str, low: float, high: float) -> None:
    check_engine_ranges(config_with(field, low))
    check_engine_ranges(config_with(field, LARGE if high == inf else high))
    wrong = [low - 1] if high == inf else [low - 1, high + 1]
    for value in wrong:
        with pytest.raises(ConfigError) as caught:
            check_engine_ranges(config_with(field, value))
        assert caught.value.details["key"] == field
        assert caught.value.message.startswith(f"{field} = ")
        assert f", expected {'at least ' if high == inf else ''}{low:g}" in caught.value.message


@pytest.mark.parametrize("value", [nan, inf, -5.0])
def test_seconds_are_a_finite_number(value: float) -> None:
    with pytest.raises(ConfigError, match=r"kvd.swap_in_min_seconds = (nan|inf|-5.0), expected 0 to"):
        check_engine_ranges(config_with("kvd.swap_in_min_seconds", value))


def test_defaults_are_right() -> None:
    check_engine_ranges(EngineConfig(model=ModelConfig(path="/models/x")))
