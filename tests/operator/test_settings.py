"""prefill_operator.settings: file, overrides, environment, and what is refused."""

from pathlib import Path

import pytest

from prefill_operator.settings import OperatorSettings, load_settings
from prefill_plan.errors import ConfigError

ENVIRONMENT = {"POD_NAME": "op-1", "POD_NAMESPACE": "prefill-system"}


def test_defaults_are_those_of_the_struct() -> None:
    settings = load_settings(None, environ=ENVIRONMENT)

    assert settings == OperatorSettings(identity="op-1", namespace="prefill-system")


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("statusSeconds: 5\nlease: {durationSeconds: 30}\nnamespaces: [a, b]\n")

    settings = load_settings(path, ["lease.durationSeconds=20", "times.backoffSeconds=1"], environ=ENVIRONMENT)

    assert (settings.status_seconds, settings.lease.duration_seconds, settings.namespaces) == (5.0, 20.0, ("a", "b"))
    assert settings.times.backoff_seconds == 1.0
    assert settings.lease.retry_seconds == OperatorSettings().lease.retry_seconds


def test_file_wins_over_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("identity: me\n")

    assert load_settings(path, environ=ENVIRONMENT).identity == "me"


def test_processes_of_one_host_have_different_identities() -> None:
    assert load_settings(None, environ={}).identity.rpartition("-")[2].isdecimal()


def test_empty_file_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("")

    assert load_settings(tmp_path / "settings.yaml", environ=ENVIRONMENT).port == 8080


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("prot=1", "unknown key prot"),
        ("times.backOff=1", "unknown key times.backOff"),
        ("status_seconds=1", "unknown key status_seconds"),
        ("port=many", "port: expected int, got str"),
        ("security.allowedHostPathPrefixes=/mnt", "security.allowedHostPathPrefixes: expected array, got str"),
        ("port=99999", "port is 99999: expected 0 to 65535, or -1 for none"),
        ("logLevel=LOUD", "logLevel is LOUD: expected one of DEBUG, INFO, WARNING, ERROR"),
        ("workers=0", "workers is 0: expected 1 or more"),
        ("resyncSeconds=-1", "resyncSeconds is -1: expected more than 0"),
        ("statusSeconds=.nan", "statusSeconds is nan: expected more than 0"),
        ("times.backoffSeconds=-2", "times.backoffSeconds is -2: expected 0 or more"),
        ("port", "expected part.field=value"),
        (".port=1", "expected part.field=value"),
        ("port.number=1", "is a value, not a part"),
        ("namespaces=[a", "not YAML"),
        (
            "lease.renewDeadlineSeconds=15",
            "lease.retrySeconds is 2, renewDeadlineSeconds 15, durationSeconds 15: expected 0 < retry < renew",
        ),
    ],
)
def test_bad_override_is_refused_by_name(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint.replace("(", r"\(")):
        load_settings(None, ["port=1", override] if override.startswith("port.") else [override], environ=ENVIRONMENT)


@pytest.mark.parametrize(("text", "complaint"), [("a: [", "not YAML"), ("- 1", "expected an object")])
def test_bad_file_is_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=complaint) as refusal:
        load_settings(path, environ=ENVIRONMENT)
    assert str(path) in refusal.value.message


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(tmp_path / "none.yaml", environ=ENVIRONMENT)
