"""Checks that the tasks of a model change neither its original output nor each other, on given images.

Every check compares two computations that would differ if one task reached another, and gives a result per subject: a
task, a branch, or the original output. Outputs of unrelated tasks must not depend on each other at all, so gradients
and answers beside a broken task are compared exactly; a task alone and the dense reference compute the same in another
order, so they agree to rounding.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vit_memory.branch import Branch
from vit_memory.evaluation.comparisons import TOLERANCE, changed_fields, difference, library_output, model_of_one
from vit_memory.graph import TaskGraph
from vit_memory.model import MemoryViT
from vit_memory.outputs import Outputs
from vit_memory.reference import dense_forward
from vit_memory.task import Task

REFERENCE_IMAGES = 8  # the dense reference takes many times as long as the pass it is compared with
GRADIENT_IMAGES = 2  # a graph of the whole pass is kept for all of them
ORIGINAL = "original output"

OnProgress = Callable[[int, int, str], None]  # comparisons done, of how many, and the check


@dataclass(frozen=True, slots=True)
class Result:
    """What a check found for one task, for one branch, or for the original output."""

    subject: str
    compared: int  # how many images, tensors or outputs were compared
    failures: tuple[str, ...] = ()  # what broke the promise
    value: float | None = None  # the largest difference or gradient; None: not finite, or there is none to measure
    limit: float | None = None  # that `value` must not exceed; None: equality is checked

    @property
    def passed(self) -> bool:
        """Whether nothing broke the promise."""
        return not self.failures


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, checked for every subject."""

    name: str
    method: str  # what was computed, for people
    unit: str  # what `Result.compared` counts
    images: int
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Whether it holds for every subject."""
        return all(result.passed for result in self.results)

    @property
    def failed(self) -> tuple[Result, ...]:
        """The results that did not pass."""
        return tuple(result for result in self.results if not result.passed)


def check_noninterference(
    model: MemoryViT, images: Tensor, batch: int, on_progress: OnProgress | None = None
) -> tuple[Check, ...]:
    """All checks, on images (n, C, height, width) on the model's device, computed in batches of `batch`."""
    batches, tasks, branches = images.split(batch), len(model.tasks), len(model.tasks.branches)
    total = 2 * len(batches) + tasks + min(REFERENCE_IMAGES, len(images)) + (1 + tasks) + tasks + branches
    done = 0

    def step(name: str) -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, total, name)

    passes = _run_passes(model, images, batches, step)
    checks = [_check_original, _check_alone, _check_reference, _check_gradients, _check_broken_tasks]
    return tuple(check(passes) for check in (*checks, *([_check_broken_branches] if branches else ())))


@dataclass(frozen=True, slots=True, eq=False)
class _Passes:
    """The outputs that all checks compare with."""

    model: MemoryViT
    images: Tensor  # (n, C, height, width)
    batches: Sequence[Tensor]  # of them
    library: Sequence[Mapping[str, Tensor]]  # the library's own outputs, per batch
    company: Sequence[Outputs]  # of all tasks in one pass, per batch
    step: Callable[[str], None]  # called after every comparison, with the name of the check

    def check(self, name: str, method: str, unit: str, results: Iterable[Result], images: int | None = None) -> Check:
        return Check(name, method, unit, len(self.images) if images is None else images, tuple(results))

    def answers(self, name: str) -> Tensor:
        """A task's answers to all images, in company (n, C)."""
        return torch.cat([outputs[name] for outputs in self.company])


def _run_passes(model: MemoryViT, images: Tensor, batches: Sequence[Tensor], step: Callable[[str], None]) -> _Passes:
    library, company = [], []
    for batch in batches:  # before the first pass with tasks: a task that changed a weight would be found out
        library.append(library_output(model.backbone, batch))
        step("original output")
    for batch in batches:
        company.append(model(batch))
        step("original output")
    return _Passes(model, images, batches, library, company, step)


def _check_original(passes: _Passes) -> Check:
    compared = [
        changed_fields(outputs.original, expected)
        for outputs, expected in zip(passes.company, passes.library, strict=True)
    ]
    failures = [f"batch {i}: {field}" for i, fields in enumerate(compared, 1) for field in fields]
    return passes.check(
        "original output",
        f"With all tasks and branches attached, {', '.join(passes.library[0])} of every batch were compared with the "
        f"library's own forward of the same batch (torch.equal).",
        "batches",
        [Result(ORIGINAL, len(passes.batches), tuple(failures))],
    )


