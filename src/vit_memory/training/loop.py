"""fit: train tasks on images, all their settings at once, live or from stored trunks. One loop for all regimes."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import torch

from vit_memory.backbone import Backbone
from vit_memory.data.loading import BadImages, Loader, OnBadImage
from vit_memory.data.splits import Split
from vit_memory.data.transforms import Evaluation, Training
from vit_memory.errors import BackboneMismatch, TrainingError, TrainingStopped
from vit_memory.families.roles import Preprocessing
from vit_memory.graph import TaskGraph
from vit_memory.task import Task
from vit_memory.training.cache import Cache
from vit_memory.training.checkpoint import Standing, read_checkpoint, training_key, write_checkpoint
from vit_memory.training.crew import Crew
from vit_memory.training.feeding import GROUP, Feed, Piece, feed
from vit_memory.training.recipe import Recipe
from vit_memory.training.regimes import FullSweep, sweep_of
from vit_memory.training.sweep import Setting, Sweep

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a training stands, as told to whoever shows it."""

    step: int  # optimiser steps done, or views stored
    steps: int
    losses: tuple[float, ...] = ()  # mean of every setting since the last look; NaN for those stopped
    accuracies: tuple[float, ...] | None = None  # on the validation images, where they were just looked at
    stage: Literal["storing", "training"] = "training"


@dataclass(frozen=True, slots=True, eq=False)
class SettingResult:
    """What became of one setting."""

    setting: Setting
    task: Task  # trained; as it started where it diverged
    accuracy: float | None  # on the validation images; None where it diverged
    stopped_at: int | None = None  # the step it diverged at
    backbone: Backbone | None = None  # of the regime `full`: the one that was trained


@dataclass(frozen=True, slots=True, eq=False)
class FitResult:
    """Every setting with its validation accuracy, and the best of them."""

    settings: tuple[SettingResult, ...]
    cache: Literal["ram", "disk", "off"] = "off"  # where the trunks were

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
    cache: Cache | None = None,
    workers: int = 0,
    on_bad_image: OnBadImage = "fail",
    bad: BadImages | None = None,
    report: Callable[[Progress], None] | None = None,
    decided: Callable[[str], None] | None = None,
    stop: Callable[[], bool] | None = None,
    crew: Crew | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int = 50,
    resume: bool = False,
) -> FitResult:
    """Train every task with every learning rate and weight decay of the recipe, all at once.

    `tasks` come from `new_task`: the same labels, any memory sizes, starts, seeds and composable regimes; or all of one
    regime that does not compose. `parents` are what they extend, with all ancestors. The backbone is not changed, nor
    are the parents. The same arguments give the same bits on the same machine; each setting ends with the weights it
    would have had alone, to rounding.

    `cache` keeps the trunks of the recipe's views, by default in memory or on disk where they fit and pay; `decided` is
    told where before any is computed. With a `checkpoint` file, `resume` goes on from it to the same weights as if
    nothing had happened; a checkpoint of another training is refused. `stop` is asked after every step; once it says
    yes, the checkpoint is written and TrainingStopped raised. `bad` gathers the images that were left out. `crew` says
    which of several processes this is.
    """
    recipe, crew = recipe or Recipe(), crew or Crew()
    facts = _preprocessing(backbone, image_size)
    _check(backbone, tasks, train, validation)
    settings = [
        Setting(task, rate, decay) for task, rate, decay in product(tasks, recipe.learning_rates, recipe.weight_decays)
    ]
    sweep = sweep_of(backbone, settings, TaskGraph(parents), recipe)
    bad = BadImages() if bad is None else bad
    view = Training(facts, augment=recipe.augment, flip=recipe.flip, area=recipe.area)

    def asked_to_stop(check_others: Callable[[], None]) -> None:
        check_others()
        if stop is not None and stop():
            raise TrainingStopped("stopped before the first step; what was stored on disk will be used again.")

    def storing(done: int, rows: int) -> None:
        if report is not None:
            report(Progress(done, rows, stage="storing"))

    food = feed(
        sweep,
        Loader(train, view, GROUP, workers, on_bad_image, bad),
        Loader(validation, Evaluation(facts), GROUP, workers, on_bad_image, bad),
        cache or Cache(),
        crew,
        decided or (lambda kind: None),
    )
    key = training_key(backbone, sweep, train, validation, facts, food.precision)
    course = _Course(sweep, food, crew)
    if resume and checkpoint is not None and checkpoint.exists():
        course.since, course.standing = read_checkpoint(checkpoint, key, sweep)

    def save() -> None:
        if checkpoint is not None and crew.first:
            write_checkpoint(checkpoint, key, sweep, course.since, course.standing)

    ended = course.tired or course.standing.step == recipe.steps  # resumed, but there is nothing left to do
    if not ended:
        with crew.together() as check_others:
            food.prepare(storing, partial(asked_to_stop, check_others))
    for pieces in () if ended else food.steps(course.standing.step):
        course.learn(pieces)
        step, last = course.standing.step, course.standing.step == recipe.steps
        looked = course.look() if last or step % recipe.evaluate_every == 0 else None
        if report is not None:
            report(Progress(step, recipe.steps, course.losses(), looked))
        if looked is not None:
            course.forget_losses()
        last |= course.tired
        if last or step % checkpoint_every == 0:
            save()
        if last:
            break
        if crew.any(stop is not None and stop()):
            save()
            raise TrainingStopped(f"stopped after step {step} of {recipe.steps}.")
    return FitResult(_results(course, facts), food.kind)


