"""Configuration: file, then overrides; unknown keys and bad values are refused with their path."""

from pathlib import Path

import pytest

from prefill_engine.settings import load_config, load_identity
from prefill_plan.errors import ConfigError


def test_overrides_win_over_the_file_in_order(tmp_path: Path):
    path = tmp_path / "c.json"
    path.write_text('{"model": {"path": "/a"}, "server": {"port": 1}}')
    config = load_config(path, ["server.port=2", "server.port=3", "store.kind=file", "store.path=/s"])
    assert (config.model.path, config.server.port, config.store.kind, config.store.path) == ("/a", 3, "file", "/s")


def test_defaults_need_only_the_model():
    config = load_config(None, ["model.path=/m"])
    assert (config.replay.keep_tokens, config.server.drain_seconds) == (140, 120.0)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("{}", [], "model"),
        ('{"model": {"path": "/m", "speed": 1}}', [], "model: .*speed"),
        ('{"model": {"path": "/m"}, "sever": {}}', [], "sever"),
        ('{"model": {"path": "/m"}}', ["server.prot=1"], "server: .*prot"),
        ('{"model": {"path": "/m"}}', ["server.port=abc"], "server.port: .*int"),
        ('{"model": {"path": "/m"}}', ["server.port"], "expected part.field=value"),
        ('{"model": {"path": "/m"}}', ["model.path.x=1"], "path is a value"),
        ("[1]", [], "expected a JSON object"),
        ("{nope", [], "not JSON"),
    ],
    ids=["missing", "unknown-key", "unknown-part", "unknown-override", "type", "no-equals", "leaf", "list", "syntax"],
)
def test_bad_configuration_is_refused_by_path(tmp_path: Path, text: str, overrides: list[str], message: str):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path, overrides)


def test_unreadable_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read: No such file"):
        load_config(tmp_path / "none.json", [])


def test_identity_comes_from_the_pod_s_environment():
    identity = load_identity({"POD_NAME": "pe-3", "POD_IP": "10.0.0.7", "POD_ZONE": "z1", "PLAN_HASH": "abc"})
    assert (identity.engine_id, identity.pod_ip, identity.zone, identity.plan_hash) == ("pe-3", "10.0.0.7", "z1", "abc")


def test_identity_outside_a_pod_is_this_process():
    assert load_identity({}).engine_id
    assert load_identity({}).pod_ip == ""
