"""An RGB image -> the canvas of its plan, byte for byte as the release makes it (vision.md 3). Needs Pillow; no torch.

Called in decode workers and by `check`. The trap: the bytes are Pillow's. Version 13 resizes some tall images in the other pass
order and gives other bytes, hence other embeddings under the same content key (decisions C54), so the version is checked.
"""

import re

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image

from prefill_engine.vision.plan import ImagePlan, fit_content
from prefill_plan.errors import ConfigError

PADDING = 127
"""Byte around the image: -0.0039 after normalisation, not 0."""


def check_pillow(version: str = PIL.__version__) -> None:
    """Refuses a Pillow whose bytes are not the release's; for whoever starts work on pixels, once.

    Raises:
        ConfigError: below 11.3, or 13 and up.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not (11, 3) <= (int(found[1]), int(found[2])) < (13, 0):
        raise ConfigError(
            f"Pillow {version} is installed, expected 11.3 or later and below 13: others resize some images to other bytes, and "
            "embeddings would differ between encoders"
        )


def fit_canvas(image: Image.Image, plan: ImagePlan) -> npt.NDArray[np.uint8]:
    """The image, bicubic, centred on its canvas; bit for bit itself where it already has the final size.

    Args:
        image: mode RGB. Its size is the one the plan was made for, or the plan's.

    Returns:
        [canvas_height, canvas_width, 3], a new array.

    Raises:
        ImageRejected: too thin (fit_content).
        ValueError: another mode.
    """
    if image.mode != "RGB":
        raise ValueError(f"image of mode {image.mode}, expected RGB")
    if image.size == (plan.width, plan.height):
        return np.array(image)
    box = fit_content(image.width, image.height, plan)
    resized = image.resize((box.width, box.height), Image.Resampling.BICUBIC)
    canvas = np.full((plan.height, plan.width, 3), PADDING, dtype=np.uint8)
    canvas[box.top : box.top + box.height, box.left : box.left + box.width] = np.asarray(resized)
    return canvas
