"""Images as load: sent to encoders, or inside prompts to engines that have them encoded. Each image is another one, so that no
cache knows it."""

import asyncio
import dataclasses
import io
from pathlib import Path

from PIL import Image

from prefill_bed.load import OPTIONS, REQUEST_SECONDS, Prompts, SentBackError
from prefill_engine.client_images import place_images
from prefill_engine.vision.encoder_client import EncoderClient
from prefill_plan.errors import CallFailed
from prefill_plan.model_spec import load_model_spec

SIZE = (294, 252)
"""Of a picture, which is its final size: nothing is resized."""
PATCHES = 21 * 18
_NOT_BEGUN = ("DRAINING", "STARTING", "PATCH_QUEUE_FULL")


def picture(number: int) -> bytes:
    """A PNG of one colour with its number in one pixel."""
    image = Image.new("RGB", SIZE, (40, 90, 160))
    image.putpixel((0, 0), (number >> 16 & 255, number >> 8 & 255, number & 255))
    data = io.BytesIO()
    image.save(data, "PNG", compress_level=1)
    return data.getvalue()


class Pictures:
    """One image per call, straight to an encoder; its rows are fetched, checked and let go of."""

    def __init__(self) -> None:
        self._clients: dict[str, EncoderClient] = {}

    async def call(self, endpoint: str, number: int) -> None:
        client = self._clients.setdefault(endpoint, EncoderClient(endpoint))
        try:
            await client.encode(picture(number), timeout_seconds=REQUEST_SECONDS, use_shared_memory=False)
        except CallFailed as failure:
            # No detail: nobody listens there any more. An engine asks another encoder in both cases.
            if failure.reason in _NOT_BEGUN or (failure.status == "UNAVAILABLE" and not failure.reason):
                raise SentBackError from failure
            raise

    async def close(self) -> None:
        await asyncio.gather(*(client.__aexit__(None, None, None) for client in self._clients.values()))


class PicturePrompts:
    """Prompts with two images each, to an engine that is not drained: none may be sent back, whatever happens to encoders.

    checkpoint: its directory on this machine.
    """

    IMAGES = 2

    def __init__(self, checkpoint: Path, num_tokens: int) -> None:
        self._spec = load_model_spec(checkpoint)
        self._prompts = Prompts(num_tokens)
        self._digests: dict[str, bytes] = {}

    async def call(self, endpoint: str, number: int) -> None:
        client = self._prompts.client(endpoint)
        if endpoint not in self._digests:
            self._digests[endpoint] = (await client.server_info()).vision_digest
        text = self._prompts.text(number)
        holes = [*text[:40], self._spec.image_token_id, *text[40:80], self._spec.image_token_id, *text[80:]]
        files = [picture(self.IMAGES * number + index) for index in range(self.IMAGES)]
        tokens, images = place_images(holes, files, spec=self._spec, vision_digest=self._digests[endpoint])
        options = dataclasses.replace(OPTIONS, images=images)
        await client.prefill(tokens, options, request_id=f"load-{number}", timeout_seconds=REQUEST_SECONDS).finish()

    async def close(self) -> None:
        await self._prompts.close()
