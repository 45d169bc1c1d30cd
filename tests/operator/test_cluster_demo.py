"""tests/cluster/demo.py where something is missing or fails: one line that says what to do, and an exit code. No cluster here."""

import importlib.util
import os
import shutil
import stat
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from prefill_testing.chart import ROOT


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """As root, with a cache of its own and no binaries of a cluster."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "cluster")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PREFILL_CLUSTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CLUSTER_BIN", raising=False)
    spec = importlib.util.spec_from_file_location("cluster_demo", ROOT / "tests" / "cluster" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _one_line(text: str) -> str:
    (line,) = text.splitlines()
    assert line.startswith("demo.py: ")
    assert len(line) < 1200
    return line


@pytest.mark.parametrize("verb", ["up", "down"])
def test_machine_without_go(
    demo: ModuleType, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "env", "dirname"):
        (tools / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tools))

    assert demo.main([verb]) == 1
    line = _one_line(capsys.readouterr().err)
    assert "build.sh ended with 1: build.sh: the Go tool chain is needed" in " ".join(line.split())
    assert "To do: it needs root, Go 1.26 and Debian packages (tests/cluster/README.md)" in line


def test_failed_helm(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / "helm4"
    binary.write_text(
        "#!/bin/sh\necho 'Release failed'\necho 'level=WARN text' >&2\necho 'Error: no more quota' >&2\nexit 1\n"
    )
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    helm = demo.Helm(SimpleNamespace(kubeconfig=tmp_path / "kubeconfig"), binary)
    monkeypatch.setattr(demo, "up", lambda _cache: helm.run("install", "prefill"))

    assert demo.main(["up"]) == 1
    line = _one_line(capsys.readouterr().err)
    assert "helm install prefill: Release failed ... Error: no more quota" in line
    assert "`make demo-cluster-down`" in line
    assert str(tmp_path / "cache" / "demo" / "log") in line


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (subprocess.TimeoutExpired(["up.sh", "2"], 600), "up.sh 2 did not end within 600 s"),
        (AssertionError(), "AssertionError()"),
        (ConnectionRefusedError("no API server"), "no API server"),
        (AssertionError("x" * 9000 + "\nthe end"), "the end"),
    ],
    ids=["time", "nothing said", "refused", "long"],
)
def test_whatever_fails_is_one_line(
    demo: ModuleType,
    error: Exception,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_cache: Path) -> int:
        raise error

    monkeypatch.setattr(demo, "up", fail)

    assert demo.main(["up"]) == 1
    assert words in _one_line(capsys.readouterr().err)


def test_unknown_words_are_answered_by_the_usage(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["sideways"]) == 2
    assert "demo.py up | down" in capsys.readouterr().err
