"""kernels/README.md against the code: its ops, its marks, its compiled kernels."""

import importlib
import re
from pathlib import Path

from prefill_kernels.aot import cases, readme
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.ops import Ops
from prefill_kernels.vision_ops import VisionOps

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "kernels" / "README.md").read_text()
NOT_IN_A_PROTOCOL = {"take_images", "restore_images", "gather_blocks", "save_blocks"}

SHARES_THE_KERNEL_OF = {"decode_window": "load_main", "index_values": "load_index"}


def rows_of_ops() -> list[dict[str, str]]:
    section = TEXT.partition("\n## Ops\n")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def test_each_op_has_a_row_that_names_its_module() -> None:
    names = [row["op"].strip("`") for row in rows_of_ops()]
    protocols = [name for name in (*vars(Ops), *vars(VisionOps)) if not name.startswith("_")]
    assert sorted(names) == sorted({*protocols, *NOT_IN_A_PROTOCOL})
    for row in rows_of_ops():
        module = importlib.import_module(f"prefill_kernels.gpu.{row['module'].strip('`')}")
        assert hasattr(module, row["op"].strip("`")), row


def test_each_op_names_its_profile_and_its_tolerance() -> None:
    """D: the module's docstring says which point is rounded otherwise than in `ref`."""
    for row in rows_of_ops():
        module = importlib.import_module(f"prefill_kernels.gpu.{row['module'].strip('`')}")
        assert row["profile"] == ("D" if "Profile D" in (module.__doc__ or "") else "R"), row
        assert row["equal"], row


def test_marks_are_earned() -> None:
    """I: a test of the folder names the op. A: the module's kernels are compiled by the gate. G: a figure stands beside it."""
    tests = "\n".join(path.read_text() for path in (ROOT / "tests" / "kernels" / "gpu").glob("test_*.py"))
    compiled = {case.op for _, case in cases.load_cases(list(Chip)).cases}
    for row in rows_of_ops():
        op = row["op"].strip("`")
        earned = ["I"] if re.search(rf"\b{op}\b", tests) else []
        earned += ["A"] if op in compiled or SHARES_THE_KERNEL_OF.get(op) in compiled else []
        earned += ["G"] if row["measured (device, us, roofline %)"] else []
        assert row["marks"].split() == earned, op


def test_the_table_of_compiled_kernels_has_the_cases_of_the_modules() -> None:
    """Launch, work and bounds; what the compiler makes of them is held against the table by `make aot`."""
    catalogue = cases.load_cases(list(Chip))
    assert catalogue.problems == ()
    table = readme.parse(TEXT)
    assert readme.differences(table, readme.rows_of(catalogue.cases), is_whole=True) == []
    assert {row["op"] for row in table.values()} <= {row["op"].strip("`") for row in rows_of_ops()}


def test_both_triton_versions_have_compiled_what_the_table_shows() -> None:
    """A case of one chip only has cells of that chip only."""
    empty = []
    for name, row in readme.parse(TEXT).items():
        for chip in Chip:
            cells = [cell for column, cell in row.items() if column.startswith(chip.name.lower())]
            if "-" in cells and set(cells) != {"-"}:
                empty.append(name)
    assert empty == []
