"""`python -m prefill_kernels.aot`: compiles every kernel for sm_90 and sm_100 without a GPU and judges the result."""

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import triton  # type: ignore[import-untyped]

from prefill_kernels.aot import cases, readme
from prefill_kernels.aot.compile import compile_case, empty_cache, require_compiler
from prefill_kernels.aot.figures import Figures
from prefill_kernels.aot.gate import Result, violations
from prefill_kernels.aot.report import render_json, render_table
from prefill_kernels.aot_case import AotCase
from prefill_kernels.gpu.chip import Chip

_CHIPS = {chip.name.lower(): chip for chip in Chip}
_DESCRIPTION = """\
Compiles every kernel at the shapes of the released model with the ptxas inside the triton wheel (no GPU needed), prints
what came out, and checks it: no spills, shared and tensor memory within the chip, no trap stub, the expected matrix
instructions only, compile time within a bound. Exit 0: all well; 1: violations, each named with its value and its limit;
2: nothing could be compiled."""


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="python -m prefill_kernels.aot",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = arguments.add_argument
    add("--arch", choices=sorted(_CHIPS), action="append", default=[], help="chip (repeatable); default: all")
    add(
        "--op",
        action="append",
        default=[],
        metavar="NAME",
        help="only cases of this op of the Ops protocol, or whose name starts with NAME (repeatable)",
    )
    add(
        "--module",
        action="append",
        default=[],
        metavar="NAME",
        help="only cases of prefill_kernels.gpu.NAME (repeatable)",
    )
    add("--all", action="store_true", help="alternatives too: compiled and printed, but not judged")
    add("--jobs", type=int, default=multiprocessing.cpu_count(), metavar="N", help="processes; default: one per core")
    add("--json", action="store_true", help="one JSON object instead of the table")
    add("--check-readme", type=Path, metavar="FILE", help="also compare with the table in FILE (kernels/README.md)")
    add("--write-readme", type=Path, metavar="FILE", help="write the table in FILE; columns of other versions stay")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    chips = [_CHIPS[name] for name in dict.fromkeys(args.arch)] or list(Chip)
    catalogue = cases.load_cases(chips, args.module or cases.GPU_MODULES)
    chosen = [
        (chip, case) for chip, case in catalogue.cases if _is_chosen(case, args.op) and (case.default or args.all)
    ]
    is_whole = not (args.op or args.module) and len(chips) == len(Chip)
    try:
        require_compiler()
        if not chosen:
            raise RuntimeError(f"no case of {', '.join(args.op) or 'any module'}: {'; '.join(catalogue.problems)}")
        if args.write_readme is not None and not is_whole:
            raise RuntimeError("--write-readme writes every row: not with --op, --module or one --arch")
    except RuntimeError as error:
        print(f"prefill_kernels.aot: {error}", file=sys.stderr)
        return 2
    results = _compiled(chosen, jobs=max(1, min(args.jobs, len(chosen))))
    problems = [] if args.op else list(catalogue.problems)
    problems += _readme(args.check_readme, args.write_readme, results, is_whole=is_whole)
    render = render_json if args.json else render_table
    print(render(results, problems, triton_version=triton.__version__))
    return 1 if problems or any(violations(result) for result in results) else 0


def _is_chosen(case: AotCase, names: Sequence[str]) -> bool:
    return not names or any(case.op == name or case.name.startswith(name) for name in names)


def _compiled(chosen: Sequence[tuple[Chip, AotCase]], *, jobs: int) -> list[Result]:
    with empty_cache():
        if jobs == 1:
            outcomes = [_outcome(case, chip) for chip, case in chosen]
        else:
            # Forked: kernels are functions that cannot be pickled, so workers inherit the list and get indices.
            fork = multiprocessing.get_context("fork")
            with ProcessPoolExecutor(jobs, mp_context=fork, initializer=_inherit, initargs=(chosen,)) as pool:
                outcomes = list(pool.map(_inherited_outcome, range(len(chosen))))
    return [
        Result(case=case, chip=chip, figures=figures, failure=failure)
        for (chip, case), (figures, failure) in zip(chosen, outcomes, strict=True)
    ]


def _outcome(case: AotCase, chip: Chip) -> tuple[Figures | None, str]:
    try:
        return compile_case(case, chip), ""
    except Exception as error:  # whatever the compiler raises is a finding about this case
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        told = next((line for line in lines if "fatal" in line or "error:" in line), lines[-1])
        return None, f"{type(error).__name__}: {told[:300]}"


_inherited: list[tuple[Chip, AotCase]] = []
"""Of a worker process: the cases, set once by `_inherit`."""


def _inherit(chosen: Sequence[tuple[Chip, AotCase]]) -> None:
    _inherited[:] = chosen


def _inherited_outcome(index: int) -> tuple[Figures | None, str]:
    chip, case = _inherited[index]
    return _outcome(case, chip)


def _readme(check: Path | None, write: Path | None, results: Sequence[Result], *, is_whole: bool) -> list[str]:
    """Writes and compares the table, as asked; returns the differences."""
    fresh = readme.table_of(results, triton.__version__)
    if write is not None:
        write.write_text(readme.replaced(write.read_text(), fresh))
    if check is None:
        return []
    found = readme.differences(readme.parse(check.read_text()), fresh, is_whole=is_whole)
    return [f"{check}: {text}" for text in found]


if __name__ == "__main__":
    sys.exit(main())
