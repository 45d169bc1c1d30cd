"""The demo's conversation: a text of this repository, tokenised and cut into user messages, one of them with a screenshot.

Used by demo.py. The trap: a message is expanded once, when it is first sent; the model's own answers are never searched for
placeholders, since a random model may well answer with one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.resources import files
from pathlib import Path

from tokenizers import Tokenizer

import prefill_engine
from prefill_engine.client_images import PromptImage, place_images
from prefill_plan.errors import ConfigError
from prefill_plan.model_spec import ModelSpec

SCREENSHOT_NAME = "screenshot.png"
_MESSAGE_SHARES = (0.36, 0.12, 0.12, 0.28, 0.12)
"""A long first message, then short ones, as a conversation has them; room for text on both sides of the screenshot."""
NUM_MESSAGES = len(_MESSAGE_SHARES)
IMAGE_MESSAGE = 3
"""Index of the message with the screenshot: the third turn of the worked example, after two here that end an engine's life."""
_TOKENS_AFTER_IMAGE = 272
"""The largest hit of a prompt that comes again leaves at least 140 tokens and begins at a block (C1): this much text after an
image puts it wholly inside that hit."""
MIN_TOKENS = 1200
"""Below this, a message is hardly longer than a block, and its window snapshots are not its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """User messages as token ids, with one image token for the screenshot. source: the file they come from."""

    source: str
    messages: tuple[tuple[int, ...], ...]
    screenshot: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """All tokens so far, images in place."""

    tokens: tuple[int, ...] = ()
    images: tuple[PromptImage, ...] = ()

    def with_answer(self, token: int) -> "Prompt":
        """After the model's first token; the rest of its answer is left out."""
        return replace(self, tokens=(*self.tokens, token))


def build_conversation(tokenizer: Tokenizer, *, num_tokens: int, image_token_id: int) -> Conversation:
    """The first `num_tokens` tokens of a text of this repository, as NUM_MESSAGES messages.

    Raises:
        ConfigError: no text is long enough.
    """
    screenshot = (files("prefill_engine") / "data" / SCREENSHOT_NAME).read_bytes()
    for source, text in _texts():
        token_ids = [token for token in tokenizer.encode(text).ids if token != image_token_id]
        if len(token_ids) >= num_tokens:
            messages = _cut(token_ids[:num_tokens], image_token_id=image_token_id)
            return Conversation(source=source, messages=messages, screenshot=screenshot)
    raise ConfigError(f"no text of this repository has {num_tokens:,} tokens, expected README.md or LICENSE to have")


def add_message(
    prompt: Prompt, message: Sequence[int], *, screenshot: bytes, spec: ModelSpec, vision_digest: bytes
) -> Prompt:
    """The prompt with a user message after it; an image token becomes the screenshot's span.

    Raises:
        ConfigError: the model takes no images.
    """
    pictures = [screenshot] * message.count(spec.image_token_id)
    tokens, images = place_images(message, pictures, spec=spec, vision_digest=vision_digest)
    shift = len(prompt.tokens)
    moved = tuple(replace(image, start=shift + image.start) for image in images)
    return Prompt(tokens=(*prompt.tokens, *tokens), images=(*prompt.images, *moved))


def _cut(token_ids: Sequence[int], *, image_token_id: int) -> tuple[tuple[int, ...], ...]:
    messages = []
    start = 0
    for share in _MESSAGE_SHARES[:-1]:
        end = start + round(share * len(token_ids))
        messages.append(tuple(token_ids[start:end]))
        start = end
    messages.append(tuple(token_ids[start:]))
    text = messages[IMAGE_MESSAGE]
    messages[IMAGE_MESSAGE] = (*text[:-_TOKENS_AFTER_IMAGE], image_token_id, *text[-_TOKENS_AFTER_IMAGE:])
    return tuple(messages)


def _texts() -> list[tuple[str, str]]:
    """Names and contents: files of the clone, else what the installed distribution carries of them."""
    found = []
    root = Path(prefill_engine.__file__).parents[2]
    for name in ("README.md", "LICENSE"):
        if (root / name).is_file():
            found.append((name, (root / name).read_text(encoding="utf-8")))
    distribution = metadata.distribution("prefill")
    found.append(("README.md of the package", (distribution.read_text("METADATA") or "").partition("\n\n")[2]))
    found.append(("LICENSE of the package", distribution.read_text("licenses/LICENSE") or ""))
    return found
