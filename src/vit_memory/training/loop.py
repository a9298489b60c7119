"""fit: train tasks on images, all their settings on one pass of the frozen backbone per batch."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.data.loading import BadImages, Batch, Loader, OnBadImage
from vit_memory.data.splits import Split
from vit_memory.data.transforms import Evaluation, Training
from vit_memory.errors import BackboneMismatch, TrainingError
from vit_memory.families.roles import Preprocessing
from vit_memory.graph import TaskGraph
from vit_memory.task import Task
from vit_memory.training.checkpoint import Standing, read_checkpoint, training_key, write_checkpoint
from vit_memory.training.recipe import Recipe
from vit_memory.training.sweep import Setting, Sweep
from vit_memory.trunk import run_trunk

log = logging.getLogger(__name__)
_PLANNED = 256  # batches handed to the workers at once, so that a long training is not one long list


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a training stands, as told to whoever shows it."""

    step: int  # optimiser steps done
    steps: int
    losses: tuple[float, ...]  # mean of every setting since the last report; NaN for those stopped
    accuracies: tuple[float, ...] | None  # on the validation images, where they were just looked at


@dataclass(frozen=True, slots=True, eq=False)
class SettingResult:
    """What became of one setting."""

    setting: Setting
    task: Task  # trained; as it started where it diverged
    accuracy: float | None  # on the validation images; None where it diverged
    stopped_at: int | None = None  # the step it diverged at


@dataclass(frozen=True, slots=True, eq=False)
class FitResult:
    """Every setting with its validation accuracy, and the best of them."""

    settings: tuple[SettingResult, ...]

    @property
    def best(self) -> SettingResult:
        """The highest validation accuracy; of equals the smallest, then the first."""
        living = [result for result in self.settings if result.accuracy is not None]
        return max(living, key=lambda result: (result.accuracy or 0.0, -result.task.parameters))


def fit(
    backbone: Backbone,
    tasks: Sequence[Task],
    train: Split,
    validation: Split,
    recipe: Recipe | None = None,
    *,
    parents: Sequence[Task] = (),
    image_size: int | None = None,
    workers: int = 0,
    on_bad_image: OnBadImage = "fail",
    bad: BadImages | None = None,
    report: Callable[[Progress], None] | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int = 50,
    resume: bool = False,
) -> FitResult:
    """Train every task with every learning rate and weight decay of the recipe, all at once.

    `tasks` come from `new_task`: the same labels, any memory sizes, starts, seeds and composable regimes. `parents` are
    what they extend, with all ancestors. The backbone is not changed, nor are the parents. The same arguments give the
    same bits on the same machine; each setting ends with the weights it would have had alone, to rounding.

    With a `checkpoint` file, `resume` goes on from it to the same weights as if nothing had happened; a checkpoint of
    another training is refused. `bad` gathers the images that were left out.
    """
    recipe = recipe or Recipe()
    facts = _preprocessing(backbone, image_size)
    _check(backbone, tasks, train, validation)
    settings = [
        Setting(task, rate, decay) for task, rate, decay in product(tasks, recipe.learning_rates, recipe.weight_decays)
    ]
    sweep = Sweep(backbone, settings, TaskGraph(parents), recipe)
    view = Training(facts, augment=recipe.augment, flip=recipe.flip, area=recipe.area)
    bad = BadImages() if bad is None else bad
    learning = Loader(train, view, min(recipe.batch, len(train)), workers, on_bad_image, bad)
    judging = Loader(validation, Evaluation(facts), recipe.chunk, workers, on_bad_image, bad)
    key = training_key(backbone, sweep, train, validation, facts)
    since, standing = torch.zeros(len(settings)), Standing(0, {})
    if resume and checkpoint is not None and checkpoint.exists():
        since, standing = read_checkpoint(checkpoint, key, sweep)
    stopped, counted = dict(standing.stopped), standing.counted
    accuracies: Tensor | None = None
    if standing.step == recipe.steps:
        accuracies = _accuracies(sweep, judging)
    for step, batch in enumerate(_batches(learning, recipe, standing.step), standing.step):
        if len(batch.labels):  # not one whose images are all bad
            losses = _learn(sweep, batch, recipe.chunk)
            for i in sweep.step(step, losses):
                log.warning("%s diverged at step %d and was stopped", settings[i].name, step + 1)
                stopped[i] = step + 1
            since, counted = since + losses.cpu(), counted + 1
        if not bool(sweep.alive.any()):
            raise TrainingError(
                f"every setting diverged, the last at step {step + 1}: {', '.join(s.name for s in settings)}. "
                f"Try smaller learning rates."
            )
        last = step + 1 == recipe.steps
        if last or (step + 1) % recipe.evaluate_every == 0:
            accuracies = _accuracies(sweep, judging)
            if report is not None:
                seen = tuple(accuracies.tolist())
                report(Progress(step + 1, recipe.steps, tuple((since / max(1, counted)).tolist()), seen))
            since, counted = torch.zeros(len(settings)), 0
        if checkpoint is not None and (last or (step + 1) % checkpoint_every == 0):
            write_checkpoint(checkpoint, key, sweep, since, Standing(step + 1, stopped, counted))
    assert accuracies is not None  # the last step looked
    return FitResult(
        tuple(
            SettingResult(setting, setting.task, None, stopped[i])
            if i in stopped
            else SettingResult(setting, _recorded(task, setting, recipe, facts, accuracies[i]), float(accuracies[i]))
            for i, (setting, task) in enumerate(zip(settings, sweep.tasks(), strict=True))
        )
    )


