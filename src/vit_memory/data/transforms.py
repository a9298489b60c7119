"""Image transforms: the backbone's own preprocessing for evaluation, augmentations for training.

Both return 8-bit pixels in the backbone's input size if that loses nothing, and `normalised` turns them into the
backbone's input.

All randomness comes from a seed per image, so the same seed gives the same view in any worker and any order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vit_memory.choices import Augment
from vit_memory.data.decoding import LARGEST_PIXELS
from vit_memory.data.resizing import centre_crop, resize, resized_size
from vit_memory.errors import DataError
from vit_memory.preprocessing import Preprocessing, Resampler


@dataclass(frozen=True, slots=True)
class Box:
    """A crop of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class EvalTransform:
    """The backbone's own preprocessing, as its library's image processor does it."""

    preprocessing: Preprocessing

    def __call__(self, pixels: Tensor, seed: int = 0) -> Tensor:
        """Pixels (3, H, W) uint8 to (3, h, w): uint8, or float32 in 0..1 if the library resizes after scaling."""
        preprocessing = self.preprocessing
        if preprocessing.resize is not None:
            size = resized_size(preprocessing.resize, *pixels.shape[-2:])
            if size[0] * size[1] > LARGEST_PIXELS:
                shape = f"{pixels.shape[-2]} × {pixels.shape[-1]}"
                raise DataError(
                    f"{shape} pixels are too narrow: resized for the backbone, it would have {size[0]} × {size[1]}"
                )
            pixels = resize(pixels, size, preprocessing.interpolation, preprocessing.resampler)
        elif preprocessing.resampler == "torch-float":
            pixels = pixels / 255
        if preprocessing.crop is not None:
            pixels = centre_crop(pixels, preprocessing.crop, to_nearest=preprocessing.resampler == "pillow")
        return pixels.contiguous()

    def normalised(self, batch: Tensor) -> Tensor:
        """Scale and normalise a batch (B, 3, h, w) to the backbone's input, float32."""
        return normalised(batch, self.preprocessing)


