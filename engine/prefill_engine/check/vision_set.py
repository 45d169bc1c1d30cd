"""A directory of golden data for the vision tower: tower weights, images, manifest, expected tensors (format: its README).

Found and read, not judged. It is told from a text set by its manifest: that one has `cases`, this one `images`.
"""

import hashlib
import json
from pathlib import Path

import msgspec
from PIL import Image, UnidentifiedImageError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from prefill_engine.check.golden_set import NotGolden
from prefill_engine.model.checkpoint_files import build_catalogue


class PlanEntry(msgspec.Struct, frozen=True):
    """The resize plan of one image, under the set's constants or the release's."""

    width: int
    height: int
    canvas_w: int
    canvas_h: int
    image_w: int
    image_h: int
    left: int
    top: int
    n_vit_h: int
    n_vit_w: int
    n_llm_h: int
    n_llm_w: int
    n_patches: int
    n_tokens: int
    patches_sha256: str


class ImageEntry(PlanEntry, frozen=True):
    """file: below the set. png_sha256: of the file's bytes, "" = not known."""

    file: str
    png_sha256: str = ""


class PromptEntry(msgspec.Struct, frozen=True):
    """images: names, in the order of the placeholders."""

    images: list[str]
    image_token_id: int


class VisionManifest(msgspec.Struct, frozen=True):
    images: dict[str, ImageEntry]
    real_constants: dict[str, PlanEntry] = {}
    prompt: PromptEntry | None = None


class VisionSet:
    """One set. Files are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        for needed in ("config.json", "cases"):
            if not (path / needed).exists():
                raise NotGolden(f"{path}: no {needed}; expected a directory of golden vision data", path=str(path))
        try:
            self.manifest = msgspec.convert(json.loads((path / "manifest.json").read_bytes()), VisionManifest)
        except (json.JSONDecodeError, msgspec.MsgspecError) as error:
            raise NotGolden(f"{path / 'manifest.json'}: not a golden manifest: {error}", path=str(path)) from error
        for name in self.manifest.real_constants:
            if name not in self.manifest.images:
                raise NotGolden(
                    f"{path / 'manifest.json'}: real_constants of {name}, which is no image", path=str(path)
                )

    def image(self, name: str) -> Image.Image:
        """Decoded, mode RGB, colours under alpha kept as the release's loader keeps them."""
        entry = self.manifest.images[name]
        file = self.path / entry.file
        try:
            data = file.read_bytes()
            with Image.open(file) as image:
                pixels = image.convert("RGB")
        except (OSError, UnidentifiedImageError) as error:
            raise NotGolden(f"{file}: cannot be read: {error}", path=str(file)) from error
        if entry.png_sha256 and hashlib.sha256(data).hexdigest() != entry.png_sha256:
            raise NotGolden(f"{file}: its bytes are not those that the manifest names", path=str(file))
        return pixels

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Tensors of cases/<name>.safetensors."""
        file = self.path / "cases" / f"{name}.safetensors"
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise NotGolden(f"{file}: not a readable safetensors file: {error}", path=str(file)) from error

    def embedding_rows(self) -> Tensor:
        """[V, columns] embed.weight of the set's checkpoint."""
        located = build_catalogue(self.path, wanted=lambda name: name == "embed.weight").tensors.get("embed.weight")
        if located is None:
            raise NotGolden(f"{self.path}: no embed.weight, which the prompt case needs", path=str(self.path))
        with safe_open(located.file.path, "pt") as file:
            rows: Tensor = file.get_tensor(located.stored.name)
        return rows


def is_vision_manifest(path: Path) -> bool:
    """Whether a set's manifest.json is of a vision set; an unreadable one is not, and is refused as a text set."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
    except (OSError, json.JSONDecodeError):
        return False
    return isinstance(manifest, dict) and "images" in manifest and "cases" not in manifest
