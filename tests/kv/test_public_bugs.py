"""public_bugs.md against the tests that it names, and the cases of kv.md 8 that belong to no single part."""

import hashlib
import struct
from pathlib import Path

import pytest

from prefill_engine.vision.content_key import content_key
from prefill_engine.vision.image_intake import DEFAULT_POLICY
from prefill_plan.block_keys import BlockKey, ImageDigest, block_keys
from prefill_testing.named_tests import Row, functions_of, read_rows

ROWS = read_rows((Path(__file__).parent / "public_bugs.md").read_text())
ROOT = bytes(32)
TEXT = struct.pack("<128i", *range(128))


def test_no_number_is_missing() -> None:
    assert [row.number for row in ROWS] == list(range(1, 18))


@pytest.mark.parametrize("row", ROWS, ids=[f"bug {row.number}" for row in ROWS])
def test_named_tests_exist(row: Row) -> None:
    assert row.tests
    assert len(set(row.tests)) == len(row.tests)
    for test in row.tests:
        path, _, function = test.partition("::")
        assert function in functions_of(path), test
        assert "." in function or function.startswith("test_")


def image_key(data: bytes, *, height: int, width: int) -> bytes:
    """As the client and the encoder compute it."""
    sha = hashlib.sha256(data).digest()
    return content_key(sha, final_width=width, final_height=height, vision_digest=bytes(32), policy=DEFAULT_POLICY)


def key_with(content_key: bytes) -> BlockKey:
    return block_keys(ROOT, TEXT, images=[ImageDigest(start=8, length=100, content_key=content_key)])[0]


def test_6_a_hundred_thousand_images_and_one_changed_pixel_have_distinct_keys() -> None:
    """LMCache#4086, #3301: an image id folded to 16 bits. The text is the same everywhere."""
    num_images, height, width = 100_000, 4, 8
    picture = bytearray(3 * height * width)
    keys = {key_with(image_key(bytes(picture), height=height, width=width))}
    keys.add(key_with(image_key(bytes(picture), height=width, width=height)))
    for at in range(len(picture)):
        picture[at] ^= 1
        keys.add(key_with(image_key(bytes(picture), height=height, width=width)))
        picture[at] ^= 1
    for number in range(num_images):
        keys.add(key_with(image_key(number.to_bytes(4, "big"), height=height, width=width)))
    assert len(keys) == 2 + len(picture) + num_images
