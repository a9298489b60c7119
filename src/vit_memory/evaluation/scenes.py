"""Pictures for the demonstration, from what scikit-learn brings along: handwritten digits laid on photographs.

The digits (1797, of 8 × 8 pixels) and the two photographs (a temple, a flower) are real; that one lies on the other is
our doing. So there are three questions about one picture, and no download.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from vit_memory.data.images import ImageArray
from vit_memory.data.splits import Split
from vit_memory.task import Kind

SIZE = 64
PLACES = ("flower", "temple")
_PHOTOGRAPHS = {"flower": "flower.jpg", "temple": "china.jpg"}
# The photographs are cut into cells, and every set draws from cells of its own: training from three fifths of them.
_COLUMNS, _ROWS = 5, 3
_CELLS = ((0, 1, 2), (3,), (4,))  # by (column + 2 row) modulo 5


@dataclass(frozen=True, slots=True, eq=False)
class Scenes:
    """Pictures with what they show."""

    pixels: np.ndarray  # (n, 64, 64, 3) uint8
    digit: np.ndarray  # (n,) 0 to 9
    place: np.ndarray  # (n,) into PLACES
    ink: np.ndarray  # (n,) per cent of the picture that the digit covers

    def split(self, targets: np.ndarray, kind: Kind = "single-label") -> Split:
        """The pictures, to be asked one question."""
        return Split.of(ImageArray.whole("scenes", self.pixels), targets, kind)


def draw_scenes(train: int, validation: int, test: int, seed: int = 0) -> tuple[Scenes, Scenes, Scenes]:
    """Three sets that share neither a digit nor a part of a photograph."""
    from sklearn.datasets import load_digits, load_sample_image  # noqa: PLC0415 - a second's import

    rng = np.random.default_rng(seed)
    digits = load_digits()
    order = rng.permutation(len(digits.images))
    photographs = [load_sample_image(_PHOTOGRAPHS[place]) for place in PLACES]
    made, first = [], 0
    for count, kinds in zip((train, validation, test), _CELLS, strict=True):
        cells = [(c, r) for c in range(_COLUMNS) for r in range(_ROWS) if (c + 2 * r) % 5 in kinds]
        chosen = order[first : first + count]
        first += count
        places = rng.integers(len(PLACES), size=count)
        drawn = [
            _scene(digits.images[i], photographs[place], cells, rng) for i, place in zip(chosen, places, strict=True)
        ]
        pixels, ink = zip(*drawn, strict=True)
        made.append(Scenes(np.stack(pixels), digits.target[chosen], places, np.array(ink)))
    return made[0], made[1], made[2]


def _scene(
    digit: np.ndarray, photograph: np.ndarray, cells: list[tuple[int, int]], rng: np.random.Generator
) -> tuple[np.ndarray, float]:
    """A picture, and how much of it the digit covers, in per cent."""
    column, row = cells[int(rng.integers(len(cells)))]
    high, wide = photograph.shape[0] // _ROWS, photograph.shape[1] // _COLUMNS
    side = int(rng.integers(80, 120))
    top, across = row * high + int(rng.integers(high - side)), column * wide + int(rng.integers(wide - side))
    behind = Image.fromarray(photograph[top : top + side, across : across + side]).resize((SIZE, SIZE))
    behind = behind.point(lambda value: value * 0.25)  # dimmed, so that the digit can be read
    large = int(rng.integers(50, 59))
    shape = Image.fromarray((digit * (255 / 16)).astype(np.uint8)).resize((large, large), Image.Resampling.BICUBIC)
    ink = tuple(int(value) for value in rng.integers(215, 256, 3))
    right, down = (int(value) for value in rng.integers(0, SIZE - large + 1, 2))
    behind.paste(Image.new("RGB", shape.size, ink), (right, down), shape)  # the digit itself is the mask
    return np.asarray(behind), 100 * float(np.asarray(shape).sum()) / 255 / SIZE**2
