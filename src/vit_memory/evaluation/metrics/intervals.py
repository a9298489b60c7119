"""95 % intervals of scores, and scores as JSON values."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_RESAMPLES = 500
Interval = tuple[float, float]  # 95 %


def wilson_interval(share: float, count: int, z: float = 1.96) -> Interval:
    """The interval of a share of `count` images, by Wilson: valid for few images and for shares near 0 and 1."""
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))  # rounding must not exclude it


def bootstrap_interval(score: Callable[[Tensor], float], count: int, seed: int = 0) -> Interval:
    """The interval of a score of `count` images: its percentiles over images drawn with replacement.

    `score` is called with the indices (count,) of the images drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    scores = [score(torch.randint(count, (count,), generator=generator)) for _ in range(_RESAMPLES)]
    low, high = torch.tensor(scores, dtype=torch.float64).nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(low), float(high)


def finite_or_none(value: Any) -> Any:
    """A score, or the ends of an interval as a list, with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, tuple):
        return [finite_or_none(end) for end in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None
