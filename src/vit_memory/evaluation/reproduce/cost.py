"""What an experiment will cost on this machine, from a short timing: before anyone spends a night.

The timing needs neither the images nor the weights: costs depend on shapes only. The datasets of the paper have known
sizes, and a backbone that is not at hand is timed with random weights of its shape.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from vit_memory.backbone import Backbone
from vit_memory.branch import new_branch
from vit_memory.data.sources import Dataset
from vit_memory.data.splits import DRAWN_SHARE
from vit_memory.data.transforms import view_size
from vit_memory.evaluation.reproduce.lora import LoraModel
from vit_memory.evaluation.reproduce.methods import Method
from vit_memory.evaluation.reproduce.runner import Training
from vit_memory.evaluation.reproduce.scale import Scale
from vit_memory.graph import TaskGraph
from vit_memory.task import new_task
from vit_memory.training.batch_plan import epochs
from vit_memory.training.fit import training_preprocessing
from vit_memory.training.recipe import Recipe
from vit_memory.training.regimes import build_sweep
from vit_memory.training.sweep import Setting
from vit_memory.training.trunk_shape import TrunkShape
from vit_memory.trunk import run_trunk

_BATCH, _REPEATS = 16, 3  # images of a chunk


@dataclass(frozen=True, slots=True)
class Counts:
    """Images and classes of a dataset."""

    train: int
    validation: int
    test: int
    classes: int

    @classmethod
    def of(cls, dataset: Dataset) -> "Counts":
        """Of a dataset that is at hand."""
        return cls(len(dataset.train), len(dataset.validation), len(dataset.test or ()), len(dataset.labels))

    def per_class(self, count: int | None, most: int | None) -> "Counts":
        """With at most so many training images per class, and `most` validation images."""
        if count is None:
            return self
        most = most or count
        return Counts(
            min(self.train, count * self.classes), min(self.validation, most * self.classes), self.test, self.classes
        )


def _official(train: int, test: int, classes: int) -> Counts:
    """With validation images drawn from the training images, and test images as well if there are none."""
    if not test:
        test = round(DRAWN_SHARE * train)
        train -= test
    validation = round(DRAWN_SHARE * train)
    return Counts(train - validation, validation, test, classes)


KNOWN_DATASETS: Mapping[str, Counts] = {
    "cifar100": _official(50_000, 10_000, 100),
    "inaturalist-2017": _official(579_184, 95_986, 5089),
    "places365": _official(1_803_460, 36_500, 365),
    "sun397": _official(108_754, 0, 397),
}


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds per image on this machine, on all its threads."""

    forward: float  # the backbone's own pass
    reading: float  # one more setting of a sweep, forward and backward
    own_pass: Mapping[str, float]  # forward and backward of methods with a pass of their own, by method


def time_backbone(backbone: Backbone, image_size: int | None, methods: Iterable[Method]) -> Seconds:
    """Time a pass, a setting, and a step of every method with a pass of its own.

    As in training, a thread computes a chunk by itself; so many threads do so at the same time.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one_thread = _time_on_one_thread(backbone, image_size, methods)
    finally:
        torch.set_num_threads(threads)
    own_pass = {name: value / threads for name, value in one_thread.own_pass.items()}
    return Seconds(one_thread.forward / threads, one_thread.reading / threads, own_pass)


def _time_on_one_thread(backbone: Backbone, image_size: int | None, methods: Iterable[Method]) -> Seconds:
    size = view_size(training_preprocessing(backbone, image_size))
    images = torch.randn(_BATCH, backbone.roles.channels, *size, device=backbone.device, dtype=backbone.dtype)
    targets = torch.zeros(_BATCH, dtype=torch.long, device=backbone.device)
    labels = [str(i) for i in range(10)]

    def step(settings: Sequence[Setting]) -> Callable[[], object]:
        sweep = build_sweep(backbone, settings, TaskGraph(), Recipe())
        encoding = sweep.encode(images)
        return lambda: sweep.backward(encoding, targets)

    def memory(count: int) -> float:
        return _median(step([Setting(new_task(backbone, "task", labels, cells=5), 0.1)] * count))

    def own_pass(method: Method) -> float:
        if method.group == "lora":
            model = LoraModel(backbone, len(labels))
            return _median(lambda: F.cross_entropy(model(images), targets).backward())
        branch = None if method.blocks is None else new_branch(backbone, "branch", blocks=method.blocks)
        task = new_task(backbone, "task", labels, branch=branch, **method.arguments)
        return _median(step([Setting(task, 0.1, branch=branch)]))

    forward = _median(lambda: run_trunk(backbone.roles, images))
    one, nine = memory(1), memory(9)
    others = {method.name: own_pass(method) / _BATCH for method in methods if not _reads_trunk(method)}
    return Seconds(forward / _BATCH, max(one / 9, (nine - one) / 8) / _BATCH, others)


def _reads_trunk(method: Method) -> bool:
    """Whether it trains no part of a pass of its own."""
    return method.shares_pass or method.variant is not None


def _median(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[_REPEATS // 2]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of the trainings that run at once."""

    dataset: str
    methods: tuple[str, ...]
    settings: int
    passes: float  # of one image through the backbone, forward
    hours: float
    stored_bytes: int


def estimate(
    trainings: Sequence[Training],
    scale: Scale,
    is_search: Callable[[Training], bool],
    counts: Mapping[str, Counts],
    seconds: Seconds,
    shape: TrunkShape,
) -> list[Estimate]:
    """One row for all trainings that share a pass, and one for every other."""
    groups: dict[tuple[object, ...], list[Training]] = {}
    for one in trainings:
        alone = None if one.method.shares_pass else one.method.name
        recipe = replace(scale.recipes[one.method.group], learning_rates=None)
        groups.setdefault((one.dataset, one.label, one.seed, one.per_class, one.parents, recipe, alone), []).append(one)
    return [_estimate_group(group, scale, is_search, counts, seconds, shape) for group in groups.values()]


def _estimate_group(
    group: Sequence[Training],
    scale: Scale,
    is_search: Callable[[Training], bool],
    counts: Mapping[str, Counts],
    seconds: Seconds,
    shape: TrunkShape,
) -> Estimate:
    first = group[0]
    recipe = scale.recipes[first.method.group]
    images = counts[first.dataset].per_class(first.per_class, scale.per_class)
    settings = sum(len(scale.recipes[one.method.group].rates) if is_search(one) else 1 for one in group)
    trained = recipe.steps * min(recipe.batch, images.train)  # images over all steps
    evaluated = math.ceil(recipe.steps / recipe.evaluate_every) * images.validation
    stored = 0
    if _reads_trunk(first.method):
        forward = trained + evaluated
        if recipe.fixed_views is not None:
            rows = images.train * min(recipe.fixed_views, epochs(images.train, recipe)) + images.validation
            if rows < forward:
                forward, stored = rows, shape.bytes(rows, torch.float16)
        spent = (forward + images.test) * seconds.forward + settings * (trained + evaluated / 3) * seconds.reading
    else:
        own = seconds.own_pass[first.method.name]
        forward = settings * (trained + evaluated)
        spent = settings * (trained * own + evaluated * seconds.forward) + images.test * seconds.forward
        if first.method.has_trunk:  # a branch starts from tokens that are computed once for all its settings
            views = min(recipe.fixed_views or trained, epochs(images.train, recipe))
            spent += min(trained, images.train * views) * seconds.forward
    passes = forward + images.test
    return Estimate(first.dataset, tuple(one.method.name for one in group), settings, passes, spent / 3600, stored)
