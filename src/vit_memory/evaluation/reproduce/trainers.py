"""How each group of methods is trained and tested: in one sweep, as a variant of memory, or by peft."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from vit_memory.backbone import Backbone
from vit_memory.branch import Branch, new_branch
from vit_memory.data.sources import Dataset
from vit_memory.data.splits import Split
from vit_memory.errors import TrainingError, TrainingStopped
from vit_memory.evaluation.inference import evaluate
from vit_memory.evaluation.reproduce import lora
from vit_memory.evaluation.reproduce.methods import Method
from vit_memory.evaluation.reproduce.variants import VariantSweep, right_answers
from vit_memory.files.branchfile import save_branch
from vit_memory.files.taskfile import save_task
from vit_memory.graph import TaskGraph
from vit_memory.model import MemoryViT
from vit_memory.regimes import COMPOSABLE
from vit_memory.standalone import StandaloneModel
from vit_memory.task import Task, new_task
from vit_memory.training.callbacks import Callbacks, Progress
from vit_memory.training.fit import train_sweep, training_preprocessing
from vit_memory.training.objective import objective_for
from vit_memory.training.options import TrainingOptions
from vit_memory.training.recipe import Recipe
from vit_memory.training.regimes import build_sweep
from vit_memory.training.results import SettingResult
from vit_memory.training.sweep import Setting


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """The images of one training."""

    labels: tuple[str, ...]
    train: Split
    validation: Split
    test: Split

    @property
    def splits(self) -> Mapping[str, Split]:
        """By name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    def relabelled(self, other: Dataset) -> "Images":
        """The same images in the same splits, with the labels that another column of the dataset gives them."""
        drawn = (other.train, other.validation, *([] if other.test is None else [other.test]))
        targets = {digest: t for split in drawn for digest, t in zip(split.digests, split.targets, strict=True)}
        train, validation, test = (
            replace(split, targets=np.array([targets[digest] for digest in split.digests], dtype=np.int64))
            for split in self.splits.values()
        )
        return Images(other.labels, train, validation, test)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What the methods of one call share."""

    backbone: Backbone
    images: Images
    recipe: Recipe
    options: TrainingOptions
    on_progress: Callable[[Progress], None]
    should_stop: Callable[[], bool]

    def generator(self) -> torch.Generator:
        """Randomness of cells and of low-rank updates; every method starts from the same."""
        return torch.Generator().manual_seed(self.recipe.seed)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What one method came to: its best learning rate by validation accuracy, read on the test images."""

    rate: float
    searched: Mapping[float, float | None]  # learning rate -> validation accuracy; None: it diverged
    curve: Sequence[float]  # validation accuracy at every evaluation, of the chosen rate
    parameters: int
    size_bytes: int
    right: np.ndarray  # (n,) bool
    task: Task | None = None
    branch: Branch | None = None


def train_methods(
    job: Job, rates: Mapping[Method, Sequence[float]], parents: Sequence[Task], ancestors: Sequence[Task]
) -> list[Outcome]:
    """Train each method with each of its learning rates: all at once, if there are several, on one backbone pass."""
    first = next(iter(rates))
    if first.group == "lora":
        return [_train_lora(job, rates[first])]
    if first.variant is not None:
        return [_train_variant(job, first, rates[first])]
    return _train_sweep(job, rates, parents, ancestors)


def _train_sweep(
    job: Job, rates: Mapping[Method, Sequence[float]], parents: Sequence[Task], ancestors: Sequence[Task]
) -> list[Outcome]:
    backbone, images, methods = job.backbone, job.images, list(rates)
    blocks = methods[0].blocks
    branches = []
    if blocks is not None:
        branches = [new_branch(backbone, "branch", blocks=blocks, rank=lora.RANK, generator=job.generator())]
    tasks = [
        new_task(
            backbone,
            f"task-{i}",
            images.labels,
            parents=parents,
            branch=branches[0] if branches else None,
            generator=job.generator(),
            **method.arguments,
        )
        for i, method in enumerate(methods)
    ]
    settings = [
        Setting(task, rate, branch=branches[0] if branches else None)
        for task, method in zip(tasks, methods, strict=True)
        for rate in rates[method]
    ]
    objective = objective_for(tasks[0], job.recipe, images.train, images.validation)
    sweep = build_sweep(backbone, settings, TaskGraph(ancestors), job.recipe, objective)
    curves, callbacks = _recording(job)
    result = train_sweep(sweep, images.train, images.validation, job.options, callbacks)
    by_method = [[one for one in result.settings if one.setting.task is task] for task in tasks]
    best = [_best(settings) for settings in by_method]
    right = _right_answers(job, best, ancestors)
    return [
        _outcome(settings, one, [scores[result.settings.index(one)] for scores in curves], answers)
        for settings, one, answers in zip(by_method, best, right, strict=True)
    ]


