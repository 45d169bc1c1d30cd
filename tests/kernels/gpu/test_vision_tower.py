"""The golden tiny tower under the Triton vision ops, in the interpreter: call by call beside `ref`, and by the golden set."""

import inspect
import json
import shutil
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from prefill_engine.check.golden import check_golden
from prefill_engine.vision.plan import ImagePlan, plan_image
from prefill_engine.vision.tower import VisionTower
from prefill_engine.vision.weights import load_vision_parameters
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.triton_vision_ops import triton_vision_ops
from prefill_kernels.op_sets import load_ops
from prefill_kernels.vision_ops import VisionOps, load_vision_ops
from prefill_plan.model_spec import load_model_spec
from prefill_testing.lockstep_ops import LockstepOps
from prefill_testing.numeric import RELATIVE_L2, assert_bitwise, relative_l2

pytestmark = pytest.mark.usefixtures("poisoned")
both_chips = pytest.mark.parametrize("chip", list(Chip), ids=lambda chip: chip.name)
GOLDEN = Path(__file__).parents[2] / "golden" / "tiny_vision"
SIZES = [(5, 3), (65, 211)]
_COPIES = {"vision_patches", "vision_merge", "vision_spans"}
_ATTENTION_LIMIT = RELATIVE_L2[torch.bfloat16]
"""Relative L2: its probabilities are rounded to bfloat16, ref's are not."""
_LIMIT = 5e-4
"""Of the other ops that compute: a few values that another order of a sum has rounded the other way."""
_IMAGE_LIMIT = 1.5e-2
"""Of whole images against ref: those differences through three blocks of bfloat16 streams."""
_WORSE_THAN_REF = 1.25
"""Error of whole images over ref's own, both against float32."""


def _tower(ops: VisionOps, activation: torch.dtype = torch.bfloat16) -> VisionTower:
    spec = load_model_spec(GOLDEN)
    parameters = load_vision_parameters(GOLDEN, spec, device=torch.device("cpu"))
    return VisionTower(spec.vision, parameters, ops=ops, activation=activation)


def _images(tower: VisionTower, *sizes: tuple[int, int]) -> tuple[list[Tensor], list[ImagePlan]]:
    plans = [plan_image(*size, tower.spec) for size in sizes]
    source = np.random.default_rng(1)
    shapes = [(plan.height, plan.width, 3) for plan in plans]
    return [torch.from_numpy(source.integers(0, 256, shape, dtype=np.uint8)) for shape in shapes], plans


@both_chips
def test_every_op_of_a_real_batch_agrees_with_ref(chip: Chip) -> None:
    ops = LockstepOps(load_vision_ops("ref"), triton_vision_ops(chip))
    tower = _tower(cast(VisionOps, ops))
    tower.encode(*_images(tower, *SIZES))
    assert {difference.op for difference in ops.differences} == _names()
    for difference in ops.differences:
        if difference.op in _COPIES:
            assert difference.unequal == 0, difference
        else:
            limit = _ATTENTION_LIMIT if difference.op == "vision_attention" else _LIMIT
            assert difference.relative <= limit, difference


def test_whole_images_agree_with_ref_and_do_not_depend_on_their_batch() -> None:
    ref = load_vision_ops("ref")
    tower, towers = _tower(triton_vision_ops(Chip.SM_100)), (_tower(ref), _tower(ref, torch.float32))
    canvases, plans = _images(tower, *SIZES)
    batch = tower.encode(canvases, plans)
    for rows, same, wide in zip(batch, *(other.encode(canvases, plans) for other in towers), strict=True):
        assert relative_l2(rows, same) <= _IMAGE_LIMIT
        assert relative_l2(rows, wide) <= _WORSE_THAN_REF * relative_l2(same, wide)
    assert_bitwise(tower.encode(canvases[1:2], plans[1:2])[0], batch[1])


def test_golden_images_pass_the_check_alone_and_packed(tmp_path: Path) -> None:
    small = tmp_path / "set"
    shutil.copytree(GOLDEN, small)
    manifest = json.loads((small / "manifest.json").read_bytes())
    manifest["images"] = {name: manifest["images"][name] for name in ("pad_rows", "tiny")}
    manifest["real_constants"] = {}
    (small / "manifest.json").write_text(json.dumps(manifest))
    report = check_golden(small, ops=load_ops("ref"), vision_ops=triton_vision_ops(Chip.SM_90), regimes=["bf16"])
    assert [finding for finding in report.findings if not finding.passed] == []
    assert {(f.group, f.tensor) for f in report.findings} >= {("image", "vit_out max"), ("packed batch", "span")}


def _names() -> set[str]:
    return {name for name in vars(VisionOps) if not name.startswith("_")}


@both_chips
def test_the_set_has_exactly_the_ops_of_the_protocol(chip: Chip) -> None:
    ops = triton_vision_ops(chip)
    assert set(vars(ops)) == _names()
    for name in _names():
        expected = list(inspect.signature(getattr(VisionOps, name)).parameters.values())[1:]
        actual = [p for p in inspect.signature(getattr(ops, name)).parameters.values() if p.name != "chip"]
        assert [(p.name, p.kind) for p in actual] == [(p.name, p.kind) for p in expected]


def test_other_activations_are_refused_before_any_work() -> None:
    tower = _tower(triton_vision_ops(Chip.SM_90), torch.float32)
    with pytest.raises(ValueError, match="op set 'ref' does both"):
        tower.encode(*_images(tower, (5, 3)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_set_is_refused() -> None:
    with pytest.raises(ValueError, match="runs on a CUDA device of compute capability"):
        load_vision_ops("triton")
