"""KvdConfig.check: every field that has a range, at its ends and beyond them."""

from math import inf, nan

import msgspec
import pytest

from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import _RANGES, KvdConfig

LARGE = 1 << 60
PAIRED = {"snapshot_bytes": "pool_bytes", "store.low_watermark": "store.high_watermark"}
"""The first must be less than the second as well."""


def config_with(field: str, value: float) -> KvdConfig:
    tree = msgspec.to_builtins(KvdConfig())
    *parts, name = field.split(".")
    node = tree
    for part in parts:
        node = node[part]
    node[name] = type(node[name])(value)
    return msgspec.convert(tree, KvdConfig)


WRONG = [
    ("store.read_threads", 0, "store.read_threads = 0, expected 1 to 256"),
    ("store.read_threads", 257, "store.read_threads = 257, expected 1 to 256"),
    ("store.generation_seconds", 0.0, "store.generation_seconds = 0.0, expected 0.001 to 3.16224e+07"),
    ("store.generation_seconds", nan, "store.generation_seconds = nan, expected 0.001 to"),
    ("store.max_bytes", -1, "store.max_bytes = -1, expected at least 0"),
    ("store.grace_seconds", -0.1, "store.grace_seconds = -0.1, expected 0 to"),
    ("store.high_watermark", 1.01, "store.high_watermark = 1.01, expected 0.001 to 1"),
    ("store.low_watermark", 0.0, "store.low_watermark = 0.0, expected 0.001 to 1"),
    ("store.low_watermark", 0.90, "store.low_watermark = 0.9, expected less than store.high_watermark = 0.9"),
    ("store.tenant_share", 0.0, "store.tenant_share = 0.0, expected 0.001 to 1"),
    ("pool_bytes", 0, "pool_bytes = 0, expected at least 1"),
    ("snapshot_bytes", 0, "snapshot_bytes = 0, expected at least 1"),
    ("snapshot_bytes", 1 << 30, "snapshot_bytes = 1073741824, expected less than pool_bytes = 1073741824"),
    ("probe_port", -2, "probe_port = -2, expected -1 to 65535"),
    ("metrics_port", 65_536, "metrics_port = 65536, expected -1 to 65535"),
    ("transport.port", -1, "transport.port = -1, expected 0 to 65535"),
    ("engine_uid", -2, "engine_uid = -2, expected -1 to"),
    ("startup_timeout_seconds", -1.0, "startup_timeout_seconds = -1.0, expected 0 to"),
    ("startup_timeout_seconds", inf, "startup_timeout_seconds = inf, expected 0 to"),
    ("directory.deadline_seconds", 0.0, "directory.deadline_seconds = 0.0, expected 0.001 to"),
    ("lease_grace_seconds", -1.0, "lease_grace_seconds = -1.0, expected 0 to"),
    ("pull_deadline_seconds", 0.0, "pull_deadline_seconds = 0.0, expected 0.001 to"),
    ("max_quarantined_slots", 0, "max_quarantined_slots = 0, expected at least 1"),
    ("read_budget_bytes", 0, "read_budget_bytes = 0, expected at least 1"),
    ("write_queue_bytes", 0, "write_queue_bytes = 0, expected at least 1"),
    ("tenant_share", 0.0, "tenant_share = 0.0, expected 0.001 to 1"),
]


@pytest.mark.parametrize(("field", "value", "text"), WRONG, ids=[f"{field}={value}" for field, value, _ in WRONG])
def test_value_out_of_range_is_named_with_its_range(field: str, value: float, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(field, value).check()
    assert caught.value.message.startswith(text)


def test_defaults_and_the_ends_of_every_range_are_right() -> None:
    KvdConfig().check()
    for field, low, high in _RANGES:
        if field not in {*PAIRED, *PAIRED.values()}:
            config_with(field, low).check()
            config_with(field, LARGE if high == inf else high).check()


def test_every_range_has_a_wrong_value_in_the_table() -> None:
    assert {field for field, _, _ in _RANGES} == {field for field, _, _ in WRONG}
