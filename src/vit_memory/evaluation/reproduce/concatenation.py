"""Concatenation: tasks trained apart and put into one model, each alone and together.

    vit-memory reproduce concatenation --data DATASETS --backbone BACKBONE

For every seed, one task per dataset: accuracy alone, accuracy beside all others, the largest difference between the
two, whether the original output is the library's own to the bit, and the cost of the pass. Beside it the naive way:
tasks trained without a mask, put into one sequence in which everything reads everything. To expect: alone and together
equal; the naive way collapses as tasks are added (a second-hand account of the paper's: 50.0 % on iNaturalist alone,
28.1, 27.8 and 17.3 % with one, two and three others).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.data.splits import Split
from vit_memory.evaluation.reproduce.experiment import Experiment, Plan
from vit_memory.evaluation.reproduce.methods import BOTH, UNMASKED, Method, cells
from vit_memory.evaluation.reproduce.runner import Runner, Training
from vit_memory.evaluation.statistics import pack_bits
from vit_memory.model import MemoryViT
from vit_memory.report.pictures import Pictures
from vit_memory.task import Task
from vit_memory.unmasked import run_unmasked

METHODS: tuple[Method, ...] = (cells(5), BOTH)
_BATCH, _ROUNDS, _EXAMPLES = 32, 7, 3


def trainings(plan: Plan) -> list[Training]:
    """One task per dataset: masked with every seed; unmasked, with a pass of its own, with the first one only."""
    return plan.trainings(METHODS) + [one for one in plan.trainings((UNMASKED,)) if one.seed == plan.scale.seeds[0]]


def measure(runner: Runner, plan: Plan) -> None:
    """Put the tasks of every seed together, and test each on its own dataset."""
    for method in (*METHODS, UNMASKED):
        for seed in plan.scale.seeds if method is not UNMASKED else plan.scale.seeds[:1]:
            chosen = [Training(dataset, method, seed, plan.scale.per_class) for dataset in plan.datasets]
            records = runner.train(chosen)
            settings = {"trainings": [[record.identity, record.settings] for record in records]}
            put_together = _naive if method is UNMASKED else _masked
            _measure_once(runner, "concatenation", chosen, settings, put_together)
            if method is BOTH and seed == plan.scale.seeds[0] and set(plan.datasets) & set(runner.pictures):
                _measure_once(runner, "examples", chosen, {**settings, "pictures": runner.pictures}, _examples)


Measurement = Callable[[Runner, Sequence[str], Sequence[Task], Sequence[Split]], dict[str, Any]]


def _measure_once(
    runner: Runner, kind: str, chosen: Sequence[Training], settings: dict[str, Any], measure: Measurement
) -> None:
    """Write a record of a measurement on the tasks, unless there is one."""
    identity = runner.identity_of_all(kind, chosen)
    if runner.records.find(identity, settings) is not None:
        return
    start = time.perf_counter()
    tasks = [runner.load(one)[0] for one in chosen]
    splits = [runner.images(one).test for one in chosen]
    result = measure(runner, [one.dataset for one in chosen], tasks, splits)
    runner.record(identity, settings, result, time.perf_counter() - start)


def _masked(runner: Runner, datasets: Sequence[str], tasks: Sequence[Task], splits: Sequence[Split]) -> dict[str, Any]:
    """Every task alone and beside all others, on its own test images."""
    backbone = runner.backbone
    together = MemoryViT(backbone, tasks)
    rows: dict[str, Any] = {}
    identical = True
    for dataset, task, split in zip(datasets, tasks, splits, strict=True):
        alone = MemoryViT(backbone, [task])
        right: dict[str, list[Tensor]] = {"alone": [], "together": []}
        worst, other_answers = 0.0, 0
        for images, targets in runner.batches(split, _BATCH):
            outputs, own = together(images), alone(images)[task.name]
            with torch.no_grad():
                library = backbone.family.library_forward(backbone.model, images)
            identical &= all(torch.equal(getattr(outputs.original, key), value) for key, value in library.items())
            answers = outputs[task.name]
            worst = max(worst, float((answers - own).abs().max()))
            other_answers += int((answers.argmax(1) != own.argmax(1)).sum())
            right["alone"].append(own.argmax(1) == targets)
            right["together"].append(answers.argmax(1) == targets)
        bits = {name: torch.cat(parts).cpu().numpy() for name, parts in right.items()}
        rows[dataset] = {
            **{name: float(values.mean()) for name, values in bits.items()},
            **{f"{name}_right": pack_bits(values) for name, values in bits.items()},
            "test_images": len(split),
            "largest_difference": worst,
            "other_answers": other_answers,
        }
    images = next(runner.batches(splits[0], _BATCH))[0]
    return {"datasets": rows, "original_identical": identical, "cost": _cost(together, images)}


def _naive(runner: Runner, datasets: Sequence[str], tasks: Sequence[Task], splits: Sequence[Split]) -> dict[str, Any]:
    """The first 1, 2, … tasks in one sequence without a mask, on the test images of each of them."""
    rows: dict[str, Any] = {dataset: {"test_images": len(s)} for dataset, s in zip(datasets, splits, strict=True)}
    for i, (dataset, split) in enumerate(zip(datasets, splits, strict=True)):
        # The task itself comes first; the others are added in their order.
        order = [tasks[i], *(task for task in tasks if task is not tasks[i])]
        right: list[list[Tensor]] = [[] for _ in order]
        for images, targets in runner.batches(split, _BATCH):
            for count in range(1, len(order) + 1):
                answers = _unmasked_answers(runner.backbone, order[:count], images)
                right[count - 1].append(answers.argmax(1) == targets)
        bits = [torch.cat(parts).cpu().numpy() for parts in right]
        rows[dataset]["by_tasks"] = [float(values.mean()) for values in bits]
        rows[dataset]["alone"], rows[dataset]["together"] = float(bits[0].mean()), float(bits[-1].mean())
        rows[dataset]["alone_right"], rows[dataset]["together_right"] = pack_bits(bits[0]), pack_bits(bits[-1])
    return {"datasets": rows}


@torch.no_grad()
def _unmasked_answers(backbone: Backbone, tasks: Sequence[Task], images: Tensor) -> Tensor:
    """The answer (B, C) of the first task when all are in one sequence without a mask."""
    tokens = torch.stack([task.class_token for task in tasks if task.class_token is not None])
    memory = torch.cat([task.memory for task in tasks], dim=1)
    _, features = run_unmasked(backbone.roles, images, tokens, memory, "memory-unmasked")
    return tasks[0].answer(features[:, 0])


def _examples(
    runner: Runner, datasets: Sequence[str], tasks: Sequence[Task], splits: Sequence[Split]
) -> dict[str, Any]:
    """Some test images of every dataset whose pictures may be shown: every task's answer, and where one looked."""
    model = MemoryViT(runner.backbone, tasks)
    examples = []
    for dataset, task, split in zip(datasets, tasks, splits, strict=True):
        if dataset not in runner.pictures:
            continue
        shown = Pictures.of(model, split, task, _EXAMPLES)
        for place in shown.choose(range(len(split))):
            (images, _), *_ = runner.batches(split.select([place]), 1)
            outputs = model(images)
            answers = []
            for name, own in zip(datasets, tasks, strict=True):
                probability, label = outputs[own.name][0].softmax(-1).max(-1)
                answers.append([name, own.labels[int(label)], round(float(probability), 3)])
            examples.append(
                {
                    "task": dataset,
                    "label": task.labels[int(split.targets[place])],
                    "answers": answers,
                    "image": shown.uri(place),
                    "attention": shown.attention_uri(place, task.name),
                }
            )
    return {"examples": examples}


def _cost(model: MemoryViT, images: Tensor) -> dict[str, Any]:
    """One pass with all tasks as a multiple of the library's own, interleaved; and what as many passes would cost."""
    backbone = model.backbone

    def plain() -> None:
        with torch.no_grad():
            backbone.family.library_forward(backbone.model, images)

    def seconds(call: Any) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    plain()
    model(images)
    ratios = []
    for _ in range(_ROUNDS):
        before, own, after = seconds(plain), seconds(lambda: model(images)), seconds(plain)
        ratios.append(2 * own / (before + after))
    return {
        "tasks": len(model.tasks),
        "batch": len(images),
        "of_plain_pass": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "rounds": _ROUNDS,
    }


CONCATENATION = Experiment(
    "concatenation", "Do tasks that were trained apart still answer as they did when put together?", trainings, measure
)
