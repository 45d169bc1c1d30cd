import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from prefill_plan.block_keys import BlockKey, ImageDigest, block_keys, chain_root, snapshot_key

PRINTER = Path(__file__).with_name("print_block_keys.py")
GOLDEN_LINES = [
    "9b2023eb1f054c7007c1e86d308798382b065b5db6690df47d1d4ffce1c66dfa",
    "dca08f40a8ded9e1e865932336cfba75b7168ae8219d6c641da5506aa74c8423",
    "5f455fe1d1c438ff94a9fe0f1aed8598e35a0ce0b3abd8f17967f755603f2bf0",
    "0c084085aef745ef798b7937ddf1a9c1b5fd0ca7bb3442d4f1fdd70659216aee",
    "010c084085aef745ef798b7937ddf1a9c1b5fd0ca7bb3442d4f1fdd70659216aee",
]
ROOT = bytes(32)


def ids_of(num_tokens: int, *, first: int = 0) -> bytes:
    return struct.pack(f"<{num_tokens}i", *range(first, first + num_tokens))


def image_key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def root_of(**changes: bytes | str) -> bytes:
    fields: dict[str, bytes | str] = {
        "weights_digest": b"w" * 32,
        "tokenizer_digest": b"t" * 32,
        "layout_digest": b"l" * 32,
        "numerics_class": "cpu",
        "tenant_salt": b"salt",
    }
    return chain_root(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_golden_keys_in_a_process_of_its_own(hash_seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}

    printed = subprocess.run([sys.executable, PRINTER], env=environment, capture_output=True, text=True, check=True)

    assert printed.stdout.split() == GOLDEN_LINES


def test_keys_follow_the_definition_of_kv_md_2_2() -> None:
    image = ImageDigest(start=100, length=200, content_key=image_key("a"))
    ids = ids_of(300)

    root = b"dsv41-kv\x00v1"
    for field in (b"w" * 32, b"t" * 32, b"l" * 32, b"cpu", b"salt"):
        root += len(field).to_bytes(4, "little") + field
    parent = hashlib.sha256(root).digest()
    expected = []
    for index, offset in enumerate((0, 28)):
        item = offset.to_bytes(4, "little") + image.content_key
        parent = hashlib.sha256(parent + ids[512 * index : 512 * (index + 1)] + item).digest()
        expected.append(parent)

    assert block_keys(root_of(), ids, images=[image]) == tuple(expected)


@pytest.mark.parametrize(("num_tokens", "num_keys"), [(0, 0), (127, 0), (128, 1), (255, 1), (256, 2)])
def test_only_complete_blocks_have_keys(num_tokens: int, num_keys: int) -> None:
    assert len(block_keys(ROOT, ids_of(num_tokens))) == num_keys


def test_longer_prompt_keeps_the_keys_of_its_prefix() -> None:
    assert block_keys(ROOT, ids_of(1000))[:3] == block_keys(ROOT, ids_of(400))


def test_one_changed_token_changes_its_block_and_all_after_it() -> None:
    ids = bytearray(ids_of(512))
    before = block_keys(ROOT, bytes(ids))
    ids[4 * 200] ^= 1

    after = block_keys(ROOT, memoryview(ids))

    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False, False]


@pytest.mark.parametrize(
    "field", ["weights_digest", "tokenizer_digest", "layout_digest", "numerics_class", "tenant_salt"]
)
def test_each_field_of_the_root_changes_it(field: str) -> None:
    value: bytes | str = "other" if field == "numerics_class" else b"other"

    assert root_of(**{field: value}) != root_of()


def test_tenants_with_other_salts_share_no_key() -> None:
    keys = [block_keys(root_of(tenant_salt=salt), ids_of(1024)) for salt in (b"a", b"b")]

    assert not set(keys[0]) & set(keys[1])


