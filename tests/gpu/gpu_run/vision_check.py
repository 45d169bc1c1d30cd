"""Every vision op call beside `ref`, on this device and on the same inputs: two blocks of the released tower, random weights.

The batch has the smallest image, one whose grid hangs over both edges, and the most patches that an image can have.
"""

from importlib.resources import files
from typing import cast

import torch
from gpu_run.lockstep_verdicts import judge
from gpu_run.op_inputs import Maker
from gpu_run.sections import Bench, make_inputs

from prefill_engine.vision.plan import plan_image
from prefill_engine.vision.tower import VisionTower
from prefill_engine.vision.weights import VisionBlock, VisionParameters
from prefill_kernels.vision_ops import VisionOps
from prefill_plan.model_spec import VisionSpec, parse_model_spec
from prefill_testing.lockstep_ops import LockstepOps

SIZES = ((1, 1), (640, 480), (42882, 42))
NUM_BLOCKS = 2
COPIES = ("vision_merge", "vision_patches", "vision_spans")


def check_vision_ops(bench: Bench, *, ref: VisionOps, ops: VisionOps) -> None:
    """The release's widths; in a dry run the launches only."""
    config = (files("prefill_plan") / "released_config.json").read_bytes()
    model = parse_model_spec(config, source="config.json")
    assert model.vision is not None
    check_vision_batch(bench, model.vision, model.hidden_size, ref=ref, ops=ops, sizes=SIZES)


def check_vision_batch(
    bench: Bench,
    spec: VisionSpec,
    columns: int,
    *,
    ref: VisionOps,
    ops: VisionOps,
    sizes: tuple[tuple[int, int], ...],
) -> None:
    """One packed batch through a tower; one verdict per op into the results' correctness. columns: width of a row."""
    maker = make_inputs(bench)
    lockstep = LockstepOps(ref, ops)
    used = ops if bench.is_dry else cast(VisionOps, lockstep)
    tower = VisionTower(spec, random_tower(maker, spec, columns), ops=used, activation=torch.bfloat16)
    plans = [plan_image(*size, spec) for size in sizes]
    pixels = [maker.integers(0, 256, plan.height, plan.width, 3, dtype=torch.uint8) for plan in plans]
    tower.encode(pixels, plans)
    names = (name for name in vars(VisionOps) if not name.startswith("_"))
    verdicts = {f"vision {name}": "dry run" if bench.is_dry else "not called" for name in names}
    verdicts |= judge(lockstep.differences, prefix="vision", exact=COPIES)
    bench.log.results.setdefault("correctness", {}).update(verdicts)
    wrong = sum(verdict not in ("ok", "dry run") for verdict in verdicts.values())
    bench.log.say(f"vision: {len(verdicts)} ops, {sum(p.num_patches for p in plans)} patches, {wrong} differ from ref")


def random_tower(maker: Maker, spec: VisionSpec, columns: int) -> VisionParameters:
    """Weights that keep values near one, of NUM_BLOCKS blocks."""
    width, inner, cell = spec.hidden_size, spec.intermediate_size, spec.downsample_ratio**2
    patch = 3 * spec.patch_size**2

    def weight(num_out: int, num_in: int) -> torch.Tensor:
        return maker.normal(num_out, num_in, scale=num_in**-0.5)

    block = [
        VisionBlock(
            norm1=maker.normal(width),
            qkv_weight=weight(3 * width, width),
            qkv_bias=maker.normal(3 * width),
            out_weight=weight(width, width),
            out_bias=maker.normal(width),
            norm2=maker.normal(width),
            gate_up_weight=weight(2 * inner, width),
            down_weight=weight(width, inner),
        )
        for _ in range(NUM_BLOCKS)
    ]
    return VisionParameters(
        patch_weight=weight(width, patch),
        patch_bias=maker.normal(width),
        blocks=tuple(block),
        norm=maker.normal(width),
        aligner_in_weight=weight(columns, width * cell),
        aligner_in_bias=maker.normal(columns),
        aligner_out_weight=weight(columns, columns),
        aligner_out_bias=maker.normal(columns),
        image_start=maker.normal(columns),
        image_newline=maker.normal(columns),
        image_end=maker.normal(columns),
    )
