"""Pictures for the page: images of a split as the task reads them, small, and where a class token attends in them."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vit_memory.data.loading import load_one
from vit_memory.data.splits import Split
from vit_memory.data.transforms import EvalTransform, view_size
from vit_memory.errors import BadImage, DataError
from vit_memory.evaluation.models import Model, preprocessing_of
from vit_memory.model import MemoryViT
from vit_memory.preprocessing import Preprocessing
from vit_memory.task import Task

NO_PICTURES = "No pictures: this page reports too many tasks. Report this task alone to see them."
_SIDE = 176  # pixels of a picture's longer side


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """The images of one split that a page shows; at most `per_section` in each of its sections."""

    model: Model
    split: Split
    preprocessing: Preprocessing
    per_section: int

    @classmethod
    def of(cls, model: Model, split: Split, task: Task, per_section: int) -> "Pictures":
        """Pictures prepared as the task reads its images."""
        return cls(model, split, preprocessing_of(model, [task.name]), per_section)

    def choose(self, among: Sequence[int] | Tensor, seed: int = 0) -> list[int]:
        """As many of these as a section shows, drawn at random, each with the same chance."""
        places = [int(i) for i in among]
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).tolist()
        return [places[i] for i in order[: self.per_section]]

    def name(self, place: int) -> str:
        """The file, or the source and row, of an image."""
        return self.split.images.name(place)

    def uri(self, place: int) -> str:
        """The image as a data URI: the part that the task reads, at a size for people."""
        return _as_uri(self._pixels(place))

    def attention_uri(self, place: int, task: str) -> str:
        """The image in grey with the attention of the task's class token over it, as a data URI."""
        assert isinstance(self.model, MemoryViT)
        transform = EvalTransform(self.preprocessing)
        image = transform.normalised(self._load(place, transform)[None])
        explanation = self.model.explain(image.to(self.model.backbone.device), task)
        heat = (
            explanation.patches[-1].float().mean(0).nan_to_num().numpy()
        )  # last block, mean over heads: (rows, columns)
        return _as_uri(_with_heat(self._pixels(place), heat))

    def _pixels(self, place: int) -> np.ndarray:
        """(height, width, 3) uint8, or a grey square for an image that can no longer be read."""
        pixels = self._load(place, _display(self.preprocessing))
        if pixels.dtype != torch.uint8:
            pixels = (pixels * 255 + 0.5).clamp(0, 255).to(torch.uint8)
        return np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())

    def _load(self, place: int, transform: EvalTransform) -> Tensor:
        try:
            return load_one(self.split, place, transform)
        except BadImage:  # removed since it was scored
            return torch.full((3, *view_size(transform.preprocessing)), 128, dtype=torch.uint8)


def _display(preprocessing: Preprocessing) -> EvalTransform:
    """The same part of an image at a size for people."""
    try:
        height, width = view_size(preprocessing)
    except DataError:  # images as they come
        return EvalTransform(preprocessing)
    scale = _SIDE / max(height, width)
    return EvalTransform(preprocessing.at((max(1, round(height * scale)), max(1, round(width * scale)))))


def _with_heat(pixels: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Grey pixels, coloured where the heat (rows, columns) is high; its highest value counts as one."""
    from matplotlib import colormaps  # noqa: PLC0415 - only pages with heat maps wait for it

    height, width = pixels.shape[:2]
    scaled = Image.fromarray((heat / max(float(heat.max()), 1e-12)).astype(np.float32))
    smooth = np.asarray(scaled.resize((width, height), Image.Resampling.BICUBIC)).clip(0, 1)[..., None]
    grey = pixels.mean(-1, keepdims=True).repeat(3, axis=-1)
    colour = 255 * colormaps["inferno"](0.15 + 0.8 * smooth[..., 0])[..., :3]
    weight = 0.25 + 0.6 * smooth
    mixed: np.ndarray = ((1 - weight) * grey + weight * colour).astype(np.uint8)
    return mixed


def _as_uri(pixels: np.ndarray) -> str:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()


def heat_map_uri(shares: np.ndarray) -> str:
    """Shares (rows, columns) of one as a PNG whose opacity follows them, so that it suits light and dark pages."""
    opacity = 255 * np.sqrt(np.clip(shares, 0, 1))  # the root lifts small shares into sight
    colour = np.broadcast_to(np.array([0, 114, 178], np.float64), (*shares.shape, 3))
    content = io.BytesIO()
    Image.fromarray(np.dstack([colour, opacity]).astype(np.uint8)).save(content, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
