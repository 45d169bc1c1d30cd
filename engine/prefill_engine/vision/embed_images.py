"""Input rows of images, computed here and now with the checkpoint's own tower on the CPU: references for probes and tests.

What an encoder serves must equal this bit by bit on `ref`, whatever batch the image was in. The trap: it decodes in the calling
process, so it is for images of one's own only.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from prefill_engine.batch import SpanEmbeddings
from prefill_engine.vision.decode import decode_canvas
from prefill_engine.vision.image_intake import DEFAULT_POLICY
from prefill_engine.vision.tower import VisionTower
from prefill_engine.vision.weights import load_vision_parameters
from prefill_kernels.vision_ops import load_vision_ops
from prefill_plan.errors import CheckpointError
from prefill_plan.model_spec import load_model_spec


def embed_images(model: Path, images: Sequence[tuple[int, bytes]]) -> tuple[SpanEmbeddings, ...]:
    """Rows of each image, bfloat16.

    Args:
        model: checkpoint directory with a vision tower. images: start of the span, encoded image.

    Raises:
        CheckpointError: no tower. ImageRejected: an image that can't be decoded.
    """
    if not images:
        return ()
    spec = load_model_spec(model)
    if spec.vision is None:
        raise CheckpointError(f"{model}: config.json has no vision_config, so there is no tower to read")
    parameters = load_vision_parameters(model, spec, device=torch.device("cpu"))
    tower = VisionTower(spec.vision, parameters, ops=load_vision_ops("ref"), activation=torch.bfloat16)
    spans = []
    for start, data in images:
        canvas = decode_canvas(data, policy=DEFAULT_POLICY, final=None, spec=spec.vision)
        (rows,) = tower.encode([torch.from_numpy(canvas.pixels)], [canvas.intake.plan])
        spans.append(SpanEmbeddings(start=start, data=rows))
    return tuple(spans)