def test_moving_a_byte_between_root_fields_changes_the_root() -> None:
    assert root_of(numerics_class="cpux", tenant_salt=b"y") != root_of(numerics_class="cpu", tenant_salt=b"xy")
    assert root_of(numerics_class="", tenant_salt=b"cpusalt") != root_of(numerics_class="cpusalt", tenant_salt=b"")


def test_image_changes_the_blocks_it_overlaps_and_all_after() -> None:
    plain = block_keys(ROOT, ids_of(640))
    with_image = block_keys(ROOT, ids_of(640), images=[ImageDigest(start=128, length=128, content_key=image_key("a"))])

    assert [a == b for a, b in zip(plain, with_image, strict=True)] == [True, False, False, False, False]


def test_image_beyond_the_last_complete_block_changes_nothing() -> None:
    image = ImageDigest(start=256, length=50, content_key=image_key("a"))

    assert block_keys(ROOT, ids_of(300), images=[image]) == block_keys(ROOT, ids_of(300))


def test_same_image_at_another_place_gives_other_keys() -> None:
    keys = {
        block_keys(ROOT, ids_of(256), images=[ImageDigest(start=start, length=64, content_key=image_key("a"))])[1]
        for start in (65, 66, 100, 127)
    }

    assert len(keys) == 4


def test_swapping_two_images_of_a_block_changes_its_key() -> None:
    def key_of(first: str, second: str) -> BlockKey:
        images = [
            ImageDigest(start=start, length=20, content_key=image_key(name))
            for start, name in ((10, first), (40, second))
        ]
        return block_keys(ROOT, ids_of(128), images=images)[0]

    assert key_of("a", "b") != key_of("b", "a")


def test_thousands_of_images_have_distinct_keys() -> None:
    ids = ids_of(128, first=1)
    images = (ImageDigest(start=8, length=100, content_key=image_key(str(number))) for number in range(4000))

    assert len({block_keys(ROOT, ids, images=[image])[0] for image in images}) == 4000


@given(
    lengths=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 400)), max_size=6), num_tokens=st.integers(0, 1500)
)
def test_each_block_hashes_exactly_the_images_that_overlap_it(lengths: list[tuple[int, int]], num_tokens: int) -> None:
    images, end = [], 0
    for gap, length in lengths:
        images.append(ImageDigest(start=end + gap, length=length, content_key=image_key(f"{end}")))
        end += gap + length
    ids = ids_of(num_tokens)

    parent, expected = ROOT, []
    for start in range(0, num_tokens // 128 * 128, 128):
        items = b"".join(
            struct.pack("<I", max(0, start - image.start)) + image.content_key
            for image in images
            if image.start < start + 128 and image.start + image.length > start
        )
        parent = hashlib.sha256(parent + ids[4 * start : 4 * start + 512] + items).digest()
        expected.append(parent)

    assert block_keys(ROOT, ids, images=images) == tuple(expected)


def test_snapshot_key_is_in_another_namespace() -> None:
    key = block_keys(ROOT, ids_of(128))[0]

    assert snapshot_key(key) != key
    assert snapshot_key(key)[1:] == key


IMAGE = ImageDigest(start=10, length=5, content_key=bytes(32))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([replace(IMAGE, start=-1)], "start -1"),
        ([replace(IMAGE, length=0)], "length 0"),
        ([IMAGE, replace(IMAGE, start=14)], "start >= 15"),
        ([IMAGE, replace(IMAGE, start=2)], "start >= 15"),
        ([replace(IMAGE, content_key=b"short")], "5 bytes, expected 32"),
    ],
    ids=["negative start", "empty", "overlapping", "out of order", "short key"],
)
def test_bad_image_spans_are_refused(images: list[ImageDigest], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block_keys(ROOT, ids_of(128), images=images)


def test_token_bytes_that_are_no_int32_are_refused() -> None:
    with pytest.raises(ValueError, match="6 bytes, expected a multiple of 4"):
        block_keys(ROOT, bytes(6))
