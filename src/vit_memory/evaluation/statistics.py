"""Accuracies and their differences with bootstrap intervals, over datasets, seeds and test images.

The unit of a comparison is which test images were right: two methods are compared on the same images and seeds, which
takes out what is hard or easy for both. Datasets have equal weight; within each, seeds and images are drawn again.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 10_000  # between seeds of the draws, the ends of an interval move by 0.04 points


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether a difference is larger than chance explains."""
        return self.low > 0 or self.high < 0


def bootstrap(values: Mapping[str, np.ndarray], seed: int = 0) -> Interval:
    """The mean over datasets of `values`, (seeds, images) each: 0 and 1, or differences of these.

    Images on which all seeds agree with one another are drawn together: there are few different columns, so that the
    draws cost as much for a hundred thousand test images as for a hundred.
    """
    means = np.zeros(DRAWS)
    for name, matrix in values.items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])  # so that the order of datasets changes nothing
        seeds, images = matrix.shape
        columns, counts = np.unique(matrix, axis=1, return_counts=True)
        by_seed = rng.multinomial(seeds, np.full(seeds, 1 / seeds), DRAWS) / seeds  # (draws, seeds)
        by_column = rng.multinomial(images, counts / images, DRAWS) / images  # (draws, columns)
        means += (by_seed * (by_column @ columns.T)).sum(1) / len(values)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(np.mean([matrix.mean() for matrix in values.values()])), float(low), float(high))


@dataclass(frozen=True, slots=True, eq=False)
class RightAnswers:
    """Which test images one training was right about."""

    dataset: str
    method: str
    seed: int
    right: np.ndarray  # (n,) bool


def accuracy(tested: Sequence[RightAnswers], method: str, datasets: Sequence[str] | None = None) -> Interval | None:
    """Of a method over datasets (all that it was tested on by default); None if it was not tested on all of them."""
    own = [one for one in tested if one.method == method and (datasets is None or one.dataset in datasets)]
    tested_on = list(dict.fromkeys(one.dataset for one in own))
    if not own or (datasets is not None and set(tested_on) != set(datasets)):
        return None
    return bootstrap({name: np.stack([o.right for o in own if o.dataset == name]).astype(float) for name in tested_on})


@dataclass(frozen=True, slots=True)
class Difference:
    """One method minus another on the same test images and seeds."""

    interval: Interval
    datasets: tuple[str, ...]  # that both were tested on
    pairs: int  # of trainings with the same dataset and seed


def difference(tested: Sequence[RightAnswers], method: str, other: str) -> Difference | None:
    """`method` minus `other` over all datasets and seeds that both were tested with; None if there are none."""
    right = {(one.dataset, one.seed, one.method): one.right.astype(float) for one in tested}
    datasets: dict[str, np.ndarray] = {}
    pairs = 0
    for name in dict.fromkeys(one.dataset for one in tested):
        seeds = [s for d, s, m in right if d == name and m == method and (d, s, other) in right]
        if seeds:
            datasets[name] = np.stack([right[name, s, method] - right[name, s, other] for s in seeds])
            pairs += len(seeds)
    return Difference(bootstrap(datasets), tuple(datasets), pairs) if datasets else None


def pack_bits(right: np.ndarray) -> str:
    """(n,) bool as hexadecimal digits, the first image first."""
    return np.packbits(right).tobytes().hex()


def unpack_bits(text: str, count: int) -> np.ndarray:
    """The inverse: (count,) bool."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8))[:count].astype(bool)
