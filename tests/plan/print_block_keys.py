"""Prints the golden block keys; run by test_block_keys in processes of their own, with different hash seeds."""

import array
import sys

from prefill_plan.block_keys import ImageDigest, block_keys, chain_root, snapshot_key

ROOT = chain_root(
    weights_digest=bytes(range(32)),
    tokenizer_digest=bytes(range(32, 64)),
    layout_digest=bytes(range(64, 96)),
    numerics_class="sm100/exact",
    tenant_salt=b"tenant-7",
)


def token_ids(num_tokens: int) -> bytes:
    """int32 little-endian ids of a fixed pseudo-random text."""
    ids = array.array("i", ((index * 2_654_435_761) % 129_280 for index in range(num_tokens)))
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def main() -> None:
    image = ImageDigest(start=100, length=200, content_key=bytes(reversed(range(32))))
    keys = block_keys(ROOT, token_ids(400), images=[image])
    print(ROOT.hex())
    for key in (*keys, snapshot_key(keys[-1])):
        print(key.hex())


if __name__ == "__main__":
    main()