class _Course:
    """A sweep on its way through the steps: what it has seen, and what became of every setting."""

    def __init__(self, sweep: Sweep, food: Feed, crew: Crew) -> None:
        self.sweep, self.food, self.crew = sweep, food, crew
        self.standing = Standing(0, {}, best=[-1.0] * len(sweep.settings))
        self.forget_losses()

    def forget_losses(self) -> None:
        """Begin to count anew."""
        self.since, self.standing.counted = torch.zeros(len(self.sweep.settings)), 0

    def losses(self) -> tuple[float, ...]:
        """The mean of every setting since they were last forgotten."""
        return tuple((self.since / max(1, self.standing.counted)).tolist())

    def learn(self, pieces: Iterable[Piece]) -> None:
        """One step, together with the other processes of the crew."""
        sweep, standing, device = self.sweep, self.standing, self.sweep.backbone.device
        losses, count = torch.zeros(len(sweep.settings), device=device), torch.zeros(1, device=device)
        for seen, labels in pieces:
            losses += sweep.learn(seen, labels.to(device))
            count += len(labels)
        self.crew.sum([*sweep.gradients(), losses, count])
        standing.step += 1
        if not count:  # a batch whose images are all bad
            return
        losses /= count
        for i in sweep.step(standing.step - 1, losses, float(count)):
            log.warning("%s diverged at step %d and was stopped", sweep.settings[i].name, standing.step)
            standing.stopped[i] = standing.step
        self.since, standing.counted = self.since + losses.cpu(), standing.counted + 1
        if not bool(sweep.alive.any()):
            names = ", ".join(setting.name for setting in sweep.settings)
            raise TrainingError(
                f"every setting diverged, the last at step {standing.step}: {names}. Try smaller learning rates."
            )

    @torch.no_grad()
    def look(self) -> tuple[float, ...]:
        """Every setting's accuracy on the validation images, NaN for those that were stopped."""
        sweep, standing, device = self.sweep, self.standing, self.sweep.backbone.device
        right, count = torch.zeros(len(sweep.settings), device=device), torch.zeros(1, device=device)
        for seen, labels in self.food.validation():
            right += (sweep.logits(seen).argmax(-1) == labels.to(device)).sum(1)
            count += len(labels)
        self.crew.sum([right, count])
        accuracies = torch.where(sweep.alive, right / count, math.nan).cpu()
        best = torch.tensor(standing.best)
        improved = accuracies > best  # not where NaN
        standing.waited = 0 if bool(improved.any()) else standing.waited + 1
        standing.best = torch.where(improved, accuracies, best).tolist()
        if sweep.recipe.patience is not None:
            sweep.keep(improved)
        standing.accuracies = accuracies.nan_to_num(-1.0).tolist()
        return tuple(accuracies.tolist())

    @property
    def tired(self) -> bool:
        """Whether it has waited for something better as long as the recipe allows."""
        patience = self.sweep.recipe.patience
        return patience is not None and self.standing.waited >= patience


def _results(course: _Course, facts: Preprocessing) -> tuple[SettingResult, ...]:
    sweep, standing = course.sweep, course.standing
    recipe = sweep.recipe
    accuracies = standing.accuracies if recipe.patience is None else standing.best
    results = []
    for i, (setting, task) in enumerate(zip(sweep.settings, sweep.tasks(), strict=True)):
        if i in standing.stopped:
            results.append(SettingResult(setting, setting.task, None, standing.stopped[i]))
            continue
        tuned = sweep.backbone_of(i) if isinstance(sweep, FullSweep) else None
        recorded = _recorded(task, setting, recipe, facts, accuracies[i])
        results.append(SettingResult(setting, recorded, accuracies[i], backbone=tuned))
    return tuple(results)


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


def _recorded(task: Task, setting: Setting, recipe: Recipe, facts: Preprocessing, accuracy: float) -> Task:
    """The task with what it was trained with, for its file."""
    told = {
        **task.record.recipe,
        **asdict(recipe),
        "learning_rates": [setting.learning_rate],
        "weight_decays": [setting.weight_decay],
    }
    told["area"] = list(recipe.area)
    metrics = {"validation_accuracy": accuracy}
    return replace(task, record=replace(task.record, preprocessing=facts, recipe=told, metrics=metrics))
