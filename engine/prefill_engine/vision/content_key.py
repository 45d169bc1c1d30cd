"""Identity of an image's rows: content_key of serving.md 4.4, the same in a VE, in a PE and in its client. Pure, stdlib only.

It enters block keys, too, so a change of it makes every stored prefix with images a miss. The trap: the size in it is the final
one, so two callers of which only one declares sizes agree.
"""

import hashlib

from prefill_engine.vision.image_intake import PixelPolicy

_DOMAIN = b"pe-img-1"
KEY_BYTES = 32


def content_key(
    image_sha256: bytes,
    *,
    final_width: int,
    final_height: int,
    vision_digest: bytes,
    policy: PixelPolicy,
    cache_scope: bytes = b"",
) -> bytes:
    """32 bytes.

    Args:
        image_sha256: of the encoded bytes. final_width, final_height: of the image's plan. cache_scope: of its tenant.
    """
    numbers = (
        int(policy.apply_exif_orientation),
        policy.background_rgb,
        int(policy.first_frame_of_animation),
        policy.max_pixels,
        policy.max_side,
        policy.max_bytes,
    )
    fields = (
        cache_scope,
        vision_digest,
        b"".join(number.to_bytes(4, "little") for number in numbers),
        final_width.to_bytes(4, "little"),
        final_height.to_bytes(4, "little"),
        image_sha256,
    )
    digest = hashlib.sha256(_DOMAIN)
    for field in fields:
        digest.update(len(field).to_bytes(4, "little"))
        digest.update(field)
    return digest.digest()
