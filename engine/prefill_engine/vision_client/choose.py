"""Which vision encoder gets the next image: fewest milliseconds of patches ahead of it (serving.md 4.6). Pure.

Called by EncoderSet. The trap: a load report is up to a period old, so patches sent since it came count on top of it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLoad:
    """One encoder that takes images. patches: outstanding there by its last report, and sent to it since. a_ms, b_ms: a batch
    of p patches takes a + b * p."""

    address: str
    patches: int
    a_ms: float
    b_ms: float

    def finish_ms(self, patches: int, *, unknown_b_ms: float) -> float:
        """When an image of so many patches would be done. unknown_b_ms: of an encoder that has measured nothing yet."""
        return self.a_ms + (self.b_ms or unknown_b_ms) * (self.patches + patches)


def choose_encoder(loads: Iterable[EncoderLoad], *, patches: int, avoid: Collection[str] = ()) -> str | None:
    """Address of the encoder that would be done first; ties go to the first address in order. None: there is none.

    Args:
        patches: of the image. avoid: taken only if there is no other.
    """
    loads = list(loads)
    # A new encoder counts as the slowest that is known: as the fastest it would draw every image at once.
    unknown = max((load.b_ms for load in loads if load.b_ms), default=1.0)

    def rank(load: EncoderLoad) -> tuple[bool, float, str]:
        return load.address in avoid, load.finish_ms(patches, unknown_b_ms=unknown), load.address

    return min(loads, key=rank).address if loads else None
