"""Single-label metrics: accuracy with its interval, confusion matrix, precision and recall, calibration."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vit_memory.evaluation.metrics.intervals import Interval, wilson_interval

CALIBRATION_BINS = 15  # of equal width, for the calibration error
NO_ANSWER = -1  # the predicted class of an image whose logits are not all finite


@dataclass(frozen=True, slots=True, eq=False)
class SingleLabelScores:
    """Scores of a single-label task."""

    labels: tuple[str, ...]
    images: int
    accuracy: float
    interval: Interval  # of the accuracy
    top5_accuracy: float | None  # None for fewer than ten labels: half of them would be right by chance
    confusion: Tensor  # (C, C) int64, the confusion matrix: rows are true classes, columns predicted ones
    no_answer: Tensor  # (C,) int64, images of each true class with NaN or infinity in the output; not in `confusion`
    calibration_error: float  # mean distance between confidence and accuracy, over bins of confidence

    @property
    def images_per_class(self) -> Tensor:
        """(C,) int64: the images of each true class, with and without an answer."""
        return self.confusion.sum(1) + self.no_answer

    @property
    def balanced_accuracy(self) -> float:
        """The mean recall of the classes that occur."""
        images = self.images_per_class.double()
        return float((self.confusion.diagonal() / images)[images > 0].mean())

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes that occur or are predicted."""
        both = (self.confusion.sum(0) + self.images_per_class).double()
        return float((2 * self.confusion.diagonal() / both)[both > 0].mean())

    def per_class(self) -> dict[str, dict[str, float | int | None]]:
        """Images, recall and precision of every label; None if no image or no prediction has it."""
        images, predicted = self.images_per_class.tolist(), self.confusion.sum(0).tolist()
        correct = self.confusion.diagonal().tolist()
        return {
            label: {
                "images": images[i],
                "recall": correct[i] / images[i] if images[i] else None,
                "precision": correct[i] / predicted[i] if predicted[i] else None,
            }
            for i, label in enumerate(self.labels)
        }

    def most_confused(self, count: int = 5) -> list[tuple[str, str, int]]:
        """The pairs of labels that are confused most often: (true, predicted, images)."""
        errors = self.confusion.clone().fill_diagonal_(0)
        images, positions = errors.flatten().sort(descending=True, stable=True)
        C = len(self.labels)
        pairs = zip(positions[:count].tolist(), images[:count].tolist(), strict=True)
        return [(self.labels[position // C], self.labels[position % C], n) for position, n in pairs if n]

    @property
    def headline(self) -> str:
        """The main metric, in a few words."""
        return f"accuracy {100 * self.accuracy:.1f} %"

    def as_json(self) -> dict[str, Any]:
        """The scores as JSON values."""
        return {
            "kind": "single-label",
            "images": self.images,
            "top1": self.accuracy,
            "top1_interval": list(self.interval),
            "top5": self.top5_accuracy,
            "balanced_accuracy": self.balanced_accuracy,
            "macro_f1": self.macro_f1,
            "calibration_error": self.calibration_error,
            "per_class": self.per_class(),
            "labels": list(self.labels),
            "confusion": self.confusion.tolist(),
            "no_answer": int(self.no_answer.sum()),
        }


def predicted_classes(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence (n,) and predicted class (n,) of logits (n, C): 0 and NO_ANSWER where one is NaN or infinite."""
    finite = logits.isfinite().all(-1)
    confidence, predicted = logits.double().softmax(-1).max(-1)
    return confidence.where(finite, 0.0), predicted.where(finite, NO_ANSWER)


def score_single_label(logits: Tensor, targets: Tensor, labels: Sequence[str]) -> SingleLabelScores:
    """Score logits (n, C) against the true classes (n,).

    >>> score_single_label(torch.tensor([[2.0, 0.0], [3.0, 1.0]]), torch.tensor([0, 1]), ["cat", "dog"]).accuracy
    0.5
    """
    n, C = logits.shape
    confidence, predicted = predicted_classes(logits)
    correct, answered = predicted == targets, predicted != NO_ANSWER
    top5 = ((logits.topk(min(5, C)).indices == targets[:, None]).any(1) & answered).double().mean()
    bins = (confidence * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    gaps = torch.zeros(CALIBRATION_BINS, dtype=torch.float64).index_add_(0, bins, confidence - correct.double())
    accuracy = float(correct.double().mean())
    return SingleLabelScores(
        labels=tuple(labels),
        images=n,
        accuracy=accuracy,
        interval=wilson_interval(accuracy, n),
        top5_accuracy=float(top5) if C >= 10 else None,
        confusion=torch.bincount((targets * C + predicted)[answered], minlength=C * C).view(C, C),
        no_answer=torch.bincount(targets[~answered], minlength=C),
        calibration_error=float(gaps.abs().sum() / n),
    )
