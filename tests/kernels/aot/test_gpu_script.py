"""The GPU script without a GPU: its dry run end to end, and the arithmetic of its report."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.op_sets import load_ops
from prefill_kernels.ops import Ops
from prefill_kernels.vision_ops import VisionOps, load_vision_ops
from prefill_plan.model_spec import load_model_spec
from prefill_testing.released_step import StepShape, released_cache, released_spec
from prefill_testing.shapes import ODD

VISION_OPS = {name for name in vars(VisionOps) if not name.startswith("_")}
ROOT = Path(__file__).parents[3]


@pytest.fixture
def gpu_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script's package."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    import gpu_run.report
    import gpu_run.sections
    import gpu_run.steps

    return gpu_run


@pytest.mark.slow
def test_dry_run_goes_through_every_part_and_measures_nothing(tmp_path: Path) -> None:
    done = _run("--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = tmp_path.glob("gpu_meta_*.json")
    result = json.loads(path.read_text())
    assert not [name for name in result if name.endswith(" failed")]
    assert result["skipped"] == []
    assert result["dry_run_launches"] > 1000
    assert {row["ms"] for row in result["kernels"] + result["steps"]} == {None}
    assert set(result["correctness"].values()) == {"dry run"}
    assert result["correctness"].keys() >= {f"vision {name}" for name in VISION_OPS}
    assert result["correctness"].keys() >= {"step without host sync", "step as a CUDA graph"}
    variants = {"linear wq_b, expanded", "linear wo_b, cuBLAS", "routed_experts, promoted fp8"}
    assert {row["op"] for row in result["kernels"]} >= variants
    assert [row for row in result["kernels"] if "error" in row] == []
    (table,) = tmp_path.glob("gpu_meta_*.md")
    assert "Ops equal to `ref`: 0 of" in table.read_text()


def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path: Path) -> None:
    done = _run("--out", str(tmp_path))
    assert done.returncode == 1
    assert "torch sees no CUDA device; nothing was measured" in done.stderr
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_the_budget_is_named(gpu_run: Any) -> None:
    log = gpu_run.report.RunLog(budget=5.0)
    assert not log.has_time("steps", 90)
    assert log.has_time("calibration", 1)
    assert log.skipped[0].startswith("steps: 90 s needed, ")


def test_fit_and_roofline(gpu_run: Any) -> None:
    fit = gpu_run.steps.fit_line([(4096, 65.96), (8192, 106.92), (32768, 352.68)])
    assert fit["a_ms"] == pytest.approx(25.0, abs=1e-6)
    assert fit["b_us_per_token"] == pytest.approx(10.0, abs=1e-6)
    assert gpu_run.steps.fit_line([(4096, 66.0)]) == {"a_ms": None, "b_us_per_token": None}
    peaks = {"bf16_tflops": 800.0, "copy_gb_per_s": 4000.0}
    bound = gpu_run.sections.roofline(8e12, 4e9, 20.0, peaks)
    assert bound == {"bound": "bf16 MMA", "share": pytest.approx(0.5)}
    assert gpu_run.sections.roofline(0, 4e9, 2.0, peaks) == {"bound": "memory", "share": pytest.approx(0.5)}
    assert gpu_run.sections.roofline(8e12, 4e9, None, peaks)["share"] is None


def test_comparison_tells_what_differs(gpu_run: Any) -> None:
    compare = gpu_run.sections.compare
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert compare([x], [x], exact=True) == "ok"
    assert compare([x], [x + 0.5], exact=False).startswith("output 0: relative L2 error")
    assert compare([x * float("nan")], [x], exact=False).startswith("output 0: relative L2 error nan")
    assert compare([x.int()], [x.int() + 1], exact=False) == "output 0: 0.000 % of values equal"
    assert compare([x[:1]], [x], exact=False).startswith(
        "output 0: torch.bfloat16 (1, 64), ref torch.bfloat16 (64, 64)"
    )


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(
        [ROOT / "tests" / "gpu" / "run.sh", *arguments], env=environment, capture_output=True, text=True, timeout=280
    )


def test_an_op_that_writes_nothing_fails_the_tiny_model(gpu_run: Any) -> None:
    from gpu_run.tiny_model_check import check_tiny_model

    ref = load_ops("ref")
    faulty = SimpleNamespace(**{name: getattr(ref, name) for name in ref.__all__})
    faulty.store_main = lambda *_args, **_kwargs: None
    verdicts = []
    for ops in (ref, faulty):
        log = gpu_run.report.RunLog(budget=99.0)
        check_tiny_model(SimpleNamespace(ref=ref, ops=ops, device=torch.device("cpu"), log=log))
        verdicts.append({name for name, verdict in log.results["correctness"].items() if verdict != "ok"})
    assert verdicts == [set(), {"tiny model store_main"}]


@pytest.mark.parametrize(
    ("op", "change", "expected"),
    [
        ("rms_norm", lambda out: out, {}),
        ("vision_attention", lambda out: out.neg(), {"vision vision_attention": "L2 2.00e+00"}),
        ("vision_linear", lambda out: out * 1.03, {"vision vision_linear": "e-02"}),
        # One bit of one value: what only copies must be right in every one.
        ("vision_merge", lambda out: _flip(out), {"vision vision_merge": "unequal"}),
    ],
    ids=["all right", "negated", "three percent", "one bit"],
)
def test_a_vision_op_that_is_wrong_is_named(gpu_run: Any, op: str, change: Any, expected: dict[str, str]) -> None:
    from gpu_run.vision_check import check_vision_batch

    ref = load_vision_ops("ref")
    faulty = SimpleNamespace(**{name: getattr(ref, name) for name in VISION_OPS})
    setattr(faulty, op, lambda *args, **kwargs: change(getattr(ref, op)(*args, **kwargs)))
    model = load_model_spec(ROOT / "tests" / "golden" / "tiny_vision")
    log = gpu_run.report.RunLog(budget=99.0)
    bench = SimpleNamespace(device=torch.device("cpu"), log=log, is_dry=False)
    check_vision_batch(bench, model.vision, model.hidden_size, ref=ref, ops=faulty, sizes=((5, 3), (65, 211)))
    verdicts = log.results["correctness"]
    assert verdicts.keys() == {f"vision {name}" for name in VISION_OPS}
    wrong = {name: verdict for name, verdict in verdicts.items() if verdict != "ok"}
    assert wrong.keys() == expected.keys()
    assert all(words in wrong[name] for name, words in expected.items()), wrong


def _flip(out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out.view(torch.int16)[-1, -1] ^= 1
    return out


@pytest.fixture
def bench(gpu_run: Any) -> Any:
    """A bench on the CPU, where `ref` plays the GPU's ops, too."""
    ref = load_ops("ref")
    log = gpu_run.report.RunLog(budget=999.0)
    return SimpleNamespace(device=torch.device("cpu"), log=log, ref=ref, ops=ref, is_dry=False)


