"""What the AOT gate says about given figures, cases and README tables; nothing is compiled here."""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import triton
import triton.language as tl

from prefill_kernels.aot import cases, figures, readme
from prefill_kernels.aot.figures import Figures
from prefill_kernels.aot.gate import Result, violations
from prefill_kernels.aot.limits import best_time, programs_per_sm
from prefill_kernels.aot.report import render_json, render_table
from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip

GOOD = Figures(
    registers=168,
    stack_bytes=0,
    spills=0,
    shared_bytes=98304,
    tensor_memory_columns=0,
    num_warps=8,
    mma={"wgmma bf16": 4},
    is_trap_stub=False,
    compile_cpu_s=2.0,
)
CASE = AotCase(
    op="linear",
    name="linear wq_b",
    shape="32768 x 1280 -> 32768",
    kernel=None,
    signature={},
    constexprs={},
    aligned=(),
    num_warps=8,
    num_stages=3,
    mma=Mma.BF16,
    num_programs=65536,
    bytes_moved=2_273_000_000,
    flops=2_748_779_069_440,
)


def judged(**changes: Any) -> list[str]:
    return violations(Result(case=CASE, chip=Chip.SM_90, figures=replace(GOOD, **changes)))


def test_good_figures_pass() -> None:
    assert judged() == []
    assert judged(shared_bytes=227 * 1024) == []
    for mma, found in ((Mma.NONE, {}), (Mma.SYNC_BF16, {"mma.sync bf16": 12})):
        result = Result(case=replace(CASE, mma=mma), chip=Chip.SM_90, figures=replace(GOOD, mma=found))
        assert violations(result) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spills": 3, "stack_bytes": 72}, "3 spill instructions, 72 stack bytes: expected 0 and 0"),
        ({"stack_bytes": 8}, "0 spill instructions, 8 stack bytes: expected 0 and 0"),
        ({"shared_bytes": 232449}, "232449 bytes of shared memory: at most 232448"),
        ({"tensor_memory_columns": 64}, "64 columns of tensor memory: at most 0"),
        ({"registers": 255, "num_warps": 16}, "255 registers x 16 warps: not one program fits an SM"),
        ({"compile_cpu_s": 61.0}, "compiled in 61 s of processor time: at most 60"),
    ],
)
def test_each_size_over_its_limit_is_named_with_both(changes: dict[str, object], message: str) -> None:
    assert judged(**changes) == [message]


@pytest.mark.parametrize(
    ("chip", "expected", "found", "message"),
    [
        (Chip.SM_90, Mma.BF16, {}, "matrix instructions none: expected wgmma bf16 only"),
        (Chip.SM_90, Mma.BF16, {"mma.sync bf16": 8}, "matrix instructions mma.sync bf16: expected wgmma bf16 only"),
        (
            Chip.SM_100,
            Mma.SYNC_BF16,
            {"tcgen05 bf16": 1},
            "matrix instructions tcgen05 bf16: expected mma.sync bf16 only",
        ),
        (
            Chip.SM_100,
            Mma.SYNC_BF16,
            {"tcgen05 bf16": 8},
            "matrix instructions tcgen05 bf16: expected mma.sync bf16 only",
        ),
        (Chip.SM_90, Mma.NONE, {"wgmma tf32": 1}, "matrix instructions wgmma tf32: expected none only"),
        (
            Chip.SM_100,
            Mma.BLOCK_SCALED,
            {"tcgen05 bf16": 2, "tcgen05 block_scaled": 2},
            "matrix instructions tcgen05 bf16, tcgen05 block_scaled: expected tcgen05 block_scaled only",
        ),
        (
            Chip.SM_90,
            Mma.BLOCK_SCALED,
            {"wgmma bf16": 2},
            "expects block_scaled matrix instructions, which sm_90 does not have",
        ),
    ],
)
def test_other_matrix_instructions_than_expected_are_named(
    chip: Chip, expected: Mma, found: dict[str, int], message: str
) -> None:
    result = Result(case=replace(CASE, mma=expected), chip=chip, figures=replace(GOOD, mma=found))
    assert violations(result) == [message]


