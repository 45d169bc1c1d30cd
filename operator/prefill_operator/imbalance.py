"""Whether patches wait unevenly at the encoders of a VEPool for long enough to say so (k8s.md 4.10). Pure.

engine_watch.py keeps since when, messages.py makes the sentence. The trap: what an encoder reports includes the batch that it
computes, so a full batch at one and none at the other is no imbalance; and a sentence must not change with the clock, so spans
are told in steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prefill_operator.engine_load import imbalance_text, round_digits
from prefill_operator.model import ImbalanceNote

IMBALANCE_LIMIT = 1.5
"""Largest over mean outstanding patches, as status.load shows it; above, it is uneven."""
WARN_SECONDS = 300.0

_SPANS = ((86_400.0, "1 day"), (21_600.0, "6 h"), (3_600.0, "1 h"), (900.0, "15 min"), (WARN_SECONDS, "5 min"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderQueue:
    """Of one encoder, by its last answer."""

    uid: str
    """Of its pod."""
    queued: int
    """Patches that were accepted and are not encoded, those of the running batch included."""
    batch: int
    """Most patches that it encodes at once."""


def is_uneven(queues: Sequence[EncoderQueue]) -> bool:
    """Above the limit, among two or more that tell, and with images that wait.

    Images wait where more than one full batch is outstanding. That floor is asked of the worst encoder and not of the pool's
    sum: in a pool of 8, one with a full queue (four batches) and seven idle ones would stay below one batch per encoder.
    """
    if len(queues) < 2:
        return False
    worst = _worst(queues)
    return worst.queued > worst.batch and float(imbalance_text([queue.queued for queue in queues])) > IMBALANCE_LIMIT


def judge_imbalance(queues: Sequence[EncoderQueue], *, seconds: float) -> ImbalanceNote | None:
    """What to say; None = nothing. seconds: for how long is_uneven has held without a break."""
    span = next((words for least, words in _SPANS if seconds >= least), None)
    if span is None or not is_uneven(queues):
        return None
    worst = _worst(queues)
    return ImbalanceNote(
        imbalance=imbalance_text([queue.queued for queue in queues]),
        span=span,
        worst_uid=worst.uid,
        most_patches=round_digits(worst.queued),
    )


def _worst(queues: Sequence[EncoderQueue]) -> EncoderQueue:
    return max(queues, key=lambda queue: (queue.queued, queue.uid))
