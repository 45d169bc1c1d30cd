"""Options are taken as they are written: what the operator reserves by name must have no second spelling."""

import ast
from pathlib import Path

import pytest

from prefill_engine.__main__ import main as engine
from prefill_operator.__main__ import main as operator

ROOT = Path(__file__).parent.parent


def _parsers(path: Path) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("ArgumentParser", "add_parser")
    ]


def test_no_parser_takes_short_forms_of_options() -> None:
    """A sub-parser has its own allow_abbrev: that of its parent does not reach it."""
    files = [path for package in ("engine", "operator") for path in (ROOT / package).rglob("*.py")]
    calls = [(path, call) for path in files for call in _parsers(path)]
    assert len(calls) >= 10
    for path, call in calls:
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert given.get("allow_abbrev") == "False", f"{path.relative_to(ROOT)}:{call.lineno}"


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--conf", "/x"),
        ("serve", "--se", "device=gpu"),
        ("serve", "--termination", "/x"),
        ("kv", "serve", "--conf", "/x"),
        ("ve", "serve", "--se", "device=gpu"),
        ("directory", "serve", "--po", "1"),
    ],
    ids=" ".join,
)
def test_engine_refuses_a_short_form(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        engine(words)
    assert ending.value.code == 2
    assert f"unrecognized arguments: {words[-2]}" in capsys.readouterr().err


def test_operator_refuses_a_short_form(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        operator(("plan", "-f", "x", "--js"))
    assert "unrecognized arguments: --js" in capsys.readouterr().err
