"""Images of a prompt, on the caller's side: placeholders expanded to spans, content keys, and their form in a request.

Used by `prefill-engine request --image`, the demo and tests; a front door does the same with deepseek-recipe. No torch, and no
pixels are decoded: sizes come from headers. The trap: everything is counted on the final size, which the spans carry (C53).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefill_engine.rpc import prefill_pb2
from prefill_engine.vision.content_key import content_key
from prefill_engine.vision.image_intake import DEFAULT_POLICY, examine
from prefill_engine.vision.placeholders import expand_placeholders
from prefill_plan.block_keys import ImageDigest
from prefill_plan.errors import ConfigError, ImageRejected
from prefill_plan.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptImage:
    """One image and its span [start, start + tokens). width, height: final size. pixels: the encoded image; b"" = not sent,
    since it is believed inside the hit. ticket: rows that an encoder holds, sent instead of pixels."""

    start: int
    tokens: int
    width: int
    height: int
    content_key: bytes
    pixels: bytes
    ticket: prefill_pb2.EmbeddingTicket | None = None

    @property
    def digest(self) -> ImageDigest:
        """As block keys take it."""
        return ImageDigest(start=self.start, length=self.tokens, content_key=self.content_key)


def place_images(
    token_ids: Sequence[int],
    files: Sequence[bytes],
    *,
    spec: ModelSpec,
    vision_digest: bytes,
    cache_scope: bytes = b"",
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """The prompt with each placeholder expanded, and its images in order.

    Args:
        token_ids: with one image token per image. files: encoded images. vision_digest: of the engine (ServerInfo).

    Raises:
        ConfigError: not one placeholder per image; no image, or one that no encoder would take.
    """
    if spec.vision is None:
        raise ConfigError("the model's config.json has no vision_config, so it takes no images; nothing was sent")
    plans = []
    for index, data in enumerate(files):
        try:
            plans.append(examine(data, policy=DEFAULT_POLICY, final=None, spec=spec.vision).plan)
        except ImageRejected as error:
            raise ConfigError(f"image {index}: {error.message}; nothing was sent") from error
    try:
        expanded = expand_placeholders(np.array(token_ids, dtype=np.int32), plans, image_token_id=spec.image_token_id)
    except ValueError as error:
        raise ConfigError(f"{error}; nothing was sent") from error
    images = tuple(
        PromptImage(
            start=start,
            tokens=plan.tokens,
            width=plan.width,
            height=plan.height,
            content_key=content_key(
                hashlib.sha256(data).digest(),
                final_width=plan.width,
                final_height=plan.height,
                vision_digest=vision_digest,
                policy=DEFAULT_POLICY,
                cache_scope=cache_scope,
            ),
            pixels=data,
        )
        for start, plan, data in zip(expanded.starts, plans, files, strict=True)
    )
    return expanded.token_ids.tolist(), images


def image_spans(images: Sequence[PromptImage]) -> list[prefill_pb2.ImageSpan]:
    """Wire form."""
    spans = []
    for index, image in enumerate(images):
        span = prefill_pb2.ImageSpan(
            index=index,
            start=image.start,
            length=image.tokens,
            width=image.width,
            height=image.height,
            content_key=image.content_key,
        )
        if image.ticket is not None:
            span.ticket.CopyFrom(image.ticket)
        elif image.pixels:
            span.pixels = image.pixels
        spans.append(span)
    return spans
