"""coverage.md against the tests that it names: they exist, no number is missing, and no row is empty."""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parents[1]
TEXT = (Path(__file__).parent / "coverage.md").read_text()
MAX_WORDS = 12


class Row(NamedTuple):
    number: int
    what: str
    tests: list[str]
    why_not: str


def _lengths() -> dict[str, int]:
    """As the header of the file states them."""
    (line,) = re.findall(r"^Lists and their lengths: (.+)\.$", TEXT, re.MULTILINE)
    return {name: int(count) for name, count in re.findall(r"([a-z0-9 ]+?) (\d+)(?:, |$)", line)}


def _rows(name: str) -> list[Row]:
    (section,) = re.findall(rf"^## {name}$(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    cells = [re.split(r" ?\| ?", line)[1:-1] for line in section.splitlines() if re.match(r"\| \d", line)]
    return [Row(int(number), what, re.findall(r"`([^`]+)`", tests), why) for number, what, tests, why in cells]


LENGTHS = _lengths()
ROWS = [(name, row) for name in LENGTHS for row in _rows(name)]
NAMED = sorted({test for _, row in ROWS for test in row.tests})


@functools.cache
def _functions(path: str) -> set[str]:
    """Functions of a test file, and methods as Class.method; those of a class only if pytest runs it."""
    tree = ast.parse((TESTS / path).read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    run = {
        node.value.value.id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr == "TestCase"
        if isinstance(node.value.value, ast.Name)
    }
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in run:
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_header_names_every_list() -> None:
    assert list(LENGTHS) == re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    assert LENGTHS["complaints"] == 66


@pytest.mark.parametrize("name", LENGTHS)
def test_no_number_is_missing(name: str) -> None:
    assert [row.number for row in _rows(name)] == list(range(1, LENGTHS[name] + 1))


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{name} {row.number}" for name, row in ROWS])
def test_row_has_a_test_or_says_why_not(name: str, row: Row) -> None:
    assert row.tests or len(row.why_not) > 10
    assert 0 < len(row.what.split()) <= MAX_WORDS
    assert len(set(row.tests)) == len(row.tests)


@pytest.mark.parametrize("test", NAMED)
def test_named_test_exists(test: str) -> None:
    path, _, function = test.partition("::")

    assert function in _functions(path)
    is_test = function.startswith("test_") and Path(path).name.startswith("test_")
    assert is_test or "." in function or Path(path).name == "conftest.py"
