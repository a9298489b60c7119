"""fit: train tasks on images, all their settings at once, live or from stored trunks. One loop for all regimes."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.data.loading import BadImages, Loader, OnBadImage, nothing_usable
from vit_memory.data.splits import Split, why_empty
from vit_memory.data.transforms import Evaluation, Training
from vit_memory.errors import TrainingError, TrainingStopped
from vit_memory.graph import TaskGraph
from vit_memory.model import check_trained_on
from vit_memory.parallel import PieceThreads
from vit_memory.preprocessing import Preprocessing
from vit_memory.task import Task
from vit_memory.training.cache import Cache
from vit_memory.training.checkpoint import Standing, read_checkpoint, training_key, write_checkpoint
from vit_memory.training.crew import Crew
from vit_memory.training.feeding import GROUP, Chunk, Feed, feed
from vit_memory.training.objective import objective_for
from vit_memory.training.recipe import Recipe
from vit_memory.training.regimes import FullSweep, sweep_of
from vit_memory.training.sweep import Setting, Sweep

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a training stands, as told to whoever shows it."""

    step: int  # optimiser steps done, or views stored
    steps: int
    losses: tuple[float, ...] = ()  # mean of every setting since the last evaluation; NaN for those stopped
    scores: tuple[float, ...] | None = None  # on the validation images, if they were just evaluated; NaN as above
    metric: str = "accuracy"  # what the scores are
    stage: Literal["storing", "training"] = "training"


@dataclass(frozen=True, slots=True, eq=False)
class SettingResult:
    """What became of one setting."""

    setting: Setting
    task: Task  # trained; as it started where it diverged
    score: float | None  # on the validation images; None where it diverged
    stopped_at: int | None = None  # the step it diverged at
    backbone: Backbone | None = None  # of the regime `full`: the one that was trained


