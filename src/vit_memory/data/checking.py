"""Image checks: which images of a dataset cannot be decoded, and the sizes and formats of the others."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from vit_memory.choices import Check
from vit_memory.data.decoding import Encoded, decode
from vit_memory.data.images import Images
from vit_memory.data.splits import Split
from vit_memory.errors import BadImage

_CHUNK = 64  # images per call of a thread


@dataclass(slots=True)
class ImageChecks:
    """The results of checking images."""

    sizes: list[tuple[int, int]] = field(default_factory=list)  # (width, height)
    formats: Counter[str] = field(default_factory=Counter)
    bad: dict[str, str] = field(default_factory=dict)  # name -> reason
    images: int = 0

    def add(self, other: "ImageChecks") -> None:
        """Add the results of other images."""
        self.sizes += other.sizes
        self.formats += other.formats
        self.bad |= other.bad
        self.images += other.images

    def size_range(self) -> dict[str, list[int]] | None:
        """The smallest, median and largest (width, height) by area."""
        if not self.sizes:
            return None
        by_area = sorted(self.sizes, key=lambda size: size[0] * size[1])
        indices = {"smallest": 0, "median": len(by_area) // 2, "largest": -1}
        return {name: list(by_area[i]) for name, i in indices.items()}


def check_images(
    splits: Mapping[str, Split], check: Check, workers: int, progress: Callable[[int, int], None] | None
) -> ImageChecks:
    """Check the images of all splits; `progress` is called with (checked images, all images)."""
    checks = ImageChecks()
    if check == "none":
        return checks
    total = sum(len(split) for split in splits.values())
    for split in splits.values():
        for chunk in _check_in_threads(split.images, check, workers):
            checks.add(chunk)
            if progress is not None:
                progress(checks.images, total)
    return checks


def _check_in_threads(images: Images, check: Check, workers: int) -> Iterator[ImageChecks]:
    """Results per chunk of images. Threads are enough: Pillow and simplejpeg release the GIL while they decode."""
    with ThreadPoolExecutor(max(1, workers)) as pool:
        chunks = (images.select(range(i, min(i + _CHUNK, len(images)))) for i in range(0, len(images), _CHUNK))
        yield from pool.map(lambda chunk: _check_chunk(chunk, check), chunks)


def _check_chunk(images: Images, check: Check) -> ImageChecks:
    checks = ImageChecks(images=len(images))
    for i in range(len(images)):
        try:
            image_format, width, height = _check_image(images, i, check)
        except BadImage as error:
            checks.bad[error.name] = error.reason
        else:
            checks.formats[image_format] += 1
            checks.sizes.append((width, height))
    return checks


def _check_image(images: Images, i: int, check: Check) -> tuple[str, int, int]:
    """Format, width and height. Raises BadImage."""
    name, content = images.name(i), images.read(i)
    if isinstance(content, np.ndarray):
        pixels = decode(content, name)
        return "raw", pixels.shape[2], pixels.shape[1]
    encoded = Encoded(content, name)
    if check == "decode":
        encoded.decode(at_least=(1, 1))  # at an eighth of the size: less work, but every byte of a JPEG is read
    return encoded.format, encoded.width, encoded.height
