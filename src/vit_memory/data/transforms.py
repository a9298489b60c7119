"""From decoded pixels to what a backbone reads: its own preprocessing to evaluate, augmentations of it to train.

Both end in 8-bit pixels of the backbone's size wherever that loses nothing, and `normalised` turns them into what the
backbone reads. Resizing calls torch's 8-bit kernel, the one
torchvision's transforms call; Pillow's only for backbones whose own library uses it.

Everything random is drawn from a seed given with the image: the same seed, the same view, in any worker and any order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vit_memory.data.decoding import LARGEST_PIXELS
from vit_memory.errors import DataError
from vit_memory.preprocessing import Interpolation, Preprocessing, Resampler

Augment = Literal["inception", "randaugment", "pad-crop", "none"]
_PILLOW = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


@dataclass(frozen=True, slots=True)
class Box:
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Evaluation:
    """The backbone's own preprocessing, as its library's image processor does it."""

    preprocessing: Preprocessing

    def __call__(self, pixels: Tensor, seed: int = 0) -> Tensor:
        """Pixels (3, H, W) uint8 to (3, h, w), uint8, or float32 in 0..1 where the library resizes after scaling."""
        facts = self.preprocessing
        if facts.resize is not None:
            size = _resized(facts.resize, *pixels.shape[-2:])
            if size[0] * size[1] > LARGEST_PIXELS:
                shape = f"{pixels.shape[-2]} × {pixels.shape[-1]}"
                raise DataError(
                    f"{shape} pixels are too narrow: resized for the backbone they would be {size[0]} × {size[1]}"
                )
            pixels = resize(pixels, size, facts.interpolation, facts.resampler)
        elif facts.resampler == "torch-float":
            pixels = pixels / 255
        if facts.crop is not None:
            pixels = _centre(pixels, facts.crop, to_nearest=facts.resampler == "pillow")
        return pixels.contiguous()

    def normalised(self, batch: Tensor) -> Tensor:
        """A batch (B, 3, h, w) of results to what the backbone reads, float32."""
        return normalised(batch, self.preprocessing)


@dataclass(frozen=True)
class Training:
    """An augmented view of an image; `none` is the evaluation's.

    `inception` is a crop of random area and shape, `randaugment` such a crop and random operations on it (torchvision's
    RandAugment), `pad-crop` a shift by a few pixels.
    """

    preprocessing: Preprocessing
    augment: Augment = "inception"
    flip: bool = True
    area: tuple[float, float] = (0.08, 1.0)  # share of the image an inception crop covers
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    padding: float = 1 / 8  # of the side, around a pad-crop: 4 of 32 pixels
    randaugment: tuple[int, int] = (2, 9)  # operations and magnitude

    def __post_init__(self) -> None:
        if self.augment not in get_args(Augment):
            raise DataError(f"augment is {self.augment!r}; expected one of {', '.join(get_args(Augment))}.")
        low, high = self.area
        if not 0 < low <= high <= 1:
            raise DataError(f"area is {self.area}; expected shares of the image, 0 < smallest <= largest <= 1.")
        if self.augment == "randaugment":
            _randaugment(*self.randaugment)  # says now, not in a worker, that torchvision is missing

    @property
    def _crops(self) -> bool:
        return self.augment in ("inception", "randaugment")

    @cached_property
    def size(self) -> tuple[int, int]:
        """(height, width) of every view."""
        return view_size(self.preprocessing)

    def wants(self, height: int, width: int, seed: int) -> tuple[int, int] | None:
        """How large the whole image must be decoded for this view to lose nothing; None if only whole will do."""
        if not self._crops:
            return None
        box = self._box(height, width, np.random.default_rng(seed))
        scale = max(self.size[0] / box.height, self.size[1] / box.width)
        return None if scale > 0.5 else (math.ceil(height * scale), math.ceil(width * scale))

    def __call__(self, pixels: Tensor, seed: int, whole: tuple[int, int] | None = None) -> Tensor:
        """Pixels (3, H, W) uint8 to a view (3, h, w) uint8. `whole` (height, width) if they were decoded smaller."""
        rng = np.random.default_rng(seed)
        if self._crops:
            height, width = whole or (pixels.shape[-2], pixels.shape[-1])
            box = self._box(height, width, rng)
            box = _scaled(box, pixels.shape[-2] / height, pixels.shape[-1] / width, *pixels.shape[-2:])
            part = pixels[:, box.top : box.top + box.height, box.left : box.left + box.width]
            view = resize(part, self.size, self.preprocessing.interpolation, _on_bytes(self.preprocessing.resampler))
        else:
            view = Evaluation(self.preprocessing)(pixels)
            if view.dtype != torch.uint8:
                view = (view * 255 + 0.5).clamp(0, 255).to(torch.uint8)
            if self.augment == "pad-crop":
                view = self._shifted(view, rng)
        if self.flip and rng.random() < 0.5 and self.augment != "none":
            view = view.flip(-1)
        if self.augment == "randaugment":
            with torch.random.fork_rng(devices=[]):  # torchvision draws from the global generator
                torch.manual_seed(int(rng.integers(2**63)))
                view = _randaugment(*self.randaugment)(view.contiguous())
        return view.contiguous()

    def normalised(self, batch: Tensor) -> Tensor:
        """A batch (B, 3, h, w) of views to what the backbone reads, float32."""
        return normalised(batch, self.preprocessing)

    def _box(self, height: int, width: int, rng: np.random.Generator) -> Box:
        """A box of random area and shape; after ten misses, the largest central one of an allowed shape."""
        for _ in range(10):
            area = height * width * rng.uniform(*self.area)
            shape = math.exp(rng.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            h, w = round(math.sqrt(area / shape)), round(math.sqrt(area * shape))
            if 0 < h <= height and 0 < w <= width:
                return Box(int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w)
        h = min(height, max(1, round(width / self.ratio[0])))
        w = min(width, max(1, round(height * self.ratio[1])))
        return Box((height - h) // 2, (width - w) // 2, h, w)

    def _shifted(self, view: Tensor, rng: np.random.Generator) -> Tensor:
        height, width = view.shape[-2:]
        down, across = round(height * self.padding), round(width * self.padding)
        padded = F.pad(view, (across, across, down, down))
        top, left = int(rng.integers(2 * down + 1)), int(rng.integers(2 * across + 1))
        return padded[:, top : top + height, left : left + width]


Transform = Evaluation | Training


def view_size(preprocessing: Preprocessing) -> tuple[int, int]:
    """(height, width) of what the backbone reads."""
    if preprocessing.crop is not None:
        return preprocessing.crop
    if isinstance(preprocessing.resize, tuple):
        return preprocessing.resize
    raise DataError(
        f"the backbone's preprocessing ({preprocessing}) gives images of many sizes, which make no batches. "
        f"Fix one with --image-size, or preprocessing.at(size)."
    )


def normalised(batch: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Pixels (B, 3, h, w), uint8 or float32 in 0..1, scaled and normalised per channel, float32.

    By numpy, an image at a time: torch's threads would wait for cores that worker processes have, and numpy takes
    large arrays in huge pages, where the first touch of a batch otherwise costs four times its arithmetic.
    """
    unit = 1 / 255 if batch.dtype == torch.uint8 else 1.0
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (preprocessing.mean, preprocessing.std))
    scale, shift = unit / std, -mean / std
    result = np.empty(tuple(batch.shape), np.float32)
    for i, pixels in enumerate(batch.numpy()):
        result[i] = pixels
        result[i] *= scale
        result[i] += shift
    return torch.from_numpy(result)


