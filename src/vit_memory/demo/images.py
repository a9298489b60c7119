"""Images for the demo, from data that comes with scikit-learn: handwritten digits pasted on photographs.

The digits (1797, of 8 × 8 pixels) and the two photographs (a temple, a flower) are real; the combination is made here,
so that three tasks have something to predict on one image, without a download.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from vit_memory.choices import Kind
from vit_memory.data.images import ImageArray
from vit_memory.data.splits import Split

SIZE = 64
PHOTOGRAPHS = {"flower": "flower.jpg", "temple": "china.jpg"}
# The photographs are cut into 5 × 3 cells. Training, validation and test images crop backgrounds from different cells:
# training from three fifths of them, validation and test from one fifth each.
_COLUMNS, _ROWS = 5, 3
_CELLS_OF_SPLITS = ((0, 1, 2), (3,), (4,))  # by (column + 2 row) modulo 5


@dataclass(frozen=True, slots=True, eq=False)
class DemoImages:
    """Images with what they show."""

    pixels: np.ndarray  # (n, 64, 64, 3) uint8
    digit: np.ndarray  # (n,) 0 to 9
    background: np.ndarray  # (n,) index into PHOTOGRAPHS
    ink: np.ndarray  # (n,) per cent of the image that the digit covers

    def split(self, targets: np.ndarray, kind: Kind = "single-label") -> Split:
        """The images with the targets of one task."""
        return Split.of(ImageArray.whole("demo", self.pixels), targets, kind)


def draw_images(train: int, validation: int, test: int, seed: int = 0) -> tuple[DemoImages, DemoImages, DemoImages]:
    """Three splits that share neither a digit nor a part of a photograph."""
    from sklearn.datasets import load_digits, load_sample_image  # noqa: PLC0415 - a second's import

    rng = np.random.default_rng(seed)
    digits = load_digits()
    order = rng.permutation(len(digits.images))
    photographs = [load_sample_image(file) for file in PHOTOGRAPHS.values()]
    splits, first = [], 0
    for count, remainders in zip((train, validation, test), _CELLS_OF_SPLITS, strict=True):
        cells = [(c, r) for c in range(_COLUMNS) for r in range(_ROWS) if (c + 2 * r) % 5 in remainders]
        chosen = order[first : first + count]
        first += count
        backgrounds = rng.integers(len(photographs), size=count)
        drawn = [
            _draw(digits.images[i], photographs[background], cells, rng)
            for i, background in zip(chosen, backgrounds, strict=True)
        ]
        pixels, ink = zip(*drawn, strict=True)
        splits.append(DemoImages(np.stack(pixels), digits.target[chosen], backgrounds, np.array(ink)))
    return splits[0], splits[1], splits[2]


def _draw(
    digit: np.ndarray, photograph: np.ndarray, cells: list[tuple[int, int]], rng: np.random.Generator
) -> tuple[np.ndarray, float]:
    """One image, and the per cent of it that the digit covers."""
    column, row = cells[int(rng.integers(len(cells)))]
    cell_height, cell_width = photograph.shape[0] // _ROWS, photograph.shape[1] // _COLUMNS
    side = int(rng.integers(80, 120))
    top = row * cell_height + int(rng.integers(cell_height - side))
    left = column * cell_width + int(rng.integers(cell_width - side))
    image = Image.fromarray(photograph[top : top + side, left : left + side]).resize((SIZE, SIZE))
    image = image.point(lambda value: value * 0.25)  # dimmed, so that the digit can be read
    digit_size = int(rng.integers(50, 59))
    mask = Image.fromarray((digit * (255 / 16)).astype(np.uint8))
    mask = mask.resize((digit_size, digit_size), Image.Resampling.BICUBIC)
    colour = tuple(int(value) for value in rng.integers(215, 256, 3))
    x, y = (int(value) for value in rng.integers(0, SIZE - digit_size + 1, 2))
    image.paste(Image.new("RGB", mask.size, colour), (x, y), mask)
    return np.asarray(image), 100 * float(np.asarray(mask).sum()) / 255 / SIZE**2
