"""How well a task answers: accuracy with its interval, per class, what is taken for what, and whether it knows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BINS = 15  # of equal width, for the calibration error


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """A single-label task on some images."""

    labels: tuple[str, ...]
    images: int
    top1: float
    interval: tuple[float, float]  # 95 %, of top1
    top5: float | None  # None for five labels or fewer
    confusion: Tensor  # (C, C) int64: rows are what an image shows, columns what was answered
    calibration_error: float  # mean distance of confidence to accuracy, over bins of confidence

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
        """What is most often taken for what: (shown, answered, times)."""
        wrong = self.confusion.clone().fill_diagonal_(0)
        times, places = wrong.flatten().sort(descending=True, stable=True)
        C = len(self.labels)
        found = zip(places[:most].tolist(), times[:most].tolist(), strict=True)
        return [(self.labels[place // C], self.labels[place % C], count) for place, count in found if count]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "images": self.images,
            "top1": self.top1,
            "top1_interval": list(self.interval),
            "top5": self.top5,
            "calibration_error": self.calibration_error,
            "per_class": self.per_class(),
            "labels": list(self.labels),
            "confusion": self.confusion.tolist(),
        }


def score(logits: Tensor, truth: Tensor, labels: Sequence[str]) -> Scores:
    """Score logits (n, C) of n images that show `truth` (n,).

    >>> score(torch.tensor([[2.0, 0.0], [3.0, 1.0]]), torch.tensor([0, 1]), ["cat", "dog"]).top1
    0.5
    """
    n, C = logits.shape
    confidence, answers = logits.double().softmax(-1).max(-1)
    right = answers == truth
    confusion = torch.zeros(C * C, dtype=torch.int64).index_add_(0, truth * C + answers, torch.ones_like(truth))
    bins = (confidence * _BINS).long().clamp(max=_BINS - 1)
    off = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, bins, confidence - right.double())
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


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share seen in `count` images: sensible for few images and for shares near 0 and 1."""
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, centre - half), min(1.0, centre + half)
