"""The demonstration: three questions about the same pictures, one of each kind, learned by one frozen backbone.

Everything here is what a user would call: `fit` for every task, files, and one pass of a MemoryViT for all answers.
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
from vit_memory.data.loading import Loader
from vit_memory.data.transforms import Evaluation
from vit_memory.evaluation.metrics import AnyScores, score_task
from vit_memory.evaluation.scenes import Scenes, draw_scenes
from vit_memory.families import bundled
from vit_memory.graph import TaskGraph
from vit_memory.model import MemoryViT
from vit_memory.predictions import Prediction, predictions
from vit_memory.task import Kind, Task
from vit_memory.training.cache import Cache
from vit_memory.training.callbacks import Callbacks, Progress
from vit_memory.training.grid import Grid
from vit_memory.training.loop import fit
from vit_memory.training.options import TrainingOptions
from vit_memory.training.recipe import Recipe

TRAIN, VALIDATION, TEST = 1000, 200, 300
_RECIPE = Recipe(steps=160, augment="none", learning_rates=(0.3, 1.0), evaluate_every=80)
_TIMED_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Question:
    """One task of the demonstration."""

    name: str
    asks: str
    labels: tuple[str, ...]
    targets: Callable[[Scenes], np.ndarray]
    kind: Kind = "single-label"
    extends: str | None = None


_LOOPED = np.isin(np.arange(10), (0, 6, 8, 9))


def _traits(scenes: Scenes) -> np.ndarray:
    """(n, 3) of 0 and 1: an even digit, one with a loop, a flower behind it."""
    return np.stack([scenes.digit % 2 == 0, _LOOPED[scenes.digit], scenes.place == 0], axis=1).astype(np.float32)


QUESTIONS = (
    Question("digit", "Which digit is it?", tuple("0123456789"), lambda scenes: scenes.digit),
    Question("traits", "Which of these hold?", ("even", "looped", "on a flower"), _traits, "multi-label"),
    Question(
        "ink",
        "How much of the picture does it cover, in per cent?",
        ("ink",),
        lambda scenes: scenes.ink[:, None],
        "regression",
        extends="digit",
    ),
)


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """What became of one question."""

    question: Question
    task: Task
    head: Task  # a head alone on the original output, trained beside it
    seconds: float
    file_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """All that the demonstration shows."""

    learned: tuple[Learned, ...]
    scenes: Scenes  # the test pictures
    predictions: dict[str, list[Prediction]]  # per task, of every test picture
    scores: dict[str, AnyScores]
    head_scores: dict[str, AnyScores]
    identical: bool  # the original output with all tasks attached, to the bit
    cost: float  # of the pass with all tasks, over the plain backbone's
    backbone_bytes: int


def demonstrate(folder: Path, report: Callable[[str, Progress], None] | None = None) -> Demonstration:
    """Learn the three tasks into task files below `folder`, then ask all of them in one pass over the test pictures."""
    backbone = load_backbone("bundled")
    train, validation, test = draw_scenes(TRAIN, VALIDATION, TEST)
    # On disk: the second and the third task find the pass over the same pictures already there.
    cache = Cache("disk", folder=folder / "trunks")
    learned: list[Learned] = []
    for question in QUESTIONS:
        parents = [known.task for known in learned if known.question.name == question.extends]
        learned.append(_learn(backbone, question, parents, (train, validation), cache, folder, report))
    model = MemoryViT(backbone, [known.task for known in learned])
    heads = MemoryViT(backbone, [known.head for known in learned])
    outputs: dict[str, list[Tensor]] = {question.name: [] for question in QUESTIONS}
    head_outputs: dict[str, list[Tensor]] = {question.name: [] for question in QUESTIONS}
    identical, batches = True, []
    facts = backbone.preprocessing
    assert facts is not None
    untouched = bundled.load().float()  # the judge: a model that nobody else has touched
    for batch in Loader(test.split(test.digit), Evaluation(facts), 50).batches():
        answers, alone = model(batch.images), heads(batch.images)
        with torch.no_grad():
            identical &= torch.equal(answers.original.tokens, untouched(batch.images))
        for question in QUESTIONS:
            outputs[question.name].append(answers[question.name])
            head_outputs[question.name].append(alone[question.name])
        batches.append(batch.images)

    def scores(tasks: TaskGraph, found: dict[str, list[Tensor]]) -> dict[str, AnyScores]:
        return {
            q.name: score_task(tasks[q.name], torch.cat(found[q.name]), torch.from_numpy(q.targets(test)))
            for q in QUESTIONS
        }

    return Demonstration(
        tuple(learned),
        test,
        {name: list(predictions(model.tasks[name], torch.cat(found))) for name, found in outputs.items()},
        scores(model.tasks, outputs),
        scores(heads.tasks, head_outputs),
        identical,
        _cost(model, batches[0]),
        sum(p.numel() * p.element_size() for p in backbone.model.parameters()),
    )


def _learn(
    backbone: Backbone,
    question: Question,
    parents: Sequence[Task],
    scenes: tuple[Scenes, Scenes],
    cache: Cache,
    folder: Path,
    report: Callable[[str, Progress], None] | None,
) -> Learned:
    began = time.perf_counter()
    tasks = Grid(("head", "memory")).tasks(backbone, question.name, question.labels, parents, question.kind)
    train, validation = (part.split(question.targets(part), question.kind) for part in scenes)
    result = fit(
        backbone,
        tasks,
        train,
        validation,
        _RECIPE,
        parents=parents,
        options=TrainingOptions(cache=cache),
        callbacks=None if report is None else Callbacks(lambda progress: report(question.name, progress)),
    )
    best = {}
    for found in sorted(result.settings, key=lambda found: -math.inf if found.score is None else found.score):
        best[found.task.regime] = found.task
    path = folder / f"{question.name}.safetensors"
    best["memory"].save(path)
    # A head reads nothing of its parents; alone, it needs none.
    head = replace(best["head"], parents=(), parent_digests={})
    return Learned(question, best["memory"], head, time.perf_counter() - began, path.stat().st_size)


@torch.no_grad()
def _cost(model: MemoryViT, images: torch.Tensor) -> float:
    """The pass with all tasks over the plain one: the median of interleaved rounds."""

    def seconds(work: Callable[[torch.Tensor], object]) -> float:
        began = time.perf_counter()
        work(images)
        return time.perf_counter() - began

    return statistics.median(seconds(model) / seconds(model.backbone.model) for _ in range(_TIMED_ROUNDS))
