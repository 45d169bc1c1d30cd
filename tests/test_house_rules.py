"""Rules of the house that no linter knows (style.md): sizes, names, the lock, what a light process may import."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prefill_engine.__main__ import VERBS, main

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "kernels")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name)


def test_source_roots_are_no_packages() -> None:
    roots = [ROOT / name for name in ("operator", "engine", "kernels")]
    assert [root for root in roots if (root / "__init__.py").exists()] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_and_function_sizes(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    # Bodies: the argument list of a kernel is no complexity.
    bodies = {node.name: (node.end_lineno or 0) - node.body[0].lineno + 1 for node in functions}
    assert {name: lines for name, lines in bodies.items() if lines > 60} == {}


def test_no_module_is_named_after_nothing() -> None:
    names = {path.stem for path in SOURCES}
    assert names & {"utils", "common", "helpers", "misc", "base"} == set()


def test_lock_has_hashes_and_names_no_registry() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert "--hash=sha256:" in lock
    assert re.findall(r"https?://|--(?:extra-)?index-url", lock) == []


def test_lock_pins_the_pair_that_kernels_are_tested_with() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert [pin for pin in ("torch==2.15.0", "triton==3.9.0", "numpy==2.4.6") if f"\n{pin} " not in lock] == []


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("prefill_plan.memory", "torch"),
        ("prefill_plan.memory", "numpy"),
        ("prefill_engine.serve", "torch"),
        ("prefill_engine.client", "torch"),
        ("prefill_engine.vision.process", "torch"),
        ("prefill_engine.kv.file_store", "torch"),
        ("prefill_engine.scheduler", "numpy"),
    ],
)
def test_light_modules_stay_light(module: str, forbidden: str) -> None:
    program = f"import sys, {module}; sys.exit({forbidden!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_cli_verbs_are_the_agreed_ones() -> None:
    assert list(VERBS) == [
        "serve",
        "request",
        "plan",
        "check",
        "equivalence",
        "make-checkpoint",
        "drain",
        "kv",
        "directory",
        "ve",
        "ve-sweep",
        "ve-balance",
        "demo",
    ]


@pytest.mark.parametrize(
    "verb",
    [
        *("plan", "serve", "check", "equivalence", "make-checkpoint", "request", "drain", "kv", "directory"),
        *("ve", "ve-sweep", "ve-balance", "demo"),
    ],
)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert f"prefill-engine {verb}" in capsys.readouterr().out


def test_program_has_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefill_engine", "--help"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "prefill-engine" in done.stdout


def test_unknown_verb_is_a_usage_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefill_engine", "fly"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
