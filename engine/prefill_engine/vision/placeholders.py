"""Placeholders -> spans: a prompt with one image token per image becomes the prompt that the model sees (vision.md 6).

Called by clients and by `check`; the front door does the same with deepseek-recipe. No torch. The trap: every position of a span
carries the image token, delimiters included; which is which only the roles say.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefill_engine.vision.plan import ImagePlan, span_roles

ROLE_TEXT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedPrompt:
    """token_ids, roles: [L] int32; roles as span_roles, ROLE_TEXT elsewhere. starts: first position of each span, in order."""

    token_ids: npt.NDArray[np.int32]
    roles: npt.NDArray[np.int32]
    starts: tuple[int, ...]


def expand_placeholders(
    token_ids: npt.NDArray[np.int32], plans: Sequence[ImagePlan], *, image_token_id: int
) -> ExpandedPrompt:
    """Each image token becomes as many as its image has span rows.

    Raises:
        ValueError: not one placeholder per image.
    """
    places = np.flatnonzero(token_ids == image_token_id)
    if len(places) != len(plans):
        raise ValueError(
            f"{len(places)} image placeholders (token {image_token_id}) in the prompt, {len(plans)} images"
        )
    lengths = np.ones(len(token_ids), dtype=np.int64)
    lengths[places] = [plan.tokens for plan in plans]
    firsts = np.cumsum(lengths) - lengths
    roles = np.full(int(lengths.sum()), ROLE_TEXT, dtype=np.int32)
    for start, plan in zip(firsts[places], plans, strict=True):
        roles[start : start + plan.tokens] = span_roles(plan)
    return ExpandedPrompt(
        token_ids=np.repeat(token_ids, lengths).astype(np.int32), roles=roles, starts=tuple(firsts[places].tolist())
    )
