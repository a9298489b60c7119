"""The demo's run: train three tasks of three kinds on the same images, then predict with all of them in one pass.

It uses what users call: `fit` for every task, task files, and one MemoryViT for all predictions.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vit_memory.backbone import Backbone, load_backbone
from vit_memory.choices import Kind
from vit_memory.data.loading import Loader
from vit_memory.data.transforms import EvalTransform
from vit_memory.demo.images import DemoImages, draw_images
from vit_memory.evaluation.metrics import AnyScores, score_task
from vit_memory.families import bundled
from vit_memory.files.taskfile import save_task
from vit_memory.model import MemoryViT
from vit_memory.predictions import Prediction, predictions
from vit_memory.task import Task
from vit_memory.training.cache import Cache
from vit_memory.training.callbacks import Callbacks, Progress
from vit_memory.training.fit import fit
from vit_memory.training.grid import Grid
from vit_memory.training.options import TrainingOptions
from vit_memory.training.recipe import Recipe

TRAIN, VALIDATION, TEST = 1000, 200, 300  # images
_RECIPE = Recipe(steps=160, augment="none", learning_rates=(0.3, 1.0), evaluate_every=80)
_BATCH = 50
_TIMED_ROUNDS = 9

Report = Callable[[str, Progress], None]  # called with the task's name


@dataclass(frozen=True, slots=True)
class DemoTask:
    """What one task of the demo predicts."""

    name: str
    question: str
    labels: tuple[str, ...]
    targets: Callable[[DemoImages], np.ndarray]
    kind: Kind = "single-label"
    extends: str | None = None


_DIGITS_WITH_A_LOOP = np.isin(np.arange(10), (0, 6, 8, 9))


def _traits(images: DemoImages) -> np.ndarray:
    """(n, 3) of 0 and 1: an even digit, a digit with a loop, a flower in the background."""
    traits = [images.digit % 2 == 0, _DIGITS_WITH_A_LOOP[images.digit], images.background == 0]
    return np.stack(traits, axis=1).astype(np.float32)


TASKS = (
    DemoTask("digit", "Which digit is it?", tuple("0123456789"), lambda images: images.digit),
    DemoTask(
        "traits",
        "Is the digit even? Does it have a loop? Is the background a flower?",
        ("even", "loop", "flower"),
        _traits,
        "multi-label",
    ),
    DemoTask(
        "ink",
        "How much of the image does the digit cover, in per cent?",
        ("ink",),
        lambda images: images.ink[:, None],
        "regression",
        extends="digit",
    ),
)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedTask:
    """One task after training."""

    demo_task: DemoTask
    task: Task
    linear_head: Task  # the baseline: a linear head on the original output, trained on the same images
    seconds: float
    file_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class DemoResult:
    """Everything that the demo shows."""

    trained: tuple[TrainedTask, ...]
    images: DemoImages  # of the test split
    predictions: dict[str, list[Prediction]]  # by task, one per test image
    scores: dict[str, AnyScores]
    linear_head_scores: dict[str, AnyScores]
    identical: bool  # whether the original output is bit-identical with all tasks attached
    relative_time: float  # of the pass with all tasks, divided by the plain backbone's
    backbone_bytes: int


def run_demo(folder: Path, report: Report | None = None) -> DemoResult:
    """Train the three tasks into task files in `folder`, then predict the test images with all tasks in one pass."""
    backbone = load_backbone("bundled")
    train, validation, test = draw_images(TRAIN, VALIDATION, TEST)
    # On disk, so that the second and the third task reuse the backbone's pass over the same images.
    cache = Cache("disk", folder=folder / "trunks")
    trained: list[TrainedTask] = []
    for demo_task in TASKS:
        parents = [other.task for other in trained if other.demo_task.name == demo_task.extends]
        trained.append(_train(backbone, demo_task, parents, (train, validation), cache, folder, report))
    model = MemoryViT(backbone, [one.task for one in trained])
    linear_heads = MemoryViT(backbone, [one.linear_head for one in trained])
    batches = _test_batches(backbone, test)
    outputs = _predict(model, batches)
    return DemoResult(
        tuple(trained),
        test,
        {name: list(predictions(model.tasks[name], output)) for name, output in outputs.items()},
        _scores(model, outputs, test),
        _scores(linear_heads, _predict(linear_heads, batches), test),
        _is_identical(model, batches),
        _relative_time(model, batches[0]),
        sum(p.numel() * p.element_size() for p in backbone.model.parameters()),
    )


def _train(
    backbone: Backbone,
    demo_task: DemoTask,
    parents: Sequence[Task],
    images: tuple[DemoImages, DemoImages],
    cache: Cache,
    folder: Path,
    report: Report | None,
) -> TrainedTask:
    start = time.perf_counter()
    tasks = Grid(("head", "memory")).tasks(backbone, demo_task.name, demo_task.labels, parents, demo_task.kind)
    train, validation = (part.split(demo_task.targets(part), demo_task.kind) for part in images)
    result = fit(
        backbone,
        tasks,
        train,
        validation,
        _RECIPE,
        parents=parents,
        options=TrainingOptions(cache=cache),
        callbacks=None if report is None else Callbacks(lambda progress: report(demo_task.name, progress)),
    )
    best = {}  # by regime; the best score comes last
    for setting in sorted(result.settings, key=lambda setting: -math.inf if setting.score is None else setting.score):
        best[setting.task.regime] = setting.task
    path = folder / f"{demo_task.name}.safetensors"
    save_task(best["memory"], path)
    # A head reads nothing of its parents, so it can be attached without them.
    linear_head = replace(best["head"], parents=(), parent_digests={})
    return TrainedTask(demo_task, best["memory"], linear_head, time.perf_counter() - start, path.stat().st_size)


def _test_batches(backbone: Backbone, test: DemoImages) -> list[Tensor]:
    assert backbone.preprocessing is not None
    loader = Loader(test.split(test.digit), EvalTransform(backbone.preprocessing), _BATCH)
    return [batch.images for batch in loader.batches()]


def _predict(model: MemoryViT, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """Every task's output for all images."""
    outputs = [model(images) for images in batches]
    return {demo_task.name: torch.cat([output[demo_task.name] for output in outputs]) for demo_task in TASKS}


def _scores(model: MemoryViT, outputs: dict[str, Tensor], test: DemoImages) -> dict[str, AnyScores]:
    return {
        demo_task.name: score_task(
            model.tasks[demo_task.name], outputs[demo_task.name], torch.from_numpy(demo_task.targets(test))
        )
        for demo_task in TASKS
    }


@torch.no_grad()
def _is_identical(model: MemoryViT, batches: Sequence[Tensor]) -> bool:
    """Compare with a freshly loaded backbone that has never had tasks."""
    plain = bundled.load().float()
    return all(torch.equal(model(images).original.tokens, plain(images)) for images in batches)


@torch.no_grad()
def _relative_time(model: MemoryViT, images: Tensor) -> float:
    """Seconds of the pass with all tasks, divided by the plain backbone's: the median of interleaved rounds."""

    def seconds(forward: Callable[[Tensor], object]) -> float:
        start = time.perf_counter()
        forward(images)
        return time.perf_counter() - start

    return statistics.median(seconds(model) / seconds(model.backbone.model) for _ in range(_TIMED_ROUNDS))