def _check_alone(passes: _Passes) -> Check:
    name = "alone and in company"

    def result(task: Task) -> Result:
        alone = model_of_one(passes.model, task.name)
        answers = torch.cat([alone(images, (task.name,))[task.name] for images in passes.batches])
        passes.step(name)
        return _rounding_result(passes, task, answers)

    return passes.check(
        name,
        "Every task was computed alone, with its ancestors and their branches only, and beside all others. The largest "
        f"difference of an output is measured; {_limit_text(passes)}",
        "images",
        map(result, passes.model.tasks.values()),
    )


def _check_reference(passes: _Passes) -> Check:
    name = "dense reference"
    model, graph = passes.model, passes.model.tasks
    images = passes.images[:REFERENCE_IMAGES]
    reference = []
    for i in range(len(images)):  # one at a time: the sequence holds every cell of every task
        reference.append(
            dense_forward(model.backbone, [*graph.values()], images[i : i + 1], [*graph.branches.values()])
        )
        passes.step(name)
    return passes.check(
        name,
        "The answers were compared with those of the attention rule written out as one dense mask over one sequence, a "
        f"slow computation with attention code of its own. The largest difference is measured; {_limit_text(passes)}",
        "images",
        [
            _rounding_result(passes, task, torch.cat([outputs[task.name] for outputs in reference]))
            for task in graph.values()
        ],
        len(images),
    )


def _rounding_result(passes: _Passes, task: Task, answers: Tensor) -> Result:
    """Compare a task's answers (n, C) to the first n images with those in company."""
    company = passes.answers(task.name)[: len(answers)]
    found, limit = difference(answers, company), TOLERANCE[passes.model.backbone.dtype] * _scale(task, company)
    worst = int((found / limit).nan_to_num(math.inf, math.inf).argmax())
    value = float(found[worst])
    failures = () if value <= limit[worst] else (f"output {task.labels[worst]!r} differs by {value:.1e}",)
    return Result(task.name, len(answers), failures, value if math.isfinite(value) else None, float(limit[worst]))


def _limit_text(passes: _Passes) -> str:
    return (
        f"the limit is that of rounding, {TOLERANCE[passes.model.backbone.dtype]:g} of the largest output (at least of "
        f"1, or of the standard deviation of a value)."
    )


def _scale(task: Task, answers: Tensor) -> Tensor:
    """What rounding is relative to, per output (C,): the largest answer, at least 1 or a value's standard deviation."""
    least = torch.ones(len(task.labels)) if task.target_scale is None else task.target_scale.tensor()[1]
    return torch.maximum(answers.double().abs().amax(dim=0).nan_to_num(0.0, 0.0), least.to(answers).double())


def _check_gradients(passes: _Passes) -> Check:
    name = "cross gradients"
    images = passes.images[:GRADIENT_IMAGES]
    tasks, branches = passes.model.tasks, passes.model.tasks.branches
    graph = TaskGraph([t.map(_as_leaf) for t in tasks.values()], [b.map(_as_leaf) for b in branches.values()])
    outputs = MemoryViT(passes.model.backbone, graph.values(), graph.branches.values()).forward_with_graph(images)
    items: list[Task | Branch] = [*graph.values(), *graph.branches.values()]
    leaves = {f"{_title(item)}: {part}": tensor for item in items for part, tensor in item.tensors().items()}
    generator = torch.Generator().manual_seed(0)

    def result(subject: str, of: Sequence[Tensor], related: Collection[Task | Branch], own: Task | None) -> Result:
        weights = [torch.randn(output.shape, generator=generator).to(output) for output in of]
        gradients = (
            torch.autograd.grad(of, [*leaves.values()], weights, retain_graph=True, allow_unused=True) if of else ()
        )
        largest = {key: _largest(gradient) for key, gradient in zip(leaves, gradients, strict=bool(of))}
        unrelated = [f"{_title(item)}: {part}" for item in items if item not in related for part in item.tensors()]
        failures = [f"{key} has a gradient" for key in unrelated if largest.get(key, 0.0) != 0]
        if own is not None and not any(largest[f"{_title(own)}: {part}"] for part in own.tensors()):
            failures.append("no gradient to its own tensors either: the check shows nothing")
        worst = max((largest.get(key, 0.0) for key in unrelated), default=0.0)
        passes.step(name)
        return Result(subject, len(unrelated), tuple(failures), worst if math.isfinite(worst) else None, 0.0)

    fields = [getattr(outputs.original, field) for field in passes.library[0]]
    results = [result(ORIGINAL, [field for field in fields if field.requires_grad], (), None)]
    for task in graph.values():
        reached = [graph[other] for other in graph.with_ancestors((task.name,))]
        on = [branch for other in reached if (branch := graph.branch_of(other.name)) is not None]
        results.append(result(task.name, [outputs[task.name]], [*reached, *on], task))
    return passes.check(
        name,
        "The pass that answers was run with a graph to every tensor of every task and branch. Each output was "
        "multiplied with random numbers, so that no sum can hide a part, and differentiated with respect to all "
        "tensors of unrelated tasks and branches; the original output, with respect to all. Each gradient must be "
        "absent or exactly zero, and every task must have one with respect to tensors of its own.",
        "tensors",
        results,
        len(images),
    )