def _learn(sweep: Sweep, batch: Batch, chunk: int) -> Tensor:
    """Leave the gradients of a batch in the sweep; returns the mean loss (T,) of every setting."""
    device = sweep.backbone.device
    count = len(batch.labels)
    total = torch.zeros(len(sweep.settings), device=device)
    for first in range(0, count, chunk):
        images = sweep.backbone.check_images(batch.images[first : first + chunk].to(device))
        labels = batch.labels[first : first + chunk].to(device)
        losses = sweep.losses(sweep.logits(run_trunk(sweep.backbone.roles, images)), labels) / count
        # A stopped setting may be NaN; left out of the sum it gets no gradient, and the others their own.
        losses[sweep.alive].sum().backward()
        total += losses.detach()
    return total


@torch.no_grad()
def _accuracies(sweep: Sweep, judging: Loader) -> Tensor:
    """(T,) on the CPU, NaN for settings that were stopped."""
    device = sweep.backbone.device
    right, count = torch.zeros(len(sweep.settings), device=device), 0
    for batch in judging.batches():
        trunk = run_trunk(sweep.backbone.roles, sweep.backbone.check_images(batch.images.to(device)))
        right += (sweep.logits(trunk).argmax(-1) == batch.labels.to(device)).sum(1)
        count += len(batch.labels)
    return torch.where(sweep.alive, right / count, math.nan).cpu()


def _batches(loader: Loader, recipe: Recipe, start: int) -> Iterator[Batch]:
    """The batches of steps `start` to the last: every epoch in an order and a view of its own, drawn from the seed."""
    n, size = len(loader.split), loader.batch_size
    per_epoch = math.ceil(n / size)
    for first in range(start, recipe.steps, _PLANNED):
        plan: list[tuple[int, list[int]]] = []
        for step in range(first, min(first + _PLANNED, recipe.steps)):
            epoch, place = divmod(step, per_epoch)
            if step == first or place == 0:
                order = torch.randperm(n, generator=_generator(recipe.seed, epoch)).tolist()
            plan.append((epoch, order[place * size : (place + 1) * size]))
        yield from loader.planned(plan, recipe.seed)


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)


def _preprocessing(backbone: Backbone, image_size: int | None) -> Preprocessing:
    facts = backbone.preprocessing
    if facts is None:
        raise TrainingError(
            f"{backbone.name} does not say how its images are prepared. Say it: load_backbone(…, preprocessing=…)."
        )
    return facts if image_size is None else facts.at(image_size)


def _check(backbone: Backbone, tasks: Sequence[Task], train: Split, validation: Split) -> None:
    """What can be known before any work."""
    if not tasks:
        raise TrainingError("no tasks to train.")
    for task in tasks:
        if task.backbone.fingerprint != backbone.fingerprint:
            raise BackboneMismatch(f"task {task.name!r} was made for {task.backbone.name}, not for {backbone.name}.")
    labels = tasks[0].labels
    for name, split in (("training", train), ("validation", validation)):
        if not len(split):
            raise TrainingError(f"the {name} split holds no images.")
        if split.labels.min() < 0 or split.labels.max() >= len(labels):
            raise TrainingError(
                f"the {name} images hold label number {int(split.labels.max())}, but task {tasks[0].name!r} answers "
                f"{len(labels)}: {', '.join(labels[:5])}{' …' if len(labels) > 5 else ''}."
            )
    if len(set(train.labels.tolist())) < 2:
        only = labels[int(train.labels[0])]
        raise TrainingError(f"all training images show {only!r}: there is nothing to tell apart.")


def _recorded(task: Task, setting: Setting, recipe: Recipe, facts: Preprocessing, accuracy: Tensor) -> Task:
    """The task with what it was trained with, for its file."""
    told = {
        **task.record.recipe,
        **asdict(recipe),
        "learning_rates": [setting.learning_rate],
        "weight_decays": [setting.weight_decay],
    }
    told["area"] = list(recipe.area)
    metrics = {"validation_accuracy": float(accuracy)}
    return replace(task, record=replace(task.record, preprocessing=facts, recipe=told, metrics=metrics))
