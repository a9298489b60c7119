"""Multi-label measures that depend on the order of scores: average precision, and the threshold of the best F1.

Where targets are NaN they are not known, and left out. Shape letters: n images, C labels.
"""

import torch
from torch import Tensor

_FEWEST_POSITIVES = 5


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
    """(C,): for each label the threshold on probabilities (n, C) with the highest F1.

    Labels that fewer than five images show have too little to choose by; they share the threshold with the highest F1
    over all labels. Where no image shows any label it is `default`.
    """
    shared = _best_thresholds(probabilities.reshape(-1, 1), targets.reshape(-1, 1), default)
    frequent = (targets == 1).sum(0) >= _FEWEST_POSITIVES
    return torch.where(frequent, _best_thresholds(probabilities, targets, default), shared)


def _best_thresholds(probabilities: Tensor, targets: Tensor, default: float) -> Tensor:
    """Each column by itself; a cut lies halfway to the next score below, of equals the one nearest to `default`."""
    ordered, order = probabilities.double().sort(dim=0, descending=True, stable=True)
    known, positive = _in_order(targets, order)
    f1 = 2 * positive.cumsum(0) / (known.cumsum(0) + positive.sum(0)).clamp(min=1)
    below = torch.cat([ordered[1:], torch.zeros_like(ordered[:1])])
    cuts = (ordered + below) / 2
    last_of_tie = ordered > below
    last_of_tie[-1] = True
    f1 = torch.where(last_of_tie, f1, -1.0)
    distance = torch.where(f1 >= f1.max(0).values - 1e-12, (cuts - default).abs(), torch.inf)
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
