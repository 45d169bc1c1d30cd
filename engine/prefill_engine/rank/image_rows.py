"""Images of a rank's attempts: which it wants, whose rows are here, when their memory goes back (decisions C3, serving.md 4.6).

Called by RankEngine and Stepper on the step thread. What an attempt wants and has stands in its record; the traps: an image
that is not here ends the runnable rows at its start, it never becomes placeholder rows; rows lie in the front's memory, so
nothing here touches them after ImageRowsDone, or after a list that no longer names the image.
"""

import time
from collections.abc import Callable

import torch

from prefill_engine.batch import SpanEmbeddings
from prefill_engine.image_messages import ImageRows, ImageRowsDone, ImagesWanted
from prefill_engine.messages import FromRank
from prefill_engine.rank.attempt import Attempt
from prefill_engine.vision.slab import AttachedSlab
from prefill_plan.errors import RequestError
from prefill_plan.positions import embedding_spans

_VALUE_BYTES = 2  # bfloat16


class RankImages:
    """has_encoder: rows can be had (vision.mode). columns: of a row, the model's hidden size."""

    def __init__(
        self, *, has_encoder: bool, columns: int, window_tokens: int, send: Callable[[FromRank], None]
    ) -> None:
        self.has_encoder = has_encoder
        self._columns = columns
        self._window_tokens = window_tokens
        self._send = send
        self._slabs: dict[str, AttachedSlab] = {}

    def check(self, attempt: Attempt) -> None:
        """Raises RequestError: as want, which is to follow when the attempt is accepted."""
        self._needed(attempt)

    def want(self, attempt: Attempt) -> None:
        """Tells the front which images the attempt's plan needs, if that is not what it was told last.

        Raises:
            RequestError: an image that is needed can't be had; nothing was asked for.
        """
        needed = self._needed(attempt)
        wanted = attempt.images_wanted
        if needed == wanted.keys():
            return
        for index in wanted.keys() - needed:
            attempt.embeddings.pop(index, None)
        attempt.images_round += 1
        attempt.images_wanted = {index: wanted.get(index, attempt.images_round) for index in sorted(needed)}
        self._send(
            ImagesWanted(
                attempt_id=attempt.attempt_id,
                indices=tuple(attempt.images_wanted),
                round=attempt.images_round,
                at_ns=time.monotonic_ns(),
            )
        )

    def take(self, attempt: Attempt, message: ImageRows) -> None:
        """The rows of an image are here. Those that nobody waits for any more are left alone."""
        if attempt.ended or attempt.images_wanted.get(message.index) != message.round:
            return
        span = attempt.spans[message.index]
        # The front has checked both against the encoder's answer; a difference here is our own bug.
        assert (message.rows, message.columns) == (span.length, self._columns), "rows of another span"
        attempt.embeddings[message.index] = SpanEmbeddings(start=span.start, data=self._view(message))

    def drop_computed(self, attempt: Attempt) -> None:
        """Gives back the memory of images whose rows are all computed."""
        for index in [i for i in attempt.embeddings if attempt.spans[i].end <= attempt.next_row]:
            del attempt.embeddings[index], attempt.images_wanted[index]
            self._send(ImageRowsDone(attempt_id=attempt.attempt_id, index=index))

    def _needed(self, attempt: Attempt) -> set[int]:
        plan = attempt.plan
        spans = embedding_spans(
            attempt.spans,
            hit=plan.hit_tokens,
            window_tokens=self._window_tokens,
            snapshot_held=plan.replay_tokens == 0,
        )
        needed = {index for index, span in enumerate(attempt.spans) if span in spans and span.end > attempt.next_row}
        if needed and not self.has_encoder:
            raise RequestError(
                f"{len(needed)} images reach into the rows to compute (the first at token "
                f"{attempt.spans[min(needed)].start}, hit {plan.hit_tokens}), and this engine has no vision encoder",
                reason="IMAGE_REJECTED",
                retry="OTHER_PE",
            )
        lacking = [index for index in sorted(needed) if not attempt.submit.images[index].has_source]
        if lacking:
            span = attempt.spans[lacking[0]]
            raise RequestError(
                f"image {lacking[0]} at tokens [{span.start}, {span.end}) reaches into the rows to compute (hit "
                f"{plan.hit_tokens}, computed from {plan.compute_start}) and came without pixels or ticket; nothing was "
                f"computed",
                reason="EMBEDDING_GONE",
                retry="REPLAN",
            )
        return needed

    def _view(self, message: ImageRows) -> torch.Tensor:
        """[rows, columns] bfloat16 on shared memory."""
        slab = self._slabs.get(message.path)
        if slab is None:
            # Writable, since torch takes no other buffer without a warning; nobody here writes.
            slab = self._slabs[message.path] = AttachedSlab(message.path, writable=True)
        count = message.rows * message.columns
        flat = torch.frombuffer(slab.memory, dtype=torch.bfloat16, count=count, offset=message.offset)
        assert flat.element_size() == _VALUE_BYTES
        return flat.view(message.rows, message.columns)
