"""Tables that name tests: what stands in them, and whether a named test exists. Used by the tables' own checks."""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]


class Row(NamedTuple):
    """why_not: what the tests do not show, or why there is none."""

    number: int
    what: str
    tests: list[str]
    why_not: str


def read_rows(text: str) -> list[Row]:
    """Rows `| number | what | `path::function` ... | why not |` of a Markdown text."""
    cells = [re.split(r" ?\| ?", line)[1:-1] for line in text.splitlines() if re.match(r"\| \d", line)]
    return [Row(int(number), what, re.findall(r"`([^`]+)`", tests), why) for number, what, tests, why in cells]


@functools.cache
def functions_of(path: str) -> set[str]:
    """Functions of a file below tests/, and methods as Class.method; those of a class only if pytest runs it."""
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