@dataclass(frozen=True)
class TrainTransform:
    """Random augmentation of an image.

    `inception` is a crop of random area and aspect ratio, `randaugment` the same crop with torchvision's RandAugment,
    `pad-crop` a random crop of the padded image, `none` the transform of evaluation.
    """

    preprocessing: Preprocessing
    augment: Augment = "inception"
    flip: bool = True
    area: tuple[float, float] = (0.08, 1.0)  # share of the image that an inception crop covers
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    padding: float = 1 / 8  # of a pad-crop, relative to the side: 4 of 32 pixels
    randaugment: tuple[int, int] = (2, 9)  # operations and magnitude

    def __post_init__(self) -> None:
        if self.augment not in get_args(Augment):
            raise DataError(f"augment is {self.augment!r}; expected one of {', '.join(get_args(Augment))}.")
        low, high = self.area
        if not 0 < low <= high <= 1:
            raise DataError(f"area is {self.area}; expected shares of the image with 0 < smallest <= largest <= 1.")
        if self.augment == "randaugment":
            _randaugment(*self.randaugment)  # raises here rather than in a worker if torchvision is missing

    @property
    def _is_crop(self) -> bool:
        return self.augment in ("inception", "randaugment")

    @cached_property
    def size(self) -> tuple[int, int]:
        """(height, width) of every view."""
        return view_size(self.preprocessing)

    def min_decode_size(self, height: int, width: int, seed: int) -> tuple[int, int] | None:
        """The smallest (height, width) to decode the image at without losing detail in this view; None: full size."""
        if not self._is_crop:
            return None
        box = self._random_box(height, width, np.random.default_rng(seed))
        scale = max(self.size[0] / box.height, self.size[1] / box.width)
        return None if scale > 0.5 else (math.ceil(height * scale), math.ceil(width * scale))

    def __call__(self, pixels: Tensor, seed: int, full_size: tuple[int, int] | None = None) -> Tensor:
        """Pixels (3, H, W) uint8 to a view (3, h, w) uint8; `full_size` (height, width) if decoded smaller."""
        rng = np.random.default_rng(seed)
        if self._is_crop:
            view = self._random_crop(pixels, full_size, rng)
        else:
            view = EvalTransform(self.preprocessing)(pixels)
            if view.dtype != torch.uint8:
                view = (view * 255 + 0.5).clamp(0, 255).to(torch.uint8)
            if self.augment == "pad-crop":
                view = self._pad_crop(view, rng)
        if self.flip and rng.random() < 0.5 and self.augment != "none":
            view = view.flip(-1)
        if self.augment == "randaugment":
            with torch.random.fork_rng(devices=[]):  # torchvision draws from the global generator
                torch.manual_seed(int(rng.integers(2**63)))
                view = _randaugment(*self.randaugment)(view.contiguous())
        return view.contiguous()

    def normalised(self, batch: Tensor) -> Tensor:
        """Scale and normalise a batch (B, 3, h, w) to the backbone's input, float32."""
        return normalised(batch, self.preprocessing)

    def _random_crop(self, pixels: Tensor, full_size: tuple[int, int] | None, rng: np.random.Generator) -> Tensor:
        height, width = full_size or (pixels.shape[-2], pixels.shape[-1])
        box = self._random_box(height, width, rng)
        box = _scale_box(box, pixels.shape[-2] / height, pixels.shape[-1] / width, *pixels.shape[-2:])
        crop = pixels[:, box.top : box.top + box.height, box.left : box.left + box.width]
        return resize(crop, self.size, self.preprocessing.interpolation, _byte_resampler(self.preprocessing.resampler))

    def _random_box(self, height: int, width: int, rng: np.random.Generator) -> Box:
        """A box of random area and aspect ratio; after ten misses, the largest central one of an allowed ratio."""
        for _ in range(10):
            area = height * width * rng.uniform(*self.area)
            ratio = math.exp(rng.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < h <= height and 0 < w <= width:
                return Box(int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w)
        h = min(height, max(1, round(width / self.ratio[0])))
        w = min(width, max(1, round(height * self.ratio[1])))
        return Box((height - h) // 2, (width - w) // 2, h, w)

    def _pad_crop(self, view: Tensor, rng: np.random.Generator) -> Tensor:
        height, width = view.shape[-2:]
        down, across = round(height * self.padding), round(width * self.padding)
        padded = F.pad(view, (across, across, down, down))
        top, left = int(rng.integers(2 * down + 1)), int(rng.integers(2 * across + 1))
        return padded[:, top : top + height, left : left + width]


Transform = EvalTransform | TrainTransform


def view_size(preprocessing: Preprocessing) -> tuple[int, int]:
    """(height, width) of the backbone's input."""
    if preprocessing.crop is not None:
        return preprocessing.crop
    if isinstance(preprocessing.resize, tuple):
        return preprocessing.resize
    raise DataError(
        f"the backbone's preprocessing ({preprocessing}) gives images of many sizes, which cannot be batched. "
        f"Set one size with --image-size, or preprocessing.at(size)."
    )


def normalised(batch: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Scale pixels (B, 3, h, w), uint8 or float32 in 0..1, and normalise them per channel, to float32.

    With numpy, one image at a time: torch's threads would wait for cores that worker processes use, and numpy allocates
    large arrays in huge pages; without them, the first access to a batch costs four times its arithmetic.
    """
    scale, shift = _scale_and_shift(
        preprocessing.mean, preprocessing.std, 1 / 255 if batch.dtype == torch.uint8 else 1.0
    )
    result = np.empty(tuple(batch.shape), np.float32)
    for i, pixels in enumerate(batch.numpy()):
        result[i] = pixels
        result[i] *= scale
        result[i] += shift
    return torch.from_numpy(result)


@cache
def _scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], unit: float) -> tuple[np.ndarray, np.ndarray]:
    """What pixels are multiplied by, then shifted by, each (3, 1, 1)."""
    means, stds = (np.array(values, np.float32)[:, None, None] for values in (mean, std))
    return unit / stds, -means / stds


def _scale_box(box: Box, y_scale: float, x_scale: float, height: int, width: int) -> Box:
    """The box in the same image decoded at another size, (height, width)."""
    if (y_scale, x_scale) == (1, 1):
        return box
    top, left = min(height - 1, round(box.top * y_scale)), min(width - 1, round(box.left * x_scale))
    bottom = min(height, max(top + 1, round((box.top + box.height) * y_scale)))
    right = min(width, max(left + 1, round((box.left + box.width) * x_scale)))
    return Box(top, left, bottom - top, right - left)


def _byte_resampler(resampler: Resampler) -> Resampler:
    """The resampler of training views, which stay uint8: rounding is small compared to the augmentation."""
    return "torch" if resampler == "torch-float" else resampler


def _randaugment(operations: int, magnitude: int) -> Callable[[Tensor], Tensor]:
    try:
        from torchvision.transforms import v2
    except ImportError as error:
        raise DataError("randaugment needs torchvision: pip install torchvision, or use another --augment") from error
    transform: Callable[[Tensor], Tensor] = v2.RandAugment(operations, magnitude)
    return transform
