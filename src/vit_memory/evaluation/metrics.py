"""Scores of a task on labelled images, by its kind, each with an interval.

single-label   accuracy, balanced accuracy, macro F1, per class, confusion matrix, calibration
multi-label    mAP, F1, precision and recall per label and over all, subset accuracy
regression     MAE, RMSE and R² per value

Targets that are NaN are not known, and left out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vit_memory.predictions import DEFAULT_THRESHOLD
from vit_memory.ranking import average_precision
from vit_memory.task import Task

CALIBRATION_BINS = 15  # of equal width, for the calibration error
_RESAMPLES = 500  # of a bootstrap
Interval = tuple[float, float]  # 95 %


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """A single-label task on some images."""

    labels: tuple[str, ...]
    images: int
    top1: float
    interval: Interval  # of top1
    top5: float | None  # None for five labels or fewer
    confusion: Tensor  # (C, C) int64: rows are what an image shows, columns what was answered
    calibration_error: float  # mean distance of confidence to accuracy, over bins of confidence

    @property
    def balanced_accuracy(self) -> float:
        """The mean recall of the classes that some image shows."""
        shown = self.confusion.sum(1).double()
        return float((self.confusion.diagonal() / shown)[shown > 0].mean())

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes that some image shows or some answer names."""
        both = (self.confusion.sum(0) + self.confusion.sum(1)).double()
        return float((2 * self.confusion.diagonal() / both)[both > 0].mean())

    def per_class(self) -> dict[str, dict[str, float | int | None]]:
        """Of every label: its images, the share of them that was found, and the share of answers that were right."""
        shown, answered = self.confusion.sum(1).tolist(), self.confusion.sum(0).tolist()
        right = self.confusion.diagonal().tolist()
        return {
            label: {
                "images": shown[i],
                "recall": right[i] / shown[i] if shown[i] else None,
                "precision": right[i] / answered[i] if answered[i] else None,
            }
            for i, label in enumerate(self.labels)
        }

    def mistakes(self, most: int = 5) -> list[tuple[str, str, int]]:
        """The pairs that are most often confused: (shown, answered, times)."""
        wrong = self.confusion.clone().fill_diagonal_(0)
        times, places = wrong.flatten().sort(descending=True, stable=True)
        C = len(self.labels)
        found = zip(places[:most].tolist(), times[:most].tolist(), strict=True)
        return [(self.labels[place // C], self.labels[place % C], count) for place, count in found if count]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "kind": "single-label",
            "images": self.images,
            "top1": self.top1,
            "top1_interval": list(self.interval),
            "top5": self.top5,
            "balanced_accuracy": self.balanced_accuracy,
            "macro_f1": self.macro_f1,
            "calibration_error": self.calibration_error,
            "per_class": self.per_class(),
            "labels": list(self.labels),
            "confusion": self.confusion.tolist(),
        }


@dataclass(frozen=True, slots=True, eq=False)
class LabelScores:
    """One label of a multi-label task."""

    images: int  # known to show it
    average_precision: float | None  # None where no image shows it, as below
    precision: float | None  # None where it was never answered
    recall: float | None
    f1: float | None


@dataclass(frozen=True, slots=True, eq=False)
class MultiLabelScores:
    """A multi-label task on some images."""

    images: int
    mean_average_precision: float
    interval: Interval  # of the above
    micro_f1: float  # over all labels of all images
    macro_f1: float  # mean over the labels that some image shows
    subset_accuracy: float | None  # images with every label right, of those where all are known
    per_label: Mapping[str, LabelScores]

    def as_json(self) -> dict[str, Any]:
        """Plain values; null where no image shows a label, so that nothing can be measured."""
        return {
            "kind": "multi-label",
            "images": self.images,
            "mAP": _finite(self.mean_average_precision),
            "mAP_interval": _finite(self.interval),
            "micro_f1": self.micro_f1,
            "macro_f1": _finite(self.macro_f1),
            "subset_accuracy": self.subset_accuracy,
            "per_label": {
                label: {
                    "images": one.images,
                    "average_precision": one.average_precision,
                    "precision": one.precision,
                    "recall": one.recall,
                    "f1": one.f1,
                }
                for label, one in self.per_label.items()
            },
        }


@dataclass(frozen=True, slots=True, eq=False)
class ValueScores:
    """One value of a regression task, in the user's units; every figure with its interval."""

    images: int  # whose value is known
    mae: float
    mae_interval: Interval
    rmse: float
    rmse_interval: Interval
    r2: float
    r2_interval: Interval


@dataclass(frozen=True, slots=True, eq=False)
class RegressionScores:
    """A regression task on some images."""

    images: int
    per_value: Mapping[str, ValueScores]

    @property
    def r2(self) -> float:
        """The mean over the values."""
        return math.fsum(one.r2 for one in self.per_value.values()) / max(1, len(self.per_value))

    def as_json(self) -> dict[str, Any]:
        """Plain values; R² of values that are all the same is undefined, and null."""
        fields = ("images", "mae", "mae_interval", "rmse", "rmse_interval", "r2", "r2_interval")
        return {
            "kind": "regression",
            "images": self.images,
            "r2": _finite(self.r2),
            "per_value": {
                name: {field: _finite(getattr(one, field)) for field in fields} for name, one in self.per_value.items()
            },
        }


def _finite(value: Any) -> Any:
    """For JSON, which has no NaN."""
    if isinstance(value, tuple):
        return [_finite(one) for one in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


AnyScores = Scores | MultiLabelScores | RegressionScores


def score_task(task: Task, outputs: Tensor, targets: Tensor) -> AnyScores:
    """Score outputs (n, C) of a task by its kind. Targets are in the order of the task's labels."""
    if task.kind == "regression":
        return score_values(outputs, targets, task.labels)
    if task.kind == "multi-label":
        return score_labels(outputs, targets, task.labels, task.thresholds)
    return score(outputs, targets, task.labels)


def score(logits: Tensor, truth: Tensor, labels: Sequence[str]) -> Scores:
    """Score logits (n, C) of n images that show `truth` (n,).

    >>> score(torch.tensor([[2.0, 0.0], [3.0, 1.0]]), torch.tensor([0, 1]), ["cat", "dog"]).top1
    0.5
    """
    n, C = logits.shape
    confidence, answers = logits.double().softmax(-1).max(-1)
    right = answers == truth
    confusion = torch.zeros(C * C, dtype=torch.int64).index_add_(0, truth * C + answers, torch.ones_like(truth))
    bins = (confidence * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    off = torch.zeros(CALIBRATION_BINS, dtype=torch.float64).index_add_(0, bins, confidence - right.double())
    top1 = float(right.double().mean())
    return Scores(
        labels=tuple(labels),
        images=n,
        top1=top1,
        interval=wilson(top1, n),
        top5=float((logits.topk(5).indices == truth[:, None]).any(1).double().mean()) if C > 5 else None,
        confusion=confusion.view(C, C),
        calibration_error=float(off.abs().sum() / n),
    )


def score_labels(
    logits: Tensor, targets: Tensor, labels: Sequence[str], thresholds: Sequence[float] | None = None
) -> MultiLabelScores:
    """Score logits (n, C) of a multi-label task against targets (n, C) of 0, 1 and NaN.

    >>> targets = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    >>> score_labels(torch.tensor([[2.0, -1.0], [2.0, -2.0]]), targets, ["red", "round"]).mean_average_precision
    0.75
    """
    n, C = logits.shape
    probabilities = logits.double().sigmoid()
    answered = probabilities >= torch.tensor(thresholds or (DEFAULT_THRESHOLD,) * C, dtype=torch.float64)
    known = targets.isfinite()
    shown, answered = (targets == 1) & known, answered & known
    right, positives, answers = (table.sum(0).double() for table in (shown & answered, shown, answered))
    precision, recall, f1 = right / answers, right / positives, 2 * right / (positives + answers)
    precisions = average_precision(probabilities, targets)
    whole = known.all(1)

    def mean_average_precision(chosen: Tensor) -> float:
        return float(average_precision(probabilities[chosen], targets[chosen]).nanmean())

    def some(value: Tensor) -> float | None:
        return float(value) if bool(value.isfinite()) else None

    return MultiLabelScores(
        images=n,
        mean_average_precision=float(precisions.nanmean()),
        interval=bootstrap(mean_average_precision, n),
        micro_f1=float(2 * right.sum() / (positives + answers).sum().clamp(min=1)),
        macro_f1=float(f1[positives > 0].mean()) if bool((positives > 0).any()) else math.nan,
        subset_accuracy=float((shown == answered)[whole].all(1).double().mean()) if bool(whole.any()) else None,
        per_label={
            label: LabelScores(int(positives[i]), some(precisions[i]), some(precision[i]), some(recall[i]), some(f1[i]))
            for i, label in enumerate(labels)
        },
    )


def score_values(outputs: Tensor, targets: Tensor, names: Sequence[str]) -> RegressionScores:
    """Score the values (n, C) of a regression task against targets (n, C), NaN where not known.

    >>> score_values(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [2.0]]), ["height"]).per_value["height"].mae
    0.5
    """
    per_value = {}
    for name, answers, wanted in zip(names, outputs.double().T, targets.double().T, strict=True):
        known = wanted.isfinite()
        if not bool(known.any()):
            continue
        truth, error = wanted[known], answers[known] - wanted[known]

        def mae(chosen: Tensor, error: Tensor = error) -> float:
            return float(error[chosen].abs().mean())

        def rmse(chosen: Tensor, error: Tensor = error) -> float:
            return math.sqrt(float(error[chosen].square().mean()))

        def r2(chosen: Tensor, error: Tensor = error, truth: Tensor = truth) -> float:
            spread = float((truth[chosen] - truth[chosen].mean()).square().sum())
            same = spread <= 1e-12 * float(truth[chosen].square().sum())  # one image drawn again and again
            return math.nan if same else 1 - float(error[chosen].square().sum()) / spread

        n = len(truth)
        everything = torch.arange(n)
        per_value[name] = ValueScores(
            images=n,
            mae=mae(everything),
            mae_interval=bootstrap(mae, n),
            rmse=rmse(everything),
            rmse_interval=bootstrap(rmse, n),
            r2=r2(everything),
            r2_interval=bootstrap(r2, n),
        )
    return RegressionScores(len(targets), per_value)


def wilson(share: float, count: int, z: float = 1.96) -> Interval:
    """The 95 % interval of a share seen in `count` images: sensible for few images and for shares near 0 and 1."""
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))  # rounding must not exclude it


def bootstrap(figure: Callable[[Tensor], float], count: int, seed: int = 0) -> Interval:
    """The 95 % interval of a figure of `count` images: its percentiles over images drawn with replacement.

    `figure` is called with the places (count,) of the images drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = [figure(torch.randint(count, (count,), generator=generator)) for _ in range(_RESAMPLES)]
    low, high = torch.tensor(drawn, dtype=torch.float64).nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(low), float(high)
