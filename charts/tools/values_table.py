"""Prints the table of the chart's values for its README: `python charts/tools/values_table.py`. A test compares.

Documentation of a value is the comment right above it in values.yaml.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[1] / "prefill"
_KEY = re.compile(r"( *)([A-Za-z]+):( |$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentedValue:
    path: str
    """Dotted, e.g. "image.tag"."""
    text: str
    default: Any
    is_block: bool
    """It only groups other documented values."""


def documented_values(text: str) -> list[DocumentedValue]:
    """Every key with a comment above it, in the file's order; the file's opening comment belongs to nothing."""
    values = yaml.safe_load(text)
    comments = dict(_comments(text))
    return [
        DocumentedValue(
            path=path,
            text=comment,
            default=_value_at(values, path),
            is_block=any(other.startswith(f"{path}.") for other in comments),
        )
        for path, comment in comments.items()
    ]


def leaves(tree: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of all scalars, lists and empty objects."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path


def values_table(text: str) -> str:
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for value in documented_values(text):
        if not value.is_block:
            default = json.dumps(value.default).replace("|", "\\|")
            rows.append(f"| `{value.path}` | `{default}` | {value.text} |")
    return "\n".join(rows) + "\n"


def _comments(text: str) -> Iterator[tuple[str, str]]:
    stack: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("# "):
            comment.append(line.strip()[2:])
        elif match := _KEY.match(line):
            indent = len(match[1])
            stack = [item for item in stack if item[0] < indent] + [(indent, match[2])]
            if comment:
                yield ".".join(name for _, name in stack), " ".join(comment)
            comment = []
        else:
            comment = []


def _value_at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree[key]
    return tree


if __name__ == "__main__":
    print(values_table((CHART / "values.yaml").read_text()), end="")
