"""Multi-label metrics: mAP with its interval, F1, precision and recall per label and over all, subset accuracy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vit_memory.average_precision import average_precision
from vit_memory.evaluation.metrics.intervals import Interval, bootstrap_interval, finite_or_none
from vit_memory.predictions import DEFAULT_THRESHOLD


@dataclass(frozen=True, slots=True, eq=False)
class LabelScores:
    """Scores of one label of a multi-label task; the fields are keys in JSON."""

    images: int  # known to have the label
    average_precision: float | None  # None if no image has the label, as for recall and F1
    precision: float | None  # None if the label was never predicted
    recall: float | None
    f1: float | None


@dataclass(frozen=True, slots=True, eq=False)
class MultiLabelScores:
    """Scores of a multi-label task."""

    images: int
    mean_average_precision: float
    interval: Interval  # of the mean average precision
    micro_f1: float  # over all labels of all images
    macro_f1: float  # mean over the labels that occur
    subset_accuracy: float | None  # share of images with every label correct, of those with every label known
    per_label: Mapping[str, LabelScores]

    @property
    def headline(self) -> str:
        """The main metric, in a few words."""
        return f"mAP {self.mean_average_precision:.3f}"

    def as_json(self) -> dict[str, Any]:
        """The scores as JSON values; null for a score that no image defines."""
        return {
            "kind": "multi-label",
            "images": self.images,
            "mAP": finite_or_none(self.mean_average_precision),
            "mAP_interval": finite_or_none(self.interval),
            "micro_f1": self.micro_f1,
            "macro_f1": finite_or_none(self.macro_f1),
            "subset_accuracy": self.subset_accuracy,
            "per_label": {label: asdict(scores) for label, scores in self.per_label.items()},
        }


def score_multi_label(
    logits: Tensor, targets: Tensor, labels: Sequence[str], thresholds: Sequence[float] | None = None
) -> MultiLabelScores:
    """Score logits (n, C) of a multi-label task against targets (n, C) of 0, 1 and NaN (unknown).

    >>> targets = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    >>> score_multi_label(torch.tensor([[2.0, -1.0], [2.0, -2.0]]), targets, ["red", "round"]).mean_average_precision
    0.75
    """
    n, C = logits.shape
    answered = ~logits.isnan()
    probabilities = logits.double().sigmoid().where(answered, -1.0)  # NaN is no answer, and less sure than any
    known = targets.isfinite()
    present = (targets == 1) & known
    predicted = (probabilities >= torch.tensor(thresholds or (DEFAULT_THRESHOLD,) * C, dtype=torch.float64)) & known
    # Images per label, (C,) each.
    true_positives, positives, predictions = (x.sum(0).double() for x in (present & predicted, present, predicted))
    f1 = 2 * true_positives / (positives + predictions)
    per_label = zip(
        positives.int().tolist(),
        _defined(average_precision(probabilities, targets)),
        _defined(true_positives / predictions),
        _defined(true_positives / positives),
        _defined(f1),
        strict=True,
    )
    complete, right = known.all(1), (present == predicted) & answered

    def mean_average_precision(indices: Tensor) -> float:
        return float(average_precision(probabilities[indices], targets[indices]).nanmean())

    return MultiLabelScores(
        images=n,
        mean_average_precision=mean_average_precision(torch.arange(n)),
        interval=bootstrap_interval(mean_average_precision, n),
        micro_f1=float(2 * true_positives.sum() / (positives + predictions).sum().clamp(min=1)),
        macro_f1=float(f1[positives > 0].mean()) if bool((positives > 0).any()) else math.nan,
        subset_accuracy=float(right[complete].all(1).double().mean()) if bool(complete.any()) else None,
        per_label={label: LabelScores(*scores) for label, scores in zip(labels, per_label, strict=True)},
    )


def _defined(scores: Tensor) -> list[float | None]:
    """Scores (C,) with None for 0 / 0."""
    return [score if math.isfinite(score) else None for score in scores.tolist()]