def _train_variant(job: Job, method: Method, rates: Sequence[float]) -> Outcome:
    assert method.variant is not None
    backbone, images, recipe = job.backbone, job.images, job.recipe
    task = new_task(backbone, "task", images.labels, generator=job.generator(), **method.arguments)
    sweep = VariantSweep(method.variant, backbone, [Setting(task, rate) for rate in rates], recipe)
    curves, callbacks = _recording(job)
    settings = train_sweep(sweep, images.train, images.validation, job.options, callbacks).settings
    best = _best(settings)
    trained = VariantSweep(method.variant, backbone, [replace(best.setting, task=best.task)], recipe)
    (right,) = right_answers(trained, images.test, training_preprocessing(backbone, job.options.image_size))
    curve = [scores[settings.index(best)] for scores in curves]
    return replace(_outcome(settings, best, curve, right.numpy()), task=None)


def _train_lora(job: Job, rates: Sequence[float]) -> Outcome:
    images, recipe = job.images, job.recipe
    preprocessing = training_preprocessing(job.backbone, job.options.image_size)
    classes = len(images.labels)

    def report(step: int) -> None:
        job.on_progress(Progress(step, recipe.steps))
        if job.should_stop():
            raise TrainingStopped(f"stopped after step {step} of {recipe.steps}.")

    results = [
        lora.train_lora(job.backbone, images.train, images.validation, classes, recipe, preprocessing, rate, report)
        for rate in rates
    ]
    best = max(results, key=lambda result: result.score)
    right = lora.correct(best.model, images.test, preprocessing, job.backbone).numpy()
    searched = {result.rate: result.score for result in results}
    return Outcome(best.rate, searched, [v for _, v in best.curve], best.parameters, 4 * best.parameters, right)


def _recording(job: Job) -> tuple[list[tuple[float, ...]], Callbacks]:
    """Callbacks for a training, and a list that receives the scores of every evaluation."""
    curves: list[tuple[float, ...]] = []

    def report(progress: Progress) -> None:
        if progress.scores is not None:
            curves.append(progress.scores)
        job.on_progress(progress)

    return curves, Callbacks(report, should_stop=job.should_stop)


def _best(settings: Sequence[SettingResult]) -> SettingResult:
    """By validation accuracy; the first of equals."""
    trained = [one for one in settings if one.score is not None]
    if not trained:
        raise TrainingError(f"{settings[0].method}: diverged with every learning rate.")
    return max(trained, key=lambda one: one.score or 0.0)


def _right_answers(job: Job, results: Sequence[SettingResult], ancestors: Sequence[Task]) -> list[np.ndarray]:
    """(n,) bool per result: which test images are right. Tasks that compose answer in one pass."""
    first = results[0]
    model: MemoryViT | StandaloneModel
    if first.task.regime in COMPOSABLE:
        branches = [] if first.branch is None else [first.branch]
        model = MemoryViT(job.backbone, [*ancestors, *(one.task for one in results)], branches)
    else:
        model = StandaloneModel(first.backbone or job.backbone, first.task)
    names = [one.task.name for one in results]
    options, images = job.options, job.images
    scored = evaluate(model, images.test, images.labels, names, workers=options.workers, threads=options.threads)
    return [(scored[name].outputs.argmax(1) == scored[name].targets).numpy() for name in names]


def _outcome(
    settings: Sequence[SettingResult], best: SettingResult, curve: Sequence[float], right: np.ndarray
) -> Outcome:
    searched = {one.setting.learning_rate: one.score for one in settings}
    return Outcome(
        best.setting.learning_rate,
        searched,
        curve,
        best.parameters,
        _file_bytes(best),
        right,
        best.task,
        best.branch,
    )


def _file_bytes(result: SettingResult) -> int:
    """The size of the task's file, and of its branch's or of its backbone's weights in float32."""
    with tempfile.TemporaryDirectory() as folder:
        save_task(result.task, Path(folder) / "task.safetensors")
        if result.branch is not None:
            save_branch(result.branch, Path(folder) / "branch.safetensors")
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    weights = () if result.backbone is None else result.backbone.model.parameters()
    return size + 4 * sum(weight.numel() for weight in weights)
