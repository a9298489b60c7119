"""`digits`: 1797 handwritten digits of 8 × 8 pixels, part of scikit-learn, so no download is needed."""

import numpy as np

from vit_memory.data.images import ImageArray
from vit_memory.data.readers.base import RawDataset, RawSplit, Reader
from vit_memory.errors import DataError


def read_digits() -> RawDataset:
    """Read scikit-learn's digits, scaled from 0..16 to 0..255."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("digits: needs scikit-learn: pip install scikit-learn") from error
    digits = load_digits()
    pixels = np.clip(digits.images * (255 / 16) + 0.5, 0, 255).astype(np.uint8)
    labels = [str(number) for number in digits.target]
    return RawDataset("digits", {"all": RawSplit(ImageArray.whole("digits", pixels), labels)})


DIGITS = Reader(
    "digits:                             1797 handwritten digits of scikit-learn",
    lambda source: source.name == "digits",
    lambda source: read_digits(),
)
