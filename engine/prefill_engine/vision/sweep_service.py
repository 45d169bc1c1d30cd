"""`ve-sweep` through a running encoder: what a caller sees, decoding, queue and transport included. No torch.

Called by cli/ve_sweep.py. The traps: an image counts as unseen only if its bytes are new, so each carries a number of its own;
an encoder that others use, or that restarts, is not measured alone.
"""

import asyncio
import io
import time
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from prefill_engine.vision.encoder_client import EncoderClient
from prefill_engine.vision.sweep_points import CACHED, UNSEEN, SweepCase, SweepPoint

_CELL = 8
"""Pixels of one flat square: compresses as a picture does, not as noise."""


class EncoderSweep:
    """One sweep of one encoder. seed: of this sweep; another one's images are unseen again."""

    def __init__(
        self, client: EncoderClient, *, seed: int, timeout_seconds: float, on_case: Callable[[SweepCase], None]
    ) -> None:
        self._client = client
        self._numbers = np.random.default_rng(seed)
        self._timeout_seconds = timeout_seconds
        self._on_case = on_case

    async def plan_cases(
        self, sizes: Sequence[tuple[int, int]], batches: Sequence[int], *, max_patches: int
    ) -> tuple[SweepCase, ...]:
        """Sends one image of each size, to learn what it becomes. Cases of more than max_patches, the queue's, are left out.

        Raises:
            CallFailed: the encoder refused or failed.
        """
        cases = []
        for width, height in sizes:
            encoded = await self._client.encode(self._png(width, height), timeout_seconds=self._timeout_seconds)
            image = encoded.image
            cases += [
                SweepCase(width=width, height=height, patches=image.patches, tokens=image.tokens, images=images)
                for images in batches
                if images * image.patches <= max_patches
            ]
        return tuple(cases)

    async def measure(self, cases: Sequence[SweepCase], *, rounds: int) -> tuple[SweepPoint, ...]:
        """Each case with images that are new to the encoder, then with the same images again.

        Raises:
            CallFailed: the encoder refused or failed.
        """
        ms: dict[tuple[int, str], list[float]] = {(index, way): [] for index in range(len(cases)) for way in _WAYS}
        hits = dict.fromkeys(ms, 0)
        for _ in range(rounds):
            for index, case in enumerate(cases):
                self._on_case(case)
                images = [self._png(case.width, case.height) for _ in range(case.images)]
                for way in _WAYS:
                    spent, found = await self._send(images)
                    ms[index, way].append(spent)
                    hits[index, way] += found
        return tuple(
            SweepPoint(case=cases[index], way=way, ms=tuple(spent), hits=hits[index, way])
            for way in _WAYS
            for (index, of), spent in ms.items()
            if of == way
        )

    async def _send(self, images: Sequence[bytes]) -> tuple[float, int]:
        """Milliseconds until the rows of all are here, and how many came from the cache."""
        started = time.perf_counter()
        encode, seconds = self._client.encode, self._timeout_seconds
        answers = await asyncio.gather(*(encode(image, timeout_seconds=seconds) for image in images))
        spent = (time.perf_counter() - started) * 1e3
        return spent, sum(answer.image.from_cache for answer in answers)

    def _png(self, width: int, height: int) -> bytes:
        rows, columns = -(-height // _CELL), -(-width // _CELL)
        cells = self._numbers.integers(0, 256, size=(rows, columns, 3), dtype=np.uint8)
        pixels = cells.repeat(_CELL, axis=0).repeat(_CELL, axis=1)[:height, :width]
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1)
        return buffer.getvalue()


_WAYS = (UNSEEN, CACHED)