def _check_broken_tasks(passes: _Passes) -> Check:
    graph = passes.model.tasks
    return _check_broken(
        passes,
        "NaN in a task",
        "For every task, all its tensors (cells, class token, reader and head) were replaced by NaN in a copy. The "
        "original output and the answers of all tasks but itself and its descendants must keep every bit "
        "(torch.equal), and its own answers must be NaN.",
        [(task, [task.name]) for task in graph.values()],
    )


def _check_broken_branches(passes: _Passes) -> Check:
    graph = passes.model.tasks
    return _check_broken(
        passes,
        "NaN in a branch",
        "The same with all tensors of a branch: the original output and the answers of all tasks but those on the "
        "branch and their descendants must keep every bit, and the answers of those on the branch must be NaN.",
        [(branch, [task for task in graph if graph.branch_of(task) is branch]) for branch in graph.branches.values()],
    )


def _check_broken(
    passes: _Passes, name: str, method: str, subjects: Sequence[tuple[Task | Branch, Sequence[str]]]
) -> Check:
    """Break each subject in turn; with it, the answers of the tasks named beside it must be NaN."""

    def result(item: Task | Branch, spoiled: Sequence[str]) -> Result:
        graph = passes.model.tasks
        broken = _with_nan(graph, item)
        model = MemoryViT(passes.model.backbone, broken.values(), broken.branches.values())
        kept = [task for task in graph if not {*spoiled} & {*graph.with_ancestors((task,))}]
        failures: dict[str, None] = {}
        for images, sound, expected in zip(passes.batches, passes.company, passes.library, strict=True):
            outputs = model(images)
            changed = [ORIGINAL] if changed_fields(outputs.original, expected) else []
            changed += [task for task in kept if not torch.equal(outputs[task], sound[task])]
            unbroken = [task for task in spoiled if not bool(outputs[task].isnan().all())]
            failures |= dict.fromkeys([f"{other} changed" for other in changed])
            failures |= dict.fromkeys([f"{other} still answers: the check shows nothing" for other in unbroken])
        passes.step(name)
        return Result(item.name, 1 + len(kept), tuple(failures))

    return passes.check(name, method, "other outputs", [result(*subject) for subject in subjects])


def _with_nan(graph: TaskGraph, item: Task | Branch) -> TaskGraph:
    """The graph with NaN in all tensors of one task or branch. That changes its digest, so nothing is pinned to it."""
    tasks, branches = [*graph.values()], [*graph.branches.values()]
    if isinstance(item, Task):
        tasks = [task.map(_as_nan) if task is item else task for task in tasks]
    else:
        broken = item.map(_as_nan)
        tasks = [replace(task, branch=broken.ref) if graph.branch_of(task.name) is item else task for task in tasks]
        branches = [broken if branch is item else branch for branch in branches]
    return TaskGraph([replace(task, parent_digests={}) for task in tasks], branches)


def _title(item: Task | Branch) -> str:
    return f"{'task' if isinstance(item, Task) else 'branch'} {item.name}"


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def _as_nan(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, math.nan)


def _largest(gradient: Tensor | None) -> float:
    """The largest absolute value of a gradient, infinite for NaN; 0 where there is none."""
    if gradient is None or not gradient.numel():
        return 0.0
    return float(gradient.abs().max().nan_to_num(math.inf, math.inf))
