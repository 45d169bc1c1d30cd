"""The demo's conversation: a text of this repository, tokenised and cut into user turns. Used by demo.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tokenizers import Tokenizer

import prefill_engine
from prefill_plan.errors import ConfigError

_TURN_SHARES = (0.52, 0.12, 0.12, 0.12, 0.12)
"""A long first message, then short ones, as a conversation has them."""
NUM_TURNS = len(_TURN_SHARES)
MIN_TOKENS = 1200
"""Below this, a turn is hardly longer than a block, and its window snapshots are not its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """User messages as token ids. source: the file they come from."""

    source: str
    messages: tuple[tuple[int, ...], ...]


def build_conversation(tokenizer: Tokenizer, *, num_tokens: int) -> Conversation:
    """The first `num_tokens` tokens of a text of this repository, as NUM_TURNS messages.

    Raises:
        ConfigError: no text is long enough.
    """
    for source, text in _texts():
        token_ids = tokenizer.encode(text).ids
        if len(token_ids) >= num_tokens:
            return Conversation(source=source, messages=_cut(token_ids[:num_tokens]))
    raise ConfigError(f"no text of this repository has {num_tokens:,} tokens, expected README.md or LICENSE to have")


def _cut(token_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    messages = []
    start = 0
    for share in _TURN_SHARES[:-1]:
        end = start + round(share * len(token_ids))
        messages.append(tuple(token_ids[start:end]))
        start = end
    return (*messages, tuple(token_ids[start:]))


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
