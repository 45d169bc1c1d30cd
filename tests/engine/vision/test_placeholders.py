import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from prefill_engine.vision.placeholders import expand_placeholders
from prefill_engine.vision.plan import plan_image
from prefill_plan.model_spec import load_model_spec

GOLDEN = Path(__file__).parents[2] / "golden" / "tiny_vision"
IMAGE = 500


def plans(names: list[str]) -> list:
    spec, entries = load_model_spec(GOLDEN).vision, json.loads((GOLDEN / "manifest.json").read_bytes())["images"]
    return [plan_image(entries[name]["width"], entries[name]["height"], spec) for name in names]


def test_golden_prompt_is_expanded() -> None:
    expected = load_file(GOLDEN / "cases" / "prompt.safetensors")
    prompt = expand_placeholders(expected["raw_ids"], plans(["pad_rows", "tiny"]), image_token_id=IMAGE)
    assert np.array_equal(prompt.token_ids, expected["input_ids"])
    assert np.array_equal(prompt.roles, expected["token_types"])
    assert prompt.starts == tuple(expected["image_starts"].tolist())


def test_neighbours_at_both_ends_keep_their_own_spans() -> None:
    one, two = plans(["identity", "tiny"])
    prompt = expand_placeholders(np.array([IMAGE, IMAGE], dtype=np.int32), [one, two], image_token_id=IMAGE)
    assert prompt.starts == (0, one.tokens)
    assert len(prompt.token_ids) == one.tokens + two.tokens
    assert prompt.roles[[0, one.tokens - 1, one.tokens, -1]].tolist() == [0, 3, 0, 3]


def test_text_alone_stays_as_it_is() -> None:
    prompt = expand_placeholders(np.array([4, 5], dtype=np.int32), [], image_token_id=IMAGE)
    assert (prompt.token_ids.tolist(), prompt.roles.tolist(), prompt.starts) == ([4, 5], [-1, -1], ())


@pytest.mark.parametrize("names", [[], ["tiny", "tiny"]])
def test_one_placeholder_per_image_is_demanded(names: list[str]) -> None:
    with pytest.raises(ValueError, match=rf"1 image placeholders \(token 500\) in the prompt, {len(names)} images"):
        expand_placeholders(np.array([4, IMAGE], dtype=np.int32), plans(names), image_token_id=IMAGE)
