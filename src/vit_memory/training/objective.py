"""Losses and validation scores, by the kind of the task. The score compares settings.

single-label   cross-entropy          accuracy, or balanced accuracy where the loss is balanced
multi-label    binary cross-entropy   mAP, the mean over labels of their average precision
regression     smooth L1              R², the share of explained variance

Scores are computed from sums that can be added over processes. NaN targets are unknown and left out.

Shape letters: B batch, T settings, C labels, n validation images.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_memory.average_precision import average_precision, best_thresholds
from vit_memory.data.splits import Split
from vit_memory.errors import TrainingError
from vit_memory.task import TargetScale, Task
from vit_memory.training.recipe import Recipe

Sums = list[Tensor]


class Objective(ABC):
    """The loss and the score of one kind of task."""

    metric: str  # the name of the score
    scale: TargetScale | None = None  # regression only: mean and standard deviation of the targets

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(T,): the loss of outputs (T, B, C) for every setting, summed over the images."""

    @abstractmethod
    def start(self, settings: int, device: torch.device) -> Sums:
        """Empty sums, before the first validation image."""

    @abstractmethod
    def add(self, sums: Sums, outputs: Tensor, targets: Tensor, indices: Tensor) -> None:
        """Add the outputs (T, B, C) for these indices of the validation split."""

    @abstractmethod
    def scores(self, sums: Sums) -> Tensor:
        """(T,): every setting's score; higher is better."""

    def thresholds(self, sums: Sums) -> list[list[float]] | None:
        """Multi-label: for every setting and label, the probability from which the label counts as present."""
        return None

    def part_scores(self, sums: Sums) -> list[list[float]] | None:
        """Where a score is a mean over several datasets: for every setting, the score on each."""
        return None


class SingleLabel(Objective):
    """One label per image."""

    def __init__(self, labels: int, smoothing: float = 0.0, weights: Tensor | None = None) -> None:
        self.labels, self.smoothing, self.weights = labels, smoothing, weights  # (C,) or None
        self.metric = "accuracy" if weights is None else "balanced accuracy"

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, each image weighted by its class where the loss is balanced."""
        T, B, C = outputs.shape
        each = F.cross_entropy(
            outputs.reshape(T * B, C), targets.repeat(T), reduction="none", label_smoothing=self.smoothing
        ).view(T, B)
        if self.weights is not None:
            each = each * self.weights.to(each.device)[targets]
        return each.sum(1)

    def start(self, settings: int, device: torch.device) -> Sums:
        """Correct predictions (T, C) and images (C,) of every class."""
        return [torch.zeros(settings, self.labels, device=device), torch.zeros(self.labels, device=device)]

    def add(self, sums: Sums, outputs: Tensor, targets: Tensor, indices: Tensor) -> None:
        """Count correct predictions by class."""
        correct = (outputs.argmax(-1) == targets).float()
        sums[0].index_add_(1, targets, correct)
        sums[1].index_add_(0, targets, torch.ones_like(targets, dtype=torch.float32))

    def scores(self, sums: Sums) -> Tensor:
        """Accuracy over all images, or with balanced weights the mean over classes."""
        correct, images = sums
        if self.weights is None:
            return correct.sum(1) / images.sum()
        return (correct / images)[:, images > 0].mean(1)


class MultiLabel(Objective):
    """Any number of labels per image."""

    metric = "mAP"

    def __init__(
        self,
        validation: Tensor,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
        learned: Tensor | None = None,
    ) -> None:
        self.validation = validation  # (n, C) targets of the validation images, NaN where unknown
        self.smoothing, self.weights = smoothing, weights  # (2, C) of absent and present labels, or None
        self.learned = learned  # (C,) whether any training image has the label; None: all

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Binary cross-entropy, summed over the labels of an image; unknown labels cost nothing.

        With the mean instead of the sum, a hundred labels were learned far more slowly at the same rates.
        """
        known = targets.isfinite()
        wanted = torch.where(known, targets, 0.0)
        weight = known.to(outputs.dtype)
        if self.weights is not None:
            absent, present = self.weights.to(outputs)
            weight = weight * torch.where(wanted > 0.5, present, absent)
        smooth = wanted * (1 - self.smoothing) + self.smoothing / 2
        each = F.binary_cross_entropy_with_logits(outputs, smooth.expand_as(outputs), reduction="none")
        return (each * weight).sum((1, 2))

    def start(self, settings: int, device: torch.device) -> Sums:
        """Outputs (T, n, C), and whether an image was evaluated (n,): average precision needs all outputs."""
        n, C = self.validation.shape
        return [torch.zeros(settings, n, C, device=device), torch.zeros(n, device=device)]

    def add(self, sums: Sums, outputs: Tensor, targets: Tensor, indices: Tensor) -> None:
        """Store the outputs of these images."""
        sums[0][:, indices] = outputs
        sums[1][indices] = 1.0

    def _evaluated(self, sums: Sums) -> tuple[Tensor, Tensor]:
        outputs, evaluated = sums[0].cpu(), sums[1].cpu() > 0
        return outputs[:, evaluated], self.validation[evaluated]

    def scores(self, sums: Sums) -> Tensor:
        """Mean average precision over the labels that any validation image has."""
        outputs, targets = self._evaluated(sums)
        return torch.stack([average_precision(one, targets).nanmean() for one in outputs])

    def thresholds(self, sums: Sums) -> list[list[float]]:
        """Those with the best F1 on the validation images; 1 for labels that no training image has."""
        outputs, targets = self._evaluated(sums)
        learned = torch.ones(targets.shape[1], dtype=torch.bool) if self.learned is None else self.learned
        return [torch.where(learned, best_thresholds(one.sigmoid(), targets), 1.0).tolist() for one in outputs]


