"""Runs every image of a golden vision set through our preprocessing and tower and compares every tensor.

Called by check.golden. The images are encoded alone and once more in one packed batch, which must give the same bits. The trap:
the expected plans are the release's, which plans once; so a size that is no fixed point is checked by plan_once here, while the
engine would count it by plan_image (decisions C53).
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefill_engine.check.compare import Finding, Judge, Limits, SpreadLimits
from prefill_engine.check.vision_set import PlanEntry, VisionSet
from prefill_engine.vision.patches import pack_images
from prefill_engine.vision.pixels import check_pillow, fit_canvas
from prefill_engine.vision.placeholders import expand_placeholders
from prefill_engine.vision.plan import ImagePlan, fit_content, plan_once, span_roles
from prefill_engine.vision.tower import VisionTower
from prefill_engine.vision.weights import load_vision_parameters
from prefill_kernels.pixel_levels import pixel_levels
from prefill_kernels.vision_ops import VisionOps
from prefill_plan.model_spec import VisionSpec, load_model_spec, released_model_spec

VISION_REGIMES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# README of the vision set, "Tolerances".
_TOLERANCES = {"patch_embed": 2e-5, "vit_out": 1e-4, "downsampled": 1e-4, "aligner_out": 1e-4, "span": 1e-4}
_BLOCK_TOLERANCE = 2e-4
_EMBEDS_TOLERANCE = 1e-4
_BF16 = SpreadLimits(largest=0.2, quantile99=0.1, mean=0.03)
_JUDGED_IN_BF16 = ("vit_out", "aligner_out", "span")
_ROW_PICKED = ("patch_embed", "block")
"""Tensors of which a case may hold only the patches of its `rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """canvas: [height, width, 3] uint8. expected: the case file."""

    name: str
    plan: ImagePlan
    canvas: Tensor
    expected: dict[str, Tensor]


class VisionCheck:
    """Checks one set, regime by regime; findings and unknown grow."""

    def __init__(self, golden: VisionSet, *, ops: VisionOps, on_case: Callable[[str], None]) -> None:
        check_pillow()
        self.findings: list[Finding] = []
        self.unknown: list[str] = []
        self._golden = golden
        self._ops = ops
        self._on_case = on_case
        self._model = load_model_spec(golden.path)
        self._parameters = load_vision_parameters(golden.path, self._model, device=torch.device("cpu"))
        assert self._model.vision is not None, "the loader has refused that"
        self._spec: VisionSpec = self._model.vision
        self._cases = [self._case(name) for name in golden.manifest.images]

    def run(self, regime: str) -> None:
        """regime: a key of VISION_REGIMES. Plans, pixels and the prompt are compared in fp32 only, they have no rounding."""
        tower = VisionTower(self._spec, self._parameters, ops=self._ops, activation=VISION_REGIMES[regime])
        alone = [self._image(tower, case, regime) for case in self._cases]
        packed = tower.encode([case.canvas for case in self._cases], [case.plan for case in self._cases])
        for case, one, other in zip(self._cases, alone, packed, strict=True):
            self._judge(regime, "packed batch", case.name).exact("span", other, one)
        if regime == "fp32":
            for case in self._cases:
                self._plan(case)
            self._release()
            self._prompt(alone)

    def _case(self, name: str) -> _Case:
        image = self._golden.image(name)
        plan = plan_once(image.width, image.height, self._spec)
        canvas = torch.from_numpy(fit_canvas(image, plan))
        return _Case(name=name, plan=plan, canvas=canvas, expected=self._golden.tensors(name))

    def _image(self, tower: VisionTower, case: _Case, regime: str) -> Tensor:
        """Every expected tensor of one image; its [tokens, columns] rows."""
        self._on_case(f"{self._golden.name} {regime} {case.name}")
        seen: dict[str, Tensor] = {}
        (rows,) = tower.encode([case.canvas], [case.plan], observe=seen.__setitem__)
        for name, want in case.expected.items():
            if name in ("rows", "token_types", "patches"):
                continue
            if name not in seen:
                self._note_unknown(f"{case.name}/{name}")
                continue
            got = seen[name]
            if "rows" in case.expected and name.startswith(_ROW_PICKED):
                got = got[case.expected["rows"].long()]
            if regime == "fp32":
                tolerance = _BLOCK_TOLERANCE if name.startswith("block") else _TOLERANCES[name]
                self._judge(regime, "image", case.name, tolerance).values(name, got, want)
            elif name in _JUDGED_IN_BF16:
                self._judge(regime, "image", case.name).spread(name, got, want, _BF16)
        return rows

    def _plan(self, case: _Case) -> None:
        """Sizes, patches and roles: exact."""
        judge = self._judge("fp32", "image", case.name)
        entry = self._golden.manifest.images[case.name]
        judge.count("plan", _num_differences(case.plan, entry), 0)
        patches = _patches(case.canvas, case.plan, self._spec, self._ops)
        judge.count("patches_sha256", _sha256(patches) != entry.patches_sha256, 0)
        if "patches" in case.expected:
            judge.exact("patches", patches, case.expected["patches"].flatten(1))
        if "token_types" in case.expected:
            judge.exact("token_types", torch.from_numpy(span_roles(case.plan)), case.expected["token_types"])

    def _release(self) -> None:
        """Plan and hash of the patches under the release's constants."""
        spec = released_model_spec().vision
        assert spec is not None, "the release has a tower"
        for name, entry in self._golden.manifest.real_constants.items():
            self._on_case(f"{self._golden.name} release constants {name}")
            judge = self._judge("fp32", "release constants", name)
            image = self._golden.image(name)
            plan = plan_once(image.width, image.height, spec)
            judge.count("plan", _num_differences(plan, entry), 0)
            patches = _patches(torch.from_numpy(fit_canvas(image, plan)), plan, spec, self._ops)
            judge.count("patches_sha256", _sha256(patches) != entry.patches_sha256, 0)

    def _prompt(self, spans: Sequence[Tensor]) -> None:
        """One placeholder per image -> ids, roles and the embedding rows with the spans merged in."""
        entry = self._golden.manifest.prompt
        if entry is None:
            return
        expected = self._golden.tensors("prompt")
        cases = {case.name: (case.plan, span) for case, span in zip(self._cases, spans, strict=True)}
        chosen = [cases[name] for name in entry.images]
        prompt = expand_placeholders(
            expected["raw_ids"].numpy(), [plan for plan, _ in chosen], image_token_id=self._model.image_token_id
        )
        judge = self._judge("fp32", "prompt", "prompt", _EMBEDS_TOLERANCE)
        judge.exact("input_ids", torch.from_numpy(prompt.token_ids), expected["input_ids"])
        judge.exact("token_types", torch.from_numpy(prompt.roles), expected["token_types"])
        judge.exact("image_starts", torch.tensor(prompt.starts), expected["image_starts"])
        rows = self._golden.embedding_rows()[torch.from_numpy(prompt.token_ids).long()].float()
        for start, (_, span) in zip(prompt.starts, chosen, strict=True):
            rows[start : start + len(span)] = span
        judge.values("embeds", rows, expected["embeds"])
        for name in expected.keys() - {"raw_ids", "input_ids", "token_types", "image_starts", "embeds"}:
            self._note_unknown(f"prompt/{name}")

    def _judge(self, regime: str, group: str, case: str, tolerance: float = 0.0) -> Judge:
        """A judge whose findings are ours."""
        limits = Limits(value=tolerance, logits=tolerance)
        return Judge(limits, regime=regime, group=group, case=case, findings=self.findings)

    def _note_unknown(self, name: str) -> None:
        entry = f"{self._golden.name}/{name}"
        if entry not in self.unknown:
            self.unknown.append(entry)


def _num_differences(plan: ImagePlan, entry: PlanEntry) -> int:
    """How many of the expected sizes and offsets are not the plan's."""
    box = fit_content(entry.width, entry.height, plan)
    got = (
        plan.width,
        plan.height,
        plan.patches_w,
        plan.patches_h,
        plan.grid_w,
        plan.grid_h,
        plan.num_patches,
        plan.tokens,
    )
    want = (
        *(entry.canvas_w, entry.canvas_h, entry.n_vit_w, entry.n_vit_h),
        *(entry.n_llm_w, entry.n_llm_h, entry.n_patches, entry.n_tokens),
    )
    pairs = zip(
        (*got, box.width, box.height, box.left, box.top),
        (*want, entry.image_w, entry.image_h, entry.left, entry.top),
        strict=True,
    )
    return sum(a != b for a, b in pairs)


def _patches(canvas: Tensor, plan: ImagePlan, spec: VisionSpec, ops: VisionOps) -> Tensor:
    """[patches, 3 * P * P] bfloat16 of one canvas."""
    packed = pack_images([plan], spec)
    origins, strides = torch.from_numpy(packed.origins), torch.from_numpy(packed.strides)
    return ops.vision_patches(canvas.flatten(), origins, strides, pixel_levels(), patch_size=spec.patch_size)


def _sha256(patches: Tensor) -> str:
    return hashlib.sha256(patches.contiguous().view(torch.uint8).numpy().data).hexdigest()
