"""How a backbone wants its images. The facts travel with the weights and with every task; `data` applies them."""

from dataclasses import dataclass, replace
from typing import Literal

Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
Resampler = Literal["torch", "torch-float", "pillow"]


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How the backbone wants its images: resize, crop the centre, scale to 0..1, normalise per RGB channel."""

    resize: int | tuple[int, int] | None  # shorter side, or exact (height, width); None leaves the size alone
    crop: tuple[int, int] | None  # (height, width) cut from the centre after resizing
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Interpolation
    # Whose arithmetic resizes: torch's on 8-bit pixels (transformers), torch's on pixels already scaled to 0..1
    # (DINOv3's processor), or Pillow's (timm). They differ by up to two levels of 255 in a few pixels.
    resampler: Resampler = "torch"

    def at(self, size: int | tuple[int, int]) -> "Preprocessing":
        """The same way to another image size: the resize keeps its proportion to the crop."""
        height, width = (size, size) if isinstance(size, int) else size
        if self.crop is None or self.resize is None or isinstance(self.resize, tuple):
            return replace(self, resize=(height, width), crop=None)
        shorter = round(self.resize * min(height, width) / min(self.crop))
        return replace(self, resize=max(shorter, height, width), crop=(height, width))