def test_a_trap_stub_is_refused_though_it_has_four_registers() -> None:
    stub = replace(GOOD, registers=4, tensor_memory_columns=1024, mma={}, is_trap_stub=True)
    assert violations(Result(case=CASE, chip=Chip.SM_100, figures=stub)) == [
        "traps instead of computing (the PTX has a trap instruction): expected none",
        "1024 columns of tensor memory: at most 512",
        "matrix instructions none: expected tcgen05 bf16 only",
    ]


def test_what_does_not_compile_is_refused_and_alternatives_are_not_judged() -> None:
    failed = Result(case=CASE, chip=Chip.SM_90, figures=None, failure="CompilationError: at 3:4")
    assert violations(failed) == ["does not compile: CompilationError: at 3:4"]
    assert violations(replace(failed, case=replace(CASE, default=False))) == []
    spilled = replace(GOOD, spills=400)
    assert violations(Result(case=replace(CASE, default=False), chip=Chip.SM_90, figures=spilled)) == []


def test_matrix_instructions_are_told_apart() -> None:
    ptx = """
        wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, %p1, 1, 1, 0, 0;
        wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%r1}, %rd1;
        wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {%r1}, %rd1;
        @%p17 tcgen05.mma.cta_group::1.kind::f16 [ %r154 + 0 ], %rd43, %rd44, %r61, %p17;
        @%p17 tcgen05.mma.cta_group::1.kind::tf32 [ %r154 + 0 ], %rd43;
        tcgen05.mma.cta_group::1.kind::f8f6f4 [ %r1 ], %rd1;
        tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [ %r1 ], %rd1;
        tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::2X [ %r1 ], %rd1;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %r1 }, { %r2 };
        wgmma.commit_group.sync.aligned;
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r187];
        """
    assert figures.matrix_instructions(ptx) == {
        "mma.sync bf16": 1,
        "tcgen05 bf16": 1,
        "tcgen05 block_scaled": 2,
        "tcgen05 fp8": 1,
        "tcgen05 tf32": 1,
        "wgmma bf16": 1,
        "wgmma fp8": 1,
        "wgmma tf32": 1,
    }


def test_resource_usage_is_read_or_refused() -> None:
    text = "Fatbin elf code:\n Function k:\n  REG:106 STACK:72 SHARED:0 LOCAL:0 CONSTANT[0]:572"
    assert figures.registers_and_stack(text) == (106, 72)
    with pytest.raises(ValueError, match=r"cuobjdump -res-usage printed 'nothing': expected REG:.. STACK:.."):
        figures.registers_and_stack("nothing")
    assert figures.count_spills("/*0*/ LDL.64 R2, [R1] ;\n STL [R1+0x4], R3 ;\n LDG.E R4, [R2] ;") == 2
    assert figures.is_trap_stub("{\n\ttrap;\n}") is True
    assert figures.is_trap_stub("// would trap; if it could\n") is False


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "tensor_memory", "expected"),
    [
        (32, 4, 0, 0, 16),  # 64 warps
        (24, 1, 0, 0, 32),  # 32 programs
        (128, 8, 0, 0, 2),  # registers: 65,536 / (128 x 256)
        (129, 8, 0, 0, 1),  # rounded up to 136 a thread
        (64, 4, 99328, 0, 2),  # shared memory with the driver's 1 KiB each
        (64, 4, 116 << 10, 0, 1),
        (64, 4, 16 << 10, 256, 2),  # tensor memory
        (255, 16, 0, 0, 0),
    ],
)
def test_occupancy(registers: int, warps: int, shared: int, tensor_memory: int, expected: int) -> None:
    found = programs_per_sm(
        Chip.SM_100,
        registers=registers,
        num_warps=warps,
        shared_bytes=shared,
        tensor_memory_columns=tensor_memory,
    )
    assert found == expected


def test_the_best_time_names_what_bounds_it() -> None:
    seconds, bound = best_time(CASE, Chip.SM_90)
    assert (bound, round(seconds * 1e6)) == ("compute", 2779)
    seconds, bound = best_time(replace(CASE, flops=0), Chip.SM_100)
    assert (bound, round(seconds * 1e6)) == ("memory", 284)


