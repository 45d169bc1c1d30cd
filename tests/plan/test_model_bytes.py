import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefill_plan.model_bytes import count_model_bytes
from prefill_plan.model_spec import load_model_spec, released_model_spec

GOLDEN = Path(__file__).parents[1] / "golden"
RELEASED = released_model_spec()


def test_released_tensor_classes_are_those_of_perf_md_1() -> None:
    tensors = count_model_bytes(RELEASED)

    assert tensors.expert == 18_800_640
    assert tensors.dense == 9_846_748_608
    assert tensors.engram_rows == 768_022_850
    assert tensors.engram_row == 264
    assert tensors.draft == 713_428_872
    assert tensors.vision == 970_536_960
    assert tensors.dense_expansion == 6_473_871_360


def test_released_classes_add_up_to_the_checkpoint() -> None:
    tensors = count_model_bytes(RELEASED)

    experts = (40 * 384 + 3 * 128) * tensors.expert
    tables = tensors.engram_rows * tensors.engram_row
    assert experts + tables + tensors.dense + tensors.draft + tensors.vision == 510_286_023_000


def tensor_sizes(directory: Path) -> Iterator[tuple[str, int]]:
    """(name, bytes) of every tensor in a checkpoint, from the safetensors headers."""
    for shard in sorted(directory.glob("*.safetensors")):
        with shard.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, entry["data_offsets"][1] - entry["data_offsets"][0]


@pytest.mark.parametrize("model", ["tiny_dense", "tiny_quant"])
def test_classes_of_a_tiny_checkpoint_add_up_to_its_files(model: str) -> None:
    spec = load_model_spec(GOLDEN / model)
    tensors = count_model_bytes(spec)
    sizes = dict(tensor_sizes(GOLDEN / model))
    draft_experts = spec.draft.num_layers * spec.draft.num_experts if spec.draft else 0

    experts = (spec.num_layers * spec.num_experts + draft_experts) * tensors.expert
    assert experts == sum(size for name, size in sizes.items() if ".experts." in name)
    tables = tensors.engram_rows * tensors.engram_row
    assert tables == sum(size for name, size in sizes.items() if "engram.embed." in name)
    assert experts + tables + tensors.dense + tensors.draft + tensors.vision == sum(sizes.values())
