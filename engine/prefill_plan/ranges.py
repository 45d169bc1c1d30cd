"""Ranges of configuration values, for whoever starts with one: an impossible value is named before anything runs. Pure."""

from collections.abc import Iterable
from math import inf

from prefill_plan.config import EngineConfig, Struct
from prefill_plan.errors import ConfigError

LEAST_SECONDS = 0.001
MOST_SECONDS = 366 * 86_400.0

Range = tuple[str, float, float]
"""Field, with the parts it is in, and the least and the greatest value, both included."""

ENGINE_RANGES: tuple[Range, ...] = (
    ("parallel.dp_size", 1, inf),
    ("parallel.ep_size", 1, inf),
    ("server.port", 0, 65_535),
    ("server.probe_port", -1, 65_535),
    ("server.metrics_port", -1, 65_535),
    ("server.max_message_bytes", 1, 2**31 - 1),  # gRPC counts in int32
    ("server.drain_seconds", 0, MOST_SECONDS),
    ("server.max_waiting_requests", 1, inf),
    ("server.max_waiting_rows", 1, inf),
    ("server.max_tenant_rows", 1, inf),
    ("server.load_timeout_seconds", LEAST_SECONDS, MOST_SECONDS),
    ("handoff.ticket_seconds", LEAST_SECONDS, MOST_SECONDS),
    ("handoff.ticket_max_seconds", LEAST_SECONDS, MOST_SECONDS),
    ("handoff.result_seconds", 0, MOST_SECONDS),
    ("handoff.data_port", -1, 65_535),
    ("handoff.piece_seconds", LEAST_SECONDS, MOST_SECONDS),
    ("replay.max_rollback_tokens", 0, inf),
    ("kv.pool_tokens", 1, inf),
    ("kv.state_slots", 1, inf),
    ("kv.snapshot_bytes", 0, inf),
    ("kv.max_ticket_fraction", 0, 1),
    ("store.max_bytes", 0, inf),
    ("kvd.connect_seconds", 0, MOST_SECONDS),
    ("kvd.open_seconds", LEAST_SECONDS, MOST_SECONDS),
    ("kvd.swap_in_seconds", LEAST_SECONDS, MOST_SECONDS),
    ("kvd.swap_in_min_seconds", 0, MOST_SECONDS),
    ("kvd.snapshot_seconds", 0, MOST_SECONDS),
    ("kvd.gate_seconds", LEAST_SECONDS, MOST_SECONDS),
    ("scheduler.chunk_cap_tokens", 1, inf),
    ("scheduler.min_chunk_tokens", 1, inf),
    ("scheduler.contended_chunk_tokens", 1, inf),
    ("scheduler.floor_chunk_tokens", 1, inf),
    ("scheduler.age_seconds", LEAST_SECONDS, MOST_SECONDS),
    ("scheduler.canary_seconds", LEAST_SECONDS, MOST_SECONDS),
    ("vision.rows_bytes", 0, inf),
    ("vision.image_seconds", LEAST_SECONDS, MOST_SECONDS),
    ("max_context_tokens", 1, inf),
)
"""What only the model can tell (replay.keep_tokens) or the data port (handoff.staging_bytes) is checked there."""


def check_ranges(config: Struct, ranges: Iterable[Range]) -> None:
    """Raises ConfigError for the first value out of its range: field, value, what was expected. None leaves the choice to us."""
    for field, low, high in ranges:
        value: Struct | float | None = config
        for name in field.split("."):
            value = getattr(value, name)
        if value is None:
            continue
        assert isinstance(value, int | float)
        if not low <= value <= high:  # not a number (NaN) is in no range
            expected = f"at least {low:g}" if high == inf else f"{low:g} to {high:g}"
            raise ConfigError(f"{field} = {value}, expected {expected}", key=field, expected=expected)


def check_engine_ranges(config: EngineConfig) -> None:
    """Raises ConfigError. Called by the engine at start."""
    check_ranges(config, ENGINE_RANGES)