def test_reports_name_every_violation_and_the_verdict() -> None:
    results = [Result(case=CASE, chip=Chip.SM_90, figures=replace(GOOD, spills=2))]
    text = render_table(results, ["prefill_kernels.gpu.rows has no aot_cases"], triton_version="3.9.0")
    assert "VIOLATION  linear wq_b sm_90: 2 spill instructions, 0 stack bytes: expected 0 and 0" in text
    assert text.endswith(
        "VIOLATION  prefill_kernels.gpu.rows has no aot_cases\ntriton 3.9.0: 1 compilations, 2 VIOLATIONS"
    )
    assert '"passed": false' in render_json(results, [], triton_version="3.9.0")
    assert render_table([], [], triton_version="3.9.0").endswith("no violations")


# ---- the catalogue


@triton.jit
def _first_kernel(x_ptr):
    tl.store(x_ptr, 1)


@triton.jit
def _second_kernel(x_ptr):
    tl.store(x_ptr, 2)


@pytest.fixture
def fake_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("prefill_kernels.gpu.fake")
    module.__spec__ = ModuleSpec(module.__name__, None)
    for name, kernel in (("_first_kernel", _first_kernel), ("_second_kernel", _second_kernel)):
        monkeypatch.setattr(kernel, "__module__", module.__name__)
        setattr(module, name, kernel)
    monkeypatch.setitem(sys.modules, "prefill_kernels.gpu.fake", module)
    return module


def test_the_catalogue_tells_missing_modules_and_equal_names(fake_module: ModuleType) -> None:
    catalogue = cases.load_cases(list(Chip), ("nowhere", "fake"))
    assert catalogue.problems == (
        "prefill_kernels.gpu.nowhere does not import: No module named 'prefill_kernels.gpu.nowhere'",
        "prefill_kernels.gpu.fake has no aot_cases",
    )
    twice = replace(CASE, kernel=_first_kernel)
    fake_module.aot_cases = lambda _chip: (twice, twice)  # type: ignore[attr-defined]
    assert cases.load_cases([Chip.SM_90], ("fake",)).problems == ("2 AOT cases are named 'linear wq_b' for sm_90",)


def test_a_kernel_without_a_case_is_named(fake_module: ModuleType) -> None:
    assert cases.uncovered([fake_module], [replace(CASE, kernel=_first_kernel)]) == [
        "prefill_kernels.gpu.fake._second_kernel has no AOT case"
    ]


# ---- the table in the README


def results_of(registers: int) -> list[Result]:
    other = replace(CASE, name="linear wkv", num_programs=2048)
    tensor = replace(GOOD, tensor_memory_columns=256, registers=registers)
    return [
        Result(case=case, chip=chip, figures=tensor if chip is Chip.SM_100 else replace(GOOD, registers=registers))
        for case in (CASE, other, replace(CASE, name="linear slow", default=False))
        for chip in Chip
    ]


EMPTY = f"# kernels\n\n{readme.BEGIN}\n{readme.END}\n\nmore\n"


def test_a_written_table_equals_what_was_written_per_version() -> None:
    new, old = readme.table_of(results_of(168), "3.9.0"), readme.table_of(results_of(172), "3.6.0")
    text = readme.replaced(readme.replaced(EMPTY, new), old)
    assert text.startswith("# kernels\n")
    assert text.endswith("\n\nmore\n")
    table = readme.parse(text)
    assert list(table) == ["linear wq_b", "linear wkv"]
    assert table["linear wkv"]["sm_90 3.9.0"] == "168 r, 98304 B, 1/SM"
    assert table["linear wkv"]["sm_100 3.6.0"] == "172 r, 98304 B, 256 t, 1/SM"
    assert readme.differences(table, new, is_whole=True) == []
    assert readme.differences(table, old, is_whole=True) == []


def test_differences_name_the_cell_and_missing_rows() -> None:
    table = readme.parse(readme.replaced(EMPTY, readme.table_of(results_of(168), "3.9.0")))
    found = readme.differences(table, readme.table_of(results_of(170)[:1], "3.9.0"), is_whole=True)
    assert found == [
        "linear wkv: in the table, but no such case",
        "linear wq_b, sm_90 3.9.0: the table says '168 r, 98304 B, 1/SM', the compiler '170 r, 98304 B, 1/SM'",
    ]
    new = readme.table_of([replace(results_of(168)[0], case=replace(CASE, name="new"))], "3.9.0")
    assert readme.differences(table, new, is_whole=False) == ["new: not in the table"]
    with pytest.raises(ValueError, match="no AOT table: expected lines between"):
        readme.parse("# kernels")
