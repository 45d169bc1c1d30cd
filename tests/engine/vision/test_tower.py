"""The tower: golden values of a second, older set; an image alone = in any batch, bit by bit; random towers behave."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from prefill_engine.model.checkpoint_texts import check_texts, read_preset
from prefill_engine.model.vision_cutout import write_random_tower
from prefill_engine.vision.pixels import fit_canvas
from prefill_engine.vision.plan import ImagePlan, plan_image, plan_once
from prefill_engine.vision.tower import VisionTower
from prefill_engine.vision.weights import load_vision_parameters
from prefill_kernels.vision_ops import load_vision_ops
from prefill_plan.model_spec import load_model_spec
from prefill_testing.numeric import assert_bitwise

GOLDEN = Path(__file__).parents[2] / "golden"
DENSE_VISION = json.loads((GOLDEN / "tiny_dense" / "manifest.json").read_bytes())["vision"]
SIZES = [(168, 126), (172, 90), (65, 211), (5, 3), (300, 300), (900, 20), (42, 600)]


def load_tower(directory: Path, activation: torch.dtype) -> VisionTower:
    spec = load_model_spec(directory)
    parameters = load_vision_parameters(directory, spec, device=torch.device("cpu"))
    return VisionTower(spec.vision, parameters, ops=load_vision_ops("ref"), activation=activation)


def make_image(tower: VisionTower, size: tuple[int, int], seed: int) -> tuple[Tensor, ImagePlan]:
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    plan = plan_image(*size, tower.spec)
    return torch.from_numpy(fit_canvas(Image.fromarray(values), plan)), plan


def encode(tower: VisionTower, images: list[tuple[Tensor, ImagePlan]]) -> list[Tensor]:
    return tower.encode([canvas for canvas, _ in images], [plan for _, plan in images])


@pytest.mark.parametrize("name", DENSE_VISION)
def test_plans_of_the_older_golden_set(name: str) -> None:
    entry = DENSE_VISION[name]
    plan = plan_once(entry["width"], entry["height"], load_model_spec(GOLDEN / "tiny_dense").vision)
    assert (plan.width, plan.height, plan.tokens) == (entry["best_width"], entry["best_height"], entry["n_tokens"])


@pytest.mark.parametrize("name", ["imgA", "imgF"])
def test_a_full_checkpoint_reproduces_the_older_golden_set(name: str) -> None:
    tower = load_tower(GOLDEN / "tiny_dense", torch.float32)
    image = Image.open(GOLDEN / "tiny_dense" / "vision" / f"{name}.png").convert("RGB")
    plan = plan_image(*image.size, tower.spec)
    seen: dict[str, Tensor] = {}
    tower.encode([torch.from_numpy(fit_canvas(image, plan))], [plan], observe=seen.__setitem__)
    expected = load_file(GOLDEN / "tiny_dense" / "vision" / f"{name}.safetensors")
    patches = seen["patches"].bfloat16()
    assert hashlib.sha256(patches.view(torch.uint8).numpy()).hexdigest() == DENSE_VISION[name]["patches_sha256"]
    assert (seen["vit_out"] - expected["vit_out"]).abs().max() < 2e-5
    assert (seen["aligner_out"] - expected["aligner_out"]).abs().max() < 2e-5


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def check_batches(activation: torch.dtype, *, num_batches: int) -> None:
    tower = load_tower(GOLDEN / "tiny_vision", activation)
    pool = [make_image(tower, size, seed) for seed, size in enumerate(SIZES)]
    alone = [encode(tower, [image])[0] for image in pool]
    source = random.Random(5)
    for _ in range(num_batches):
        chosen = [source.randrange(len(pool)) for _ in range(source.randint(2, 6))]
        for place, rows in zip(chosen, encode(tower, [pool[i] for i in chosen]), strict=True):
            assert_bitwise(rows, alone[place])


@pytest.mark.parametrize("activation", [torch.float32, torch.bfloat16], ids=str)
def test_an_image_alone_and_in_any_batch_give_the_same_bits(activation: torch.dtype) -> None:
    check_batches(activation, num_batches=6)


@pytest.mark.usefixtures("two_threads")
def test_an_image_alone_and_in_a_batch_give_the_same_bits_with_two_threads() -> None:
    check_batches(torch.bfloat16, num_batches=2)


def test_one_changed_pixel_changes_that_image_only() -> None:
    tower = load_tower(GOLDEN / "tiny_vision", torch.float32)
    first, second = (make_image(tower, size, 1) for size in SIZES[:2])
    before = encode(tower, [first, second])
    changed = second[0].clone()
    changed[50, 50, 1] ^= 255
    after = encode(tower, [first, (changed, second[1])])
    assert_bitwise(after[0], before[0])
    assert (after[1] != before[1]).float().mean() > 0.5


def test_no_images_give_no_rows() -> None:
    assert load_tower(GOLDEN / "tiny_vision", torch.float32).encode([], []) == []


@pytest.mark.parametrize(
    ("canvas", "found"),
    [
        (torch.zeros(126, 168, 3), r"torch.float32 \[126, 168, 3\]"),
        (torch.zeros(168, 126, 3, dtype=torch.uint8), r"torch.uint8 \[168, 126, 3\]"),
    ],
    ids=["dtype", "transposed"],
)
def test_a_canvas_that_is_not_its_plans_is_refused(canvas: Tensor, found: str) -> None:
    tower = load_tower(GOLDEN / "tiny_vision", torch.float32)
    with pytest.raises(ValueError, match=rf"canvas 0 is {found}, expected uint8 \[126, 168, 3\]"):
        tower.encode([canvas], [plan_image(168, 126, tower.spec)])


@pytest.fixture(scope="module")
def random_tower(tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    directory = tmp_path_factory.mktemp("tower")
    texts = read_preset("tiny")
    write_random_tower(directory, check_texts(texts, source="tiny"), config=texts.config, seed=0, shard_bytes=1 << 30)
    return load_tower(directory, torch.bfloat16)


def test_rows_of_a_random_tower_are_of_the_size_of_embeddings(random_tower: VisionTower) -> None:
    images = [make_image(random_tower, size, seed) for seed, size in enumerate(SIZES)]
    seen: dict[str, Tensor] = {}
    random_tower.encode([c for c, _ in images], [p for _, p in images], observe=seen.__setitem__)
    spreads = {name: float(seen[name].float().std()) for name in ("block0", "block1", "vit_out", "span")}
    assert random_tower.columns == 64
    assert all(torch.isfinite(tensor).all() for tensor in seen.values())
    assert all(0.3 < spread < 3 for spread in spreads.values()), spreads


def test_rows_of_a_random_tower_tell_images_and_places_apart(random_tower: VisionTower) -> None:
    one, other = (encode(random_tower, [make_image(random_tower, (168, 126), seed)])[0].float() for seed in (1, 2))
    features = one[[1, 2, 3, 4, 6, 7]]
    distances = torch.cdist(features, features) + torch.eye(len(features)) * 1e9
    assert distances.min() > 0.1
    assert (one - other)[1:5].norm(dim=1).min() > 0.1
    assert_bitwise(one[[0, 5, -1]], other[[0, 5, -1]])  # the delimiters are the checkpoint's