def resize(
    pixels: Tensor, size: tuple[int, int], interpolation: Interpolation, resampler: Resampler = "torch"
) -> Tensor:
    """Pixels (3, H, W) uint8 to (3, *size), antialiased; uint8, or float32 in 0..1 for `torch-float`."""
    if resampler == "torch-float":
        pixels = pixels / 255
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    if resampler == "pillow" or interpolation in ("lanczos", "box", "hamming"):  # torch has no such kernels
        image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        return torch.from_numpy(np.array(image.resize(size[::-1], _PILLOW[interpolation]))).permute(2, 0, 1)
    smooth = interpolation != "nearest"
    # A grey image is one plane expanded to three: resize one of them.
    grey = pixels.stride(0) == 0
    planes = pixels[:1] if grey else pixels
    resized = F.interpolate(planes[None], size, mode=interpolation, antialias=smooth)[0]
    if resized.is_floating_point():
        resized = resized.clamp_(0, 1) if resampler != "torch-float" else resized
    return resized.expand(3, -1, -1) if grey else resized


def _resized(asked: int | tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """(height, width) after resizing to an exact size, or the shorter side to a length."""
    if isinstance(asked, tuple):
        return asked
    if height <= width:
        return asked, int(asked * width / height)
    return int(asked * height / width), asked


def _centre(pixels: Tensor, size: tuple[int, int], *, to_nearest: bool) -> Tensor:
    """The centre of that size; what the image does not cover is black. Where it is off by half a pixel, libraries
    differ: transformers cuts, torchvision and timm round half to even.
    """
    height, width = pixels.shape[-2:]
    down, across = max(0, size[0] - height), max(0, size[1] - width)
    if down or across:
        pixels = F.pad(pixels, (across // 2, (across + 1) // 2, down // 2, (down + 1) // 2))
        height, width = pixels.shape[-2:]
    middle: Callable[[float], int] = round if to_nearest else int
    top, left = middle((height - size[0]) / 2), middle((width - size[1]) / 2)
    return pixels[:, top : top + size[0], left : left + size[1]]


def _scaled(box: Box, down: float, across: float, height: int, width: int) -> Box:
    """The box in an image decoded at another size."""
    if (down, across) == (1, 1):
        return box
    top, left = min(height - 1, round(box.top * down)), min(width - 1, round(box.left * across))
    bottom = min(height, max(top + 1, round((box.top + box.height) * down)))
    right = min(width, max(left + 1, round((box.left + box.width) * across)))
    return Box(top, left, bottom - top, right - left)


def _on_bytes(resampler: Resampler) -> Resampler:
    """Views are augmented as bytes; scaling first would change nothing an augmentation leaves alone."""
    return "torch" if resampler == "torch-float" else resampler


def _randaugment(operations: int, magnitude: int) -> Callable[[Tensor], Tensor]:
    try:
        from torchvision.transforms import v2
    except ImportError as error:
        raise DataError("RandAugment is torchvision's: pip install torchvision, or leave it out.") from error
    transform: Callable[[Tensor], Tensor] = v2.RandAugment(operations, magnitude)
    return transform