@dataclass(frozen=True, slots=True, eq=False)
class FitResult:
    """Every setting with its validation score, and the best of them."""

    settings: tuple[SettingResult, ...]
    metric: str = "accuracy"  # what the scores are: accuracy, balanced accuracy, mAP or R²
    cache: Literal["ram", "disk", "off"] = "off"  # where the trunks were

    @property
    def best(self) -> SettingResult:
        """The highest validation score; of equals the smallest, then the first."""
        living = [result for result in self.settings if result.score is not None]
        return max(living, key=lambda result: (result.score or 0.0, -result.task.parameters))


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
    threads: int | None = None,
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
    which of several processes this is. A batch is computed by as many `threads` as torch has unless told otherwise;
    weights differ in their last bits between numbers of threads, and a resumed training goes on with its own number.

    What is trained for follows the tasks' kind: cross-entropy and accuracy, binary cross-entropy and mAP (thresholds
    are then chosen on the validation images), or smooth L1 and R².
    """
    recipe, crew = recipe or Recipe(), crew or Crew()
    facts = _preprocessing(backbone, image_size)
    _check(backbone, tasks, parents, train, validation)
    objective = objective_for(tasks[0], recipe, train, validation)
    settings = [
        Setting(task, rate, decay) for task, rate, decay in product(tasks, recipe.learning_rates, recipe.weight_decays)
    ]
    sweep = sweep_of(backbone, settings, TaskGraph(parents), recipe, objective)
    bad = BadImages() if bad is None else bad
    view = Training(facts, augment=recipe.augment, flip=recipe.flip, area=recipe.area)

    def asked_to_stop(check_others: Callable[[], None]) -> None:
        check_others()
        if stop is not None and stop():
            raise TrainingStopped("stopped before the first step; what was stored on disk will be used again.")

    def storing(done: int, rows: int) -> None:
        if report is not None:
            report(Progress(done, rows, stage="storing"))

    train_loader = Loader(train, view, GROUP, workers, on_bad_image, bad)
    validation_loader = Loader(validation, Evaluation(facts), GROUP, workers, on_bad_image, bad)
    food = feed(
        sweep,
        train_loader,
        validation_loader,
        cache or Cache(),
        crew,
        decided or (lambda kind: None),
    )
    key = training_key(backbone, sweep, train, validation, facts, food.precision)
    standing = Standing(0, {}, threads or torch.get_num_threads(), best=[None] * len(settings))
    since = torch.zeros(len(settings))
    if resume and checkpoint is not None and checkpoint.exists():
        since, standing = read_checkpoint(checkpoint, key, sweep)

    def save() -> None:
        if checkpoint is not None and crew.first:
            write_checkpoint(checkpoint, key, sweep, course.since, course.standing)

    with PieceThreads(backbone.device, standing.threads) as pool:
        course = _Course(sweep, food, crew, pool, standing, since, train_loader)
        ended = course.tired or standing.step == recipe.steps  # resumed, but there is nothing left to do
        if not ended:
            train_loader.check_usable("training image")
            validation_loader.check_usable("validation image")
            with crew.together() as check_others:
                food.prepare(storing, partial(asked_to_stop, check_others), pool)
        for chunks in () if ended else food.steps(standing.step, pool.threads):
            course.learn(chunks)
            step, last = standing.step, standing.step == recipe.steps
            scores = course.evaluate() if last or step % recipe.evaluate_every == 0 else None
            if report is not None:
                report(Progress(step, recipe.steps, course.losses(), scores, objective.metric))
            if scores is not None:
                course.forget_losses()
            last |= course.tired
            if last or step % checkpoint_every == 0:
                save()
            if last:
                break
            if crew.any(stop is not None and stop()):
                save()
                raise TrainingStopped(f"stopped after step {step} of {recipe.steps}.")
    return FitResult(_results(course, facts), objective.metric, food.kind)


class _Course:
    """A sweep on its way through the steps: what it has seen, and what became of every setting."""

    def __init__(
        self,
        sweep: Sweep,
        food: Feed,
        crew: Crew,
        threads: PieceThreads,
        standing: Standing,
        since: Tensor,
        train: Loader,
    ) -> None:
        self.sweep, self.food, self.crew, self.threads = sweep, food, crew, threads
        self.standing, self.since, self.bad = standing, since, train.bad
        images = len(train.split)
        # Every epoch has its own order, so only twice its steps are sure to hold one whole epoch.
        self.most_empty_steps = 2 * math.ceil(images / min(sweep.recipe.batch, images))
        self.empty_steps = 0

    def forget_losses(self) -> None:
        """Begin to count anew."""
        self.since, self.standing.counted = torch.zeros(len(self.sweep.settings)), 0

    def losses(self) -> tuple[float, ...]:
        """The mean of every setting since they were last forgotten."""
        return tuple((self.since / max(1, self.standing.counted)).tolist())

    def learn(self, chunks: Sequence[Chunk]) -> None:
        """One step, together with the other processes of the crew."""
        sweep, standing, device = self.sweep, self.standing, self.sweep.backbone.device
        losses, count = torch.zeros(len(sweep.settings), device=device), torch.zeros(1, device=device)
        sweep.leaves()  # made here, once, before the threads read them
        for some in self.threads.rounds(chunks):
            for loss, gradients in self.threads.map(self._backward, some):
                losses += loss
                sweep.accumulate(gradients)
        count += sum(len(chunk.indices) for chunk in chunks)
        self.crew.sum([*sweep.gradients(), losses, count])
        standing.step += 1
        self.empty_steps = 0 if count else self.empty_steps + 1
        if self.empty_steps >= self.most_empty_steps:  # they were usable when the training began: files were removed
            raise nothing_usable("training image", self.bad.first)
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

    def _backward(self, chunk: Chunk) -> tuple[Tensor, list[Tensor | None]]:
        return self.sweep.backward(chunk.load(), chunk.targets.to(self.sweep.backbone.device))

    def _outputs(self, chunk: Chunk) -> Tensor:
        return self.sweep.logits(chunk.load())

    @torch.no_grad()
    def evaluate(self) -> tuple[float, ...]:
        """Every setting's score on the validation images, NaN for those that were stopped."""
        sweep, standing, device = self.sweep, self.standing, self.sweep.backbone.device
        objective = sweep.objective
        sums, count = objective.start(len(sweep.settings), device), torch.zeros(1, device=device)
        sweep.leaves()
        for chunks in self.food.validation(self.threads.threads):
            for some in self.threads.rounds(chunks):
                for chunk, outputs in zip(some, self.threads.map(self._outputs, some), strict=True):
                    objective.add(sums, outputs, chunk.targets.to(device), chunk.indices.to(device))
                    count += len(chunk.indices)
        self.crew.sum([*sums, count])
        if not count:
            raise nothing_usable("validation image", self.bad.first)
        scores = torch.where(sweep.alive, objective.scores(sums).to(device), math.nan).tolist()
        before = standing.best
        improved = [new > (-math.inf if old is None else old) for new, old in zip(scores, before, strict=True)]
        standing.waited = 0 if any(improved) else standing.waited + 1
        standing.best = [new if better else old for new, old, better in zip(scores, before, improved, strict=True)]
        if sweep.recipe.patience is not None:
            sweep.keep(torch.tensor(improved))
        thresholds = objective.thresholds(sums)
        if thresholds is not None:
            held = standing.thresholds
            keeps = held is not None and sweep.recipe.patience is not None
            standing.thresholds = [
                new if better or not keeps or held is None else held[i]
                for i, (new, better) in enumerate(zip(thresholds, improved, strict=True))
            ]
        standing.scores = [None if math.isnan(score) else score for score in scores]
        return tuple(scores)

    @property
    def tired(self) -> bool:
        """Whether it has waited for something better as long as the recipe allows."""
        patience = self.sweep.recipe.patience
        return patience is not None and self.standing.waited >= patience


