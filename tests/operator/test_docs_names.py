"""Names and commands of the operator's documents against the code: a reader types them, so a stale one is a bug."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefill_operator.__main__ import main
from prefill_operator.cli.yaml_text import parse_yaml
from prefill_operator.crd import load_crd, object_schema
from prefill_operator.names import Kind

ROOT = Path(__file__).parents[2]
FIELD_DOCS = ("docs/operations.md", "docs/troubleshooting.md", "docs/autoscaling.md", "charts/prefill/README.md")
NO_FIELDS = frozenset({"prefill.dev", "values.schema.json", "values.yaml"})
POOL = ROOT / "examples" / "b200.yaml"


def _named_paths() -> list[tuple[str, str]]:
    """Words like `quota.maxGPUs`, wherever they stand in backticks."""
    found = {
        (path, name)
        for path in FIELD_DOCS
        for name in re.findall(r"`([a-z][A-Za-z0-9]*(?:\.[A-Za-z0-9]+)+)\b", (ROOT / path).read_text())
    }
    return sorted((path, name) for path, name in found if name not in NO_FIELDS)


def _objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and all below it, but for overlays, in which everything exists."""
    yield schema
    for inner in schema.get("properties", {}).values():
        if not inner.get("x-kubernetes-preserve-unknown-fields") and not inner.get("items"):
            yield from _objects(inner)


def _has(schema: dict[str, Any], names: list[str]) -> bool:
    for name in names:
        schema = schema.get("items", schema)
        if schema.get("x-kubernetes-preserve-unknown-fields"):
            return True
        schema = schema.get("properties", {}).get(name)
        if schema is None:
            return False
    return True


def _is_value(names: list[str]) -> bool:
    (value,) = parse_yaml((ROOT / "charts/prefill/values.yaml").read_text(), source="values.yaml")
    node: Any = value
    for name in names:
        if not isinstance(node, dict) or name not in node:
            return False
        node = node[name]
    return True


@pytest.mark.parametrize(("path", "name"), _named_paths(), ids=lambda text: text.rpartition("/")[2])
def test_field_or_value_exists(path: str, name: str) -> None:
    """Whole paths, or their ends, as `availability.target` for spec.quota.redundancy.availability.target."""
    names = name.split(".")
    roots = [object_schema(load_crd(kind)) for kind in Kind]
    if names[0] in ("spec", "status"):
        assert any(_has(root, names) for root in roots), f"{path}: {name}"
    elif names[0] != "metadata":
        assert _is_value(names) or any(_has(item, names) for root in roots for item in _objects(root)), (
            f"{path}: {name}"
        )


def _commands() -> list[str]:
    texts = [(ROOT / path).read_text() for path in FIELD_DOCS]
    lines = [
        line
        for text in texts
        for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    return [line.removeprefix("$ ") for line in lines if re.match(r"(\$ )?prefill-operator ", line)]


def test_documents_have_commands() -> None:
    assert len(_commands()) >= 6


@pytest.mark.parametrize("command", _commands())
def test_command_works(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command.replace("pool.yaml", str(POOL)), comments=True)

    assert main(words[1:]) == 0
    assert capsys.readouterr().out


def test_table_of_spares_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(
        r"^\$ (prefill-operator spares .*)\n((?:.+\n)+)```", (ROOT / FIELD_DOCS[0]).read_text(), re.MULTILINE
    )
    main(shlex.split(shown[0])[1:])
    printed = capsys.readouterr().out.splitlines()

    assert set(shown[1].splitlines()) <= set(printed)
