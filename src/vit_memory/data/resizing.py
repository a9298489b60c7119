"""Resizing and centre crops, with the arithmetic of the library that a backbone comes from.

Resizing uses torch's 8-bit kernel, as torchvision's transforms do, and Pillow's for backbones whose library uses
Pillow.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vit_memory.preprocessing import Interpolation, Resampler

_PILLOW = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


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
    # A grey image is one plane expanded to three: resize only one.
    grey = pixels.stride(0) == 0
    planes = pixels[:1] if grey else pixels
    resized = F.interpolate(planes[None], size, mode=interpolation, antialias=smooth)[0]
    if resized.is_floating_point():
        resized = resized.clamp_(0, 1) if resampler != "torch-float" else resized
    return resized.expand(3, -1, -1) if grey else resized


def resized_size(target: int | tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """(height, width) after resizing to an exact size, or the shorter side to a length."""
    if isinstance(target, tuple):
        return target
    if height <= width:
        return target, int(target * width / height)
    return int(target * height / width), target


def centre_crop(pixels: Tensor, size: tuple[int, int], *, to_nearest: bool) -> Tensor:
    """The centre of the given size, padded with black if the image is smaller.

    Libraries differ in half pixels: transformers rounds down, torchvision and timm round half to even.
    """
    height, width = pixels.shape[-2:]
    down, across = max(0, size[0] - height), max(0, size[1] - width)
    if down or across:
        pixels = F.pad(pixels, (across // 2, (across + 1) // 2, down // 2, (down + 1) // 2))
        height, width = pixels.shape[-2:]
    to_int: Callable[[float], int] = round if to_nearest else int
    top, left = to_int((height - size[0]) / 2), to_int((width - size[1]) / 2)
    return pixels[:, top : top + size[0], left : left + size[1]]