def _results(course: _Course, facts: Preprocessing) -> tuple[SettingResult, ...]:
    sweep, standing, objective = course.sweep, course.standing, course.sweep.objective
    scores = standing.scores if sweep.recipe.patience is None else standing.best
    results = []
    for i, (setting, task) in enumerate(zip(sweep.settings, sweep.tasks(), strict=True)):
        score = scores[i]
        if i in standing.stopped or score is None:
            results.append(SettingResult(setting, setting.task, None, standing.stopped.get(i)))
            continue
        tuned = sweep.backbone_of(i) if isinstance(sweep, FullSweep) else None
        recorded = _recorded(task, setting, sweep.recipe, facts, {metric_key(objective.metric): score})
        thresholds = None if standing.thresholds is None else tuple(standing.thresholds[i])
        answering = replace(recorded, thresholds=thresholds, target_scale=objective.scale)
        results.append(SettingResult(setting, answering, score, backbone=tuned))
    return tuple(results)


def metric_key(metric: str) -> str:
    """What records call a validation score: validation_accuracy, validation_balanced_accuracy, _map or _r2."""
    return "validation_" + metric.lower().replace(" ", "_").replace("²", "2")


def _preprocessing(backbone: Backbone, image_size: int | None) -> Preprocessing:
    facts = backbone.preprocessing
    if facts is None:
        raise TrainingError(
            f"{backbone.name} does not say how its images are prepared. Say it: load_backbone(…, preprocessing=…)."
        )
    return facts if image_size is None else facts.at(image_size)


def _check(backbone: Backbone, tasks: Sequence[Task], parents: Sequence[Task], train: Split, validation: Split) -> None:
    """What can be known before any work."""
    if not tasks:
        raise TrainingError("no tasks to train.")
    for task in (*tasks, *parents):
        check_trained_on(task, backbone)
    for name, split in (("training", train), ("validation", validation)):
        if not len(split):
            raise TrainingError(f"the {name} split holds no images: {why_empty(split.kind)}.")


def _recorded(task: Task, setting: Setting, recipe: Recipe, facts: Preprocessing, metrics: Mapping[str, float]) -> Task:
    """The task with what it was trained with, for its file."""
    told = {
        **task.record.recipe,
        **asdict(recipe),
        "learning_rates": [setting.learning_rate],
        "weight_decays": [setting.weight_decay],
    }
    told["area"] = list(recipe.area)
    return replace(task, record=replace(task.record, preprocessing=facts, recipe=told, metrics=metrics))
