"""The table of compiled kernels in kernels/README.md: written from the gate's results, and held against them.

One row per case in use. Launch, work and families must be equal whatever the triton version; registers, shared and tensor
memory have a column per chip and version, and a run fills and checks the columns of its own version only. Pure text in and
out; `__main__` reads and writes the file.
"""

from collections.abc import Iterable, Sequence

from prefill_kernels.aot.gate import Result, occupancy
from prefill_kernels.aot.limits import bound_text
from prefill_kernels.aot_case import AotCase
from prefill_kernels.gpu.chip import Chip

BEGIN = "<!-- aot table: written by `python -m prefill_kernels.aot --write-readme`, checked by `make aot` -->"
END = "<!-- end of aot table -->"
VERSIONS = ("3.9.0", "3.6.0")
_NOT_RUN = "-"
_FIXED = ("case", "op", "shape", "MB", "GFLOP", "sm_90: matrix, launch, at best", "sm_100: matrix, launch, at best")

Table = dict[str, dict[str, str]]
"""Case name -> column -> cell."""


def columns(versions: Sequence[str] = VERSIONS) -> list[str]:
    """Header of the table."""
    return [*_FIXED, *(_version_column(chip, version) for chip in Chip for version in versions)]


def rows_of(cases: Iterable[tuple[Chip, AotCase]]) -> Table:
    """Cells that the cases alone determine: launch, work and bounds. Alternatives have no row."""
    table: Table = {}
    for chip, case in cases:
        if not case.default:
            continue
        row = table.setdefault(case.name, {"case": case.name, "op": case.op, "shape": case.shape})
        row["MB"] = _for_both(row.get("MB"), case.bytes_moved / 1e6)
        row["GFLOP"] = _for_both(row.get("GFLOP"), case.flops / 1e9)
        row[f"{chip.name.lower()}: matrix, launch, at best"] = (
            f"{case.mma.value}, {case.num_programs} x {case.num_warps} warps, {bound_text(case, chip)}"
        )
    return table


def table_of(results: Sequence[Result], version: str) -> Table:
    """rows_of, and what this triton version made of them."""
    table = rows_of((result.chip, result.case) for result in results)
    for result in results:
        figures = result.figures
        if result.case.default and figures is not None:
            tensor_memory = f", {figures.tensor_memory_columns} t" if figures.tensor_memory_columns else ""
            table[result.case.name][_version_column(result.chip, version)] = (
                f"{figures.registers} r, {figures.shared_bytes} B{tensor_memory}, {occupancy(result.chip, figures)}/SM"
            )
    return table


def parse(text: str) -> Table:
    """The table in a README.

    Raises:
        ValueError: no table between the two markers.
    """
    inside = text.partition(BEGIN)[2].partition(END)
    if not inside[1]:
        raise ValueError(f"no AOT table: expected lines between {BEGIN!r} and {END!r}")
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        for line in inside[0].splitlines()
        if line.startswith("|") and not line.startswith("| ---")
    ]
    header, *body = rows or [columns()]
    return {row[0]: dict(zip(header, row, strict=True)) for row in body}


def replaced(text: str, fresh: Table) -> str:
    """The README with the cells of `fresh`; columns of other versions keep what they have, vanished cases go."""
    before = parse(text)
    header = columns()
    lines = [_line(header), _line(["---"] * len(header))]
    for name, row in fresh.items():
        merged = before.get(name, {}) | row
        lines.append(_line([merged.get(column, _NOT_RUN) for column in header]))
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{rest.partition(END)[2]}"


def differences(committed: Table, fresh: Table, *, is_whole: bool) -> list[str]:
    """Where the committed table is not what these results say, cell by cell. is_whole: results cover every case."""
    found = [f"{name}: not in the table" for name in fresh if name not in committed]
    if is_whole:
        found += [f"{name}: in the table, but no such case" for name in committed if name not in fresh]
    for name, row in fresh.items():
        for column, cell in row.items():
            stands = committed.get(name, row).get(column, "")
            if stands != cell:
                found.append(f"{name}, {column}: the table says {stands!r}, the compiler {cell!r}")
    return found


def _for_both(of_other_chip: str | None, value: float) -> str:
    """Work of both chips in one cell where it is equal, else "sm_90 / sm_100"."""
    text = f"{value:.1f}"
    return text if of_other_chip in (None, text) else f"{of_other_chip} / {text}"


def _version_column(chip: Chip, version: str) -> str:
    return f"{chip.name.lower()} {version}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
