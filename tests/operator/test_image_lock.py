"""The part of the lock that goes into an image (images/lock_subset.py): complete, and without the development tools."""

import importlib.util
import re
from importlib.metadata import requires
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lock_subset() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock_subset", ROOT / "images" / "lock_subset.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins(module: ModuleType, extra: str) -> set[str]:
    text = module.subset((ROOT / "requirements.lock").read_text(), (ROOT / "pyproject.toml").read_text(), extra)
    assert text.count("--hash=sha256:") >= text.count("==")
    return set(re.findall(r"^([a-z0-9][a-z0-9._-]*)(?:\[.*?\])?==", text, re.MULTILINE))


@pytest.mark.parametrize(("extra", "root"), [("operator", "kopf"), ("operator", "kubernetes"), ("engine", "torch")])
def test_every_requirement_of_a_package_is_there(lock_subset: ModuleType, extra: str, root: str) -> None:
    found, todo, seen = pins(lock_subset, extra), [root], set()
    while todo:
        name = todo.pop()
        seen.add(name)
        lines = [line for line in requires(name) or [] if "extra ==" not in line]
        needed = {lock_subset.normal(lock_subset.NAME.match(line)[0]) for line in lines if ";" not in line}
        assert needed <= found, f"{name} needs {sorted(needed - found)}"
        todo += needed - seen


@pytest.mark.parametrize("extra", ["operator", "engine"])
def test_no_development_tool_is_there(lock_subset: ModuleType, extra: str) -> None:
    assert pins(lock_subset, extra) & {"ruff", "mypy", "pytest", "hypothesis", "grpcio-tools"} == set()


def test_the_operator_image_has_no_torch(lock_subset: ModuleType) -> None:
    assert pins(lock_subset, "operator") & {"torch", "numpy", "triton"} == set()


def test_missing_package_is_an_error(lock_subset: ModuleType) -> None:
    with pytest.raises(SystemExit, match="make lock"):
        lock_subset.subset("", (ROOT / "pyproject.toml").read_text(), "operator")


def test_every_line_of_via_counts(lock_subset: ModuleType) -> None:
    entry = "{}==1 \\\n    --hash=sha256:0\n    # via{}\n"
    lock = entry.format("a", "\n    #   b\n    #   c") + entry.format("b", " prefill (pyproject.toml)")
    pyproject = '[project]\ndependencies = ["b>=1"]\n[project.optional-dependencies]\nx = []\n'
    assert "a==1" in lock_subset.subset(lock, pyproject, "x")