def test_every_op_case_can_be_computed_and_covers_the_protocol(gpu_run: Any, bench: Any) -> None:
    """The dry run has no values and never calls `ref`. Odd widths, so that a case that only fits the release's shows."""
    called: set[str] = set()

    class Noted:
        def __getattr__(self, name: str) -> Any:
            called.add(name)
            return getattr(load_ops("ref"), name)

    bench.ops = Noted()
    gpu_run.sections.check_ops(bench, shapes=ODD, rows=23, entries=200)
    verdicts = bench.log.results["correctness"]
    assert {name: verdict for name, verdict in verdicts.items() if verdict != "ok"} == {}
    assert called == {name for name in vars(Ops) if not name.startswith("_")}


def test_ops_that_are_wrong_fail_their_cases_and_no_others(gpu_run: Any, bench: Any) -> None:
    """Nothing stored, nothing scattered, a ring that is not written, candidates that are not heeded."""
    ref = bench.ref

    def leaves_the_ring(latent: Any, score: Any, norm: Any, ring: Any, *rest: Any, **options: Any) -> Any:
        return ref.pool_pairs(latent, score, norm, ring.clone(), *rest, **options)

    faulty = {
        "store_main": lambda *_args, **_options: None,
        "scatter_rows": lambda *_args, **_options: None,
        "pool_pairs": leaves_the_ring,
        "index_select": lambda *args, **options: ref.index_select(*args, **(options | {"candidates_NB": None})),
    }
    bench.ops = SimpleNamespace(**{name: getattr(ref, name) for name in ref.__all__} | faulty)
    gpu_run.sections.check_ops(bench, shapes=ODD, rows=23, entries=200)
    wrong = {name for name, verdict in bench.log.results["correctness"].items() if verdict != "ok"}
    assert wrong == {
        "store_main, load_main",
        "scatter_rows, decode_window",
        "pool_pairs",
        "index_select inside candidates",
    }


def test_the_cache_of_a_timed_step_holds_values(gpu_run: Any) -> None:
    """Every section decodes to finite values of a key's size; with zeros all rows would select the same entries."""
    spec = released_spec()
    shape = StepShape(rows=256, context=256, is_last=True)
    cache = released_cache(spec, shape, torch.device("cpu"))
    gpu_run.steps.fill_cache(cache, spec, torch.Generator().manual_seed(1))
    ref, slots = load_ops("ref"), torch.arange(100, dtype=torch.int32)
    for source in cache.layout.sources:
        pages = cache.index_pages(source.layer)
        values = (
            ref.load_main(cache.main_pages(source.layer), slots, record_format="fp4", numerics=PRODUCTION),
            ref.load_index(*pages, slots, numerics=PRODUCTION).data,
            ref.decode_window(cache.window_ring(source.layer)[0, :100], numerics=PRODUCTION),
        )
        for read in values:
            assert read.isfinite().all()
            assert 0.1 < read.float().std() < 10, source.layer


@pytest.mark.parametrize(
    ("syncs", "replayed", "expected"),
    [
        (False, 3.0, ["ok", "ok"]),
        (True, 3.0, ["RuntimeError: called a synchronizing CUDA operation", "ok"]),
        (False, 4.0, ["ok", "logits of 256 rows differ from those of the same step without a graph"]),
    ],
    ids=["all right", "a sync", "a graph that computes something else"],
)
def test_step_checks_tell_a_sync_and_a_graph_that_differs(
    gpu_run: Any, bench: Any, monkeypatch: pytest.MonkeyPatch, syncs: bool, replayed: float, expected: list[str]
) -> None:
    """CUDA's part is played: the mode, the capture and the replay."""
    from gpu_run import step_checks

    mode, logits = ["default"], torch.zeros(1, 7)

    def forward(_batch: Any, _cache: Any, **_options: Any) -> Any:
        if syncs and mode[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return SimpleNamespace(logits=logits.fill_(3.0))

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.append)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: logits.fill_(replayed)))
    monkeypatch.setattr(torch.cuda, "graph", lambda _graph: nullcontext())
    monkeypatch.setattr(step_checks, "ROWS", 256)
    monkeypatch.setattr(step_checks, "CONTEXT", 256)
    bench.watch = SimpleNamespace(time=lambda *_args, **_options: SimpleNamespace(median=1.5))
    step_checks.check_step(bench, SimpleNamespace(spec=released_spec(), forward=forward))
    assert [bench.log.results["correctness"][name] for name in step_checks.NAMES] == expected
    assert mode[-1] == "default"
    assert bench.log.results.get("graph_ms") == (1.5 if replayed == 3.0 else None)
