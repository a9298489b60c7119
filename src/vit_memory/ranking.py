"""Multi-label measures that depend on the order of scores: average precision, and the threshold of the best F1.

Where targets are NaN they are not known, and left out. Shape letters: n images, C labels.
"""

import torch
from torch import Tensor


def average_precision(scores: Tensor, targets: Tensor) -> Tensor:
    """(C,): the average precision of each label from scores (n, C) and targets (n, C) of 0, 1 or NaN.

    The mean of the precision at each positive image, images with equal scores counted together; NaN for a label that
    no image is known to show. As scikit-learn's `average_precision_score`.
    """
    ordered, order = scores.double().sort(dim=0, descending=True, stable=True)
    known, positive = _in_order(targets, order)
    ends = _ends_of_ties(ordered)
    precision = positive.cumsum(0) / known.cumsum(0).clamp(min=1)
    return (positive * precision.gather(0, ends)).sum(0) / positive.sum(0)  # 0 / 0 where there are none


def best_thresholds(probabilities: Tensor, targets: Tensor, default: float = 0.5) -> Tensor:
    """(C,): for each label the threshold on probabilities (n, C) with the highest F1, halfway to the next score below.

    Of several that are as good the one nearest to `default`; `default` for a label that no image is known to show.
    """
    ordered, order = probabilities.double().sort(dim=0, descending=True, stable=True)
    known, positive = _in_order(targets, order)
    found = positive.cumsum(0)
    f1 = 2 * found / (known.cumsum(0) + positive.sum(0)).clamp(min=1)
    below = torch.cat([ordered[1:], torch.zeros_like(ordered[:1])])
    cuts = (ordered + below) / 2
    last_of_tie = ordered > below
    last_of_tie[-1] = True
    f1 = torch.where(last_of_tie, f1, -1.0)
    best = f1.max(0).values
    distance = torch.where(f1 >= best - 1e-12, (cuts - default).abs(), torch.inf)
    thresholds = cuts.gather(0, distance.argmin(0, keepdim=True))[0]
    return torch.where(positive.sum(0) > 0, thresholds, default)


def _in_order(targets: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets are known, and which of them are 1, in the order of the scores."""
    sorted_targets = targets.double().gather(0, order)
    return sorted_targets.isfinite().double(), (sorted_targets == 1).double()


def _ends_of_ties(ordered: Tensor) -> Tensor:
    """(n, C): for each place the last place with an equal score."""
    n = len(ordered)
    ends = torch.arange(n)[:, None].expand_as(ordered).clone()
    ends[:-1][ordered[:-1] == ordered[1:]] = n
    return ends.flip(0).cummin(0).values.flip(0)
