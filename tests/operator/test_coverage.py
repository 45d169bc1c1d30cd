"""coverage.md against the tests that it names: they exist, no number is missing, and no row is empty."""

import re
from pathlib import Path

import pytest

from prefill_testing.named_tests import Row, functions_of, read_rows

TEXT = (Path(__file__).parent / "coverage.md").read_text()
MAX_WORDS = 12


def _lengths() -> dict[str, int]:
    """As the header of the file states them."""
    (line,) = re.findall(r"^Lists and their lengths: (.+)\.$", TEXT, re.MULTILINE)
    return {name: int(count) for name, count in re.findall(r"([a-z0-9 ]+?) (\d+)(?:, |$)", line)}


def _rows(name: str) -> list[Row]:
    (section,) = re.findall(rf"^## {name}$(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return read_rows(section)


LENGTHS = _lengths()
ROWS = [(name, row) for name in LENGTHS for row in _rows(name)]
NAMED = sorted({test for _, row in ROWS for test in row.tests})


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

    assert function in functions_of(path)
    is_test = function.startswith("test_") and Path(path).name.startswith("test_")
    assert is_test or "." in function or Path(path).name == "conftest.py"