class Regression(Objective):
    """One or several numbers per image, standardised by the training images' mean and standard deviation."""

    metric = "R²"

    def __init__(self, scale: TargetScale) -> None:
        self.scale = scale

    def _standardised(self, targets: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Targets (B, C) in standard deviations, 0 where unknown, and which are known."""
        assert self.scale is not None
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (self.scale.mean, self.scale.std))
        known = targets.isfinite()
        standard = (targets.cpu().double() - mean) / std
        return torch.where(known.cpu(), standard, 0.0).float().to(device), known.to(device)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Smooth L1, the mean over the values of an image; unknown values cost nothing."""
        wanted, known = self._standardised(targets, outputs.device)
        each = F.smooth_l1_loss(outputs, wanted.expand_as(outputs), reduction="none")
        return (each * known).mean(2).sum(1)

    def start(self, settings: int, device: torch.device) -> Sums:
        """Squared errors (T, C); number, sum and sum of squares of the targets (C,)."""
        assert self.scale is not None
        C = len(self.scale.mean)
        return [torch.zeros(settings, C, device=device), *(torch.zeros(C, device=device) for _ in range(3))]

    def add(self, sums: Sums, outputs: Tensor, targets: Tensor, indices: Tensor) -> None:
        """Add squared errors, and the sums of the targets."""
        wanted, known = self._standardised(targets, outputs.device)
        sums[0] += ((outputs - wanted).square() * known).sum(1)
        for i, part in enumerate((known, wanted, wanted.square()), 1):
            sums[i] += part.sum(0)

    def scores(self, sums: Sums) -> Tensor:
        """R²: the mean over the values of 1 - squared error / variance."""
        errors, number, total, squares = sums
        spread = squares - total.square() / number.clamp(min=1)
        # If all validation images have one value, the variance of the training images is used instead: 1 each.
        spread = torch.where(spread > 1e-6 * number, spread, number)
        return (1 - errors / spread)[:, number > 0].mean(1)


def objective_for(task: Task, recipe: Recipe, train: Split, validation: Split) -> Objective:
    """The objective of a task on this data. Raises TrainingError if the data does not fit it or teaches nothing."""
    for name, split in (("training", train), ("validation", validation)):
        if split.kind != task.kind:
            raise TrainingError(f"task {task.name!r} is {task.kind}, but the {name} images are {split.kind}.")
        if task.kind != "single-label" and split.targets.shape[1] != len(task.labels):
            raise TrainingError(
                f"the {name} images have {split.targets.shape[1]} columns, but task {task.name!r} answers "
                f"{len(task.labels)}: {_some(task.labels)}."
            )
    targets = torch.from_numpy(train.targets)
    if task.kind == "single-label":
        return _single_label(task, recipe, train, validation)
    if task.kind == "multi-label":
        return _multi_label(task, recipe, targets, torch.from_numpy(validation.targets))
    if recipe.balance or recipe.label_smoothing:
        raise TrainingError("balancing and label smoothing are for labels; a regression task has values.")
    if not bool(torch.from_numpy(validation.targets).isfinite().any()):
        raise TrainingError(
            f"task {task.name!r}: no validation image has a known value, so settings cannot be compared. "
            f"Fill some in, or leave the validation split to be drawn."
        )
    return Regression(_scale(task, targets))


def _multi_label(task: Task, recipe: Recipe, targets: Tensor, validation: Tensor) -> MultiLabel:
    present, absent = (targets == 1).sum(0).double(), (targets == 0).sum(0).double()
    if not bool(((present > 0) & (absent > 0)).any()):
        raise TrainingError(
            f"task {task.name!r}: no label is present in some training images and absent in others: there is "
            f"nothing to tell apart."
        )
    if not bool((validation == 1).any()):
        raise TrainingError(
            f"task {task.name!r}: no validation image has any of its labels, so settings cannot be compared. "
            f"Add some, or leave the validation split to be drawn."
        )
    weights = None
    if recipe.balance:  # presence and absence of each label have the same weight
        both = present + absent
        weights = torch.stack([both / (2 * absent.clamp(min=1)), both / (2 * present.clamp(min=1))]).float()
    return MultiLabel(validation, recipe.label_smoothing, weights, present > 0)


def _single_label(task: Task, recipe: Recipe, train: Split, validation: Split) -> SingleLabel:
    labels = task.labels
    for name, split in (("training", train), ("validation", validation)):
        if split.targets.min() < 0 or split.targets.max() >= len(labels):
            raise TrainingError(
                f"the {name} images hold label number {int(split.targets.max())}, but task {task.name!r} answers "
                f"{len(labels)}: {_some(labels)}."
            )
    if len(set(train.targets.tolist())) < 2:
        label = labels[int(train.targets[0])]
        raise TrainingError(f"all training images show {label!r}: there is nothing to tell apart.")
    weights = None
    if recipe.balance:  # all classes have the same weight, and the mean over the images is 1
        counts = torch.bincount(torch.from_numpy(train.targets), minlength=len(labels)).float()
        weights = torch.where(counts > 0, len(train) / ((counts > 0).sum() * counts.clamp(min=1)), 0.0)
    return SingleLabel(len(labels), recipe.label_smoothing, weights)


def _scale(task: Task, targets: Tensor) -> TargetScale:
    means, stds = [], []
    for label, column in zip(task.labels, targets.double().T, strict=True):
        known = column[column.isfinite()]
        if not len(known):
            raise TrainingError(f"task {task.name!r}, {label}: no training image has a value.")
        std = float(known.std(correction=0))
        if std == 0:
            raise TrainingError(
                f"task {task.name!r}, {label}: all training images have {float(known[0]):g}: there is nothing to learn."
            )
        if std < 1e-6 * float(known.abs().max()):
            raise TrainingError(
                f"task {task.name!r}, {label}: values around {float(known.mean()):g} that differ by {std:g} cannot be "
                f"told apart in float32. Subtract an offset from all of them."
            )
        means.append(float(known.mean()))
        stds.append(std)
    return TargetScale(tuple(means), tuple(stds))


def _some(labels: Sequence[str]) -> str:
    return ", ".join(labels[:5]) + (" …" if len(labels) > 5 else "")
