"""Predictions from the outputs of a task, by its kind: one label, the labels that are present, or values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vit_memory.task import Task

DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True, slots=True)
class LabelPrediction:
    """A single-label task: the most probable label."""

    label: str
    confidence: float

    def text(self) -> str:
        """As text for one line."""
        return f"{self.label} ({100 * self.confidence:.0f} %)"

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"label": self.label, "confidence": round(self.confidence, 6)}


@dataclass(frozen=True, slots=True)
class LabelsPrediction:
    """A multi-label task: the labels whose probability reaches their threshold, most probable first."""

    present: Mapping[str, float]  # label -> probability

    def text(self) -> str:
        """As text for one line."""
        return ", ".join(f"{label} ({100 * p:.0f} %)" for label, p in self.present.items()) or "none"

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"labels": [{"label": label, "probability": round(p, 6)} for label, p in self.present.items()]}


@dataclass(frozen=True, slots=True)
class ValuesPrediction:
    """A regression task: each value, in the user's units."""

    values: Mapping[str, float]  # name -> value

    def text(self) -> str:
        """As text for one line."""
        return ", ".join(f"{name} {value:.4g}" for name, value in self.values.items())

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"values": {name: float(f"{value:.7g}") for name, value in self.values.items()}}


@dataclass(frozen=True, slots=True)
class NotANumber:
    """A task that computed NaN or infinite numbers for an image: there is nothing to predict from."""

    def text(self) -> str:
        """As text for one line."""
        return "not a number"

    def as_json(self) -> dict[str, Any]:
        """As JSON values, which know no NaN."""
        return {"not_a_number": True}


Prediction = LabelPrediction | LabelsPrediction | ValuesPrediction | NotANumber


def column_names(task: Task) -> list[str]:
    """The columns of a task in a table: a label and its confidence, labels and their probabilities, or its values."""
    if task.kind == "regression":
        return [f"{task.name} {label}" for label in task.labels]
    return [task.name, f"{task.name} {'confidence' if task.kind == 'single-label' else 'probabilities'}"]


def predictions(task: Task, outputs: Tensor) -> Iterator[Prediction]:
    """The prediction of a task for each of B images, from its outputs (B, C).

    >>> task = new_task(backbone, "pets", ["cat", "dog"])
    >>> next(predictions(task, torch.tensor([[2.0, 0.0]]))).label
    'cat'
    """
    outputs = outputs.float().cpu()
    finite = outputs.isfinite().all(-1).tolist()
    for one, good in zip(_by_kind(task, outputs), finite, strict=True):
        yield one if good else NotANumber()


def _by_kind(task: Task, outputs: Tensor) -> Iterator[Prediction]:
    if task.kind == "regression":
        for row in outputs.tolist():
            yield ValuesPrediction(dict(zip(task.labels, row, strict=True)))
    elif task.kind == "multi-label":
        thresholds = task.thresholds or (DEFAULT_THRESHOLD,) * len(task.labels)
        for row in outputs.sigmoid().tolist():
            labels = zip(task.labels, row, thresholds, strict=True)
            present = {label: p for label, p, threshold in labels if p >= threshold}
            yield LabelsPrediction(dict(sorted(present.items(), key=lambda item: -item[1])))
    else:
        confidences, classes = outputs.softmax(-1).max(-1)
        for confidence, i in zip(confidences.tolist(), classes.tolist(), strict=True):
            yield LabelPrediction(task.labels[i], confidence)
