"""Trains what an experiment asks for and has no record yet.

A learning rate is searched per method and dataset, on the validation images of seed 0 with all images, and used for the
other seeds and for fewer images. Test images are read once per training.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.branch import Branch
from vit_memory.data.loading import Loader
from vit_memory.data.sources import Dataset, open_data
from vit_memory.data.splits import Split
from vit_memory.data.transforms import EvalTransform
from vit_memory.errors import DataError
from vit_memory.evaluation.environment import environment, peak_memory_bytes
from vit_memory.evaluation.reproduce import lora
from vit_memory.evaluation.reproduce.methods import Method
from vit_memory.evaluation.reproduce.records import Record, RecordFolder
from vit_memory.evaluation.reproduce.scale import Scale
from vit_memory.evaluation.reproduce.trainers import Images, Job, Outcome, train_methods
from vit_memory.evaluation.statistics import RightAnswers, pack_bits, unpack_bits
from vit_memory.files.branchfile import load_branch, save_branch
from vit_memory.files.taskfile import load_task, save_task
from vit_memory.task import Task
from vit_memory.training.cache import Cache
from vit_memory.training.callbacks import Progress
from vit_memory.training.fit import training_preprocessing
from vit_memory.training.options import TrainingOptions
from vit_memory.training.recipe import Recipe

FIRST_SEED = 0  # chooses for all, whichever seeds are asked for: --seeds 1,2 goes on where --seeds 0 ended
FINE = "label"  # the column that splits and numbers of images per class are drawn by
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Training:
    """One training: a method on the images of a dataset, with a seed that draws images, order, views and cells."""

    dataset: str
    method: Method
    seed: int
    per_class: int | None
    label: str = FINE  # the column of a table
    parents: tuple["Training", ...] = ()

    @property
    def name(self) -> str:
        """For messages."""
        label = "" if self.label == FINE else f" ({self.label})"
        return f"{self.dataset}{label}, {self.method.name}, seed {self.seed}"

    @property
    def task_name(self) -> str:
        """Of the trained task."""
        words = f"{self.dataset}-{self.label}-{self.method.name}"
        return "".join(character if character.isalnum() else "-" for character in words)

    def identity(self, backbone: str) -> dict[str, Any]:
        """What the record's file is called after."""
        return {
            "kind": "training",
            "backbone": backbone,
            "dataset": self.dataset,
            "label": None if self.label == FINE else self.label,
            "method": self.method.name,
            "per_class": self.per_class,
            "seed": self.seed,
            "extends": [f"{parent.dataset} {parent.label}" for parent in self.parents],
        }


def rate_chooser(training: Training, scale: Scale) -> Training:
    """The training that searches the learning rate: of seed 0, with all images."""
    parents = tuple(rate_chooser(parent, scale) for parent in training.parents)
    return replace(training, seed=FIRST_SEED, per_class=scale.per_class, parents=parents)


def with_prerequisites(trainings: Iterable[Training], scale: Scale) -> list[Training]:
    """The trainings, before each its parents and the one that chooses its learning rate, each once."""
    every: dict[Training, None] = {}
    for one in trainings:
        needed = [*one.parents, *(chooser for chooser in (rate_chooser(one, scale),) if chooser != one)]
        every |= dict.fromkeys([*with_prerequisites(needed, scale), one])
    return list(every)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where datasets are: folders of a folder, or datasets by name that are read from it."""

    folder: Path | None

    def open(self, name: str, label: str, seed: int) -> Dataset:
        """A dataset with its splits; those that are missing are drawn with the seed."""
        if self.folder is not None and (self.folder / name).exists():
            return open_data(self.folder / name, label_column=label, seed=seed)
        return open_data(name, data_dir=self.folder, label_column=label, seed=seed)

    def names(self) -> tuple[str, ...]:
        """Every folder of the folder that can be opened; `digits` without a folder."""
        if self.folder is None:
            return ("digits",)
        datasets = [
            path.name for path in sorted(self.folder.iterdir()) if path.is_dir() and self.has(path.name, "label")
        ]
        if not datasets:
            raise DataError(f"{self.folder}: holds no datasets. Give a folder with a folder per dataset.")
        return tuple(datasets)

    def has(self, name: str, label: str) -> bool:
        """Whether the dataset can be opened and has that column of labels."""
        try:
            dataset = self.open(name, label, 0)
        except DataError:
            return False
        return dataset.kind == "single-label" and (label == "label" or label in dataset.columns)


@dataclass(eq=False)
class Runner:
    """Trains on one backbone, and keeps records."""

    backbone: Backbone
    scale: Scale
    sources: Sources
    records: RecordFolder
    options: TrainingOptions = field(default_factory=TrainingOptions)
    command: str = ""
    pictures: tuple[str, ...] = ()  # datasets whose images may be shown in the report
    on_progress: Callable[[Progress], None] = lambda progress: None
    should_stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.open = lru_cache(maxsize=64)(self.sources.open)
        self.preprocessing = training_preprocessing(self.backbone, self.options.image_size)
        self.environment = environment()  # now: a commit that is made while this runs is not what runs

    @property
    def backbone_name(self) -> str:
        """A folder's own name, not the path to it."""
        path = Path(self.backbone.name)
        return path.resolve().name if path.exists() else self.backbone.name

    def find(self, training: Training) -> Record | None:
        """Its record, if it has one. Raises FileError if that has other settings."""
        recipe = self._recipe(training)
        if recipe is None:
            return None
        return self.records.find(training.identity(self.backbone_name), self.settings(training, recipe))

    def train(self, trainings: Sequence[Training], *, weights: bool = False) -> list[Record]:
        """The records of all trainings, in their order; what has none is trained.

        `weights` trains again what has a record, but no saved weights.
        """
        for seed in dict.fromkeys(training.seed for training in trainings):
            wanted = [one for one in trainings if one.seed == seed]
            for parent in dict.fromkeys(parent for one in wanted for parent in one.parents):
                self.train([parent], weights=True)
            choosers = dict.fromkeys(rate_chooser(one, self.scale) for one in wanted)
            self._train_missing([one for one in choosers if one not in wanted], weights=False)
            self._train_missing(wanted, weights)
        records = [self.find(training) for training in trainings]
        return [record for record in records if record is not None]

    def load(self, training: Training) -> tuple[Task, Branch | None]:
        """The trained task and its branch; trained now if the weights were not kept."""
        self.train([training], weights=True)
        file = self._weights_file(training)
        branch = file.with_suffix(".branch.safetensors")
        return load_task(file), load_branch(branch) if branch.exists() else None

    def images(self, training: Training) -> Images:
        """What it trains on, chooses by, and is tested on."""
        dataset, seed, count = self._dataset(training.dataset, FINE, training.seed), training.seed, training.per_class
        if dataset.test is None or not len(dataset.test):
            raise DataError(f"{dataset.source}: no test split.")
        train, validation = dataset.train, dataset.validation
        if count is not None:
            train = train.per_class(count, seed)
        # The validation images are those of the full size: few would choose an evaluation by chance.
        if self.scale.per_class is not None:
            validation = validation.per_class(self.scale.per_class, seed)
        images = Images(dataset.labels, train, validation, dataset.test)
        if training.label == FINE:
            return images
        return images.relabelled(self._dataset(training.dataset, training.label, seed))

    def _dataset(self, name: str, label: str, seed: int) -> Dataset:
        """A dataset whose test images are the same for every seed: a rate is chosen for all seeds with one."""
        dataset = self.open(name, label, seed)
        drawn = dataset.test is not None and dataset.origin["test"] != "official"
        return self.open(name, label, FIRST_SEED) if drawn else dataset

    def batches(self, split: Split, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Images as evaluation sees them, on the backbone's device, and their targets, there too."""
        device = self.backbone.device
        for batch in Loader(split, EvalTransform(self.preprocessing), size, self.options.workers).batches():
            yield self.backbone.check_images(batch.images.to(device)), batch.targets.to(device)

    def identity_of_all(self, kind: str, trainings: Sequence[Training]) -> dict[str, Any]:
        """Of a measurement on tasks of one method and seed, one per dataset."""
        first = trainings[0]
        return {
            "kind": kind,
            "backbone": self.backbone_name,
            "method": first.method.name,
            "datasets": [one.dataset for one in trainings],
            "seed": first.seed,
        }

    def record(
        self, identity: dict[str, Any], settings: dict[str, Any], result: dict[str, Any], seconds: float
    ) -> Record:
        """Write a record with where and how it was made."""
        cache = {"mode": self.options.cache.mode, "dtype": self.options.cache.dtype}
        made = {"command": self.command, **self.environment, "cache": cache, "seconds": round(seconds, 1)}
        record = Record(identity, settings, result, {**made, "peak_memory_bytes": peak_memory_bytes()})
        self.records.write(record)
        return record

    def _train_missing(self, trainings: Sequence[Training], weights: bool) -> None:
        """Train what has no record, or no weights, in groups that share images, parents and a backbone pass."""
        groups: dict[tuple[Any, ...], dict[Training, Sequence[float]]] = {}  # with the learning rates of each
        for one in trainings:
            record, recipe = self.find(one), self._recipe(one)
            kept = not (weights and one.method.in_task_file) or self._weights_file(one).exists()
            if record is not None and kept:
                continue
            assert recipe is not None  # what chooses its rate was trained before
            rates = recipe.rates if record is None else (record.result["rate"],)
            alone = None if one.method.shares_pass else one.method.name
            shared = replace(recipe, learning_rates=None)
            key = (one.dataset, one.label, one.per_class, one.parents, shared, record is None, alone)
            groups.setdefault(key, {})[one] = rates
        for (*_, recipe, is_new, _), group in groups.items():
            self._train_group(group, recipe, is_new)

    def _train_group(self, group: Mapping[Training, Sequence[float]], recipe: Recipe, is_new: bool) -> None:
        first = next(iter(group))
        log.info("%s, seed %d: %s", first.dataset, first.seed, ", ".join(one.method.name for one in group))
        start = time.perf_counter()
        ancestors = {task.name: task for parent in first.parents for task in self._with_ancestors(parent)}
        options = self.options
        if not (first.method.has_trunk and recipe.fixed_views):
            options = replace(options, cache=Cache("off"))
        job = Job(self.backbone, self.images(first), recipe, options, self.on_progress, self.should_stop)
        parents = [ancestors[parent.task_name] for parent in first.parents]
        rates = {one.method: own for one, own in group.items()}
        outcomes = train_methods(job, rates, parents, list(ancestors.values()))
        seconds = time.perf_counter() - start
        for training, outcome in zip(group, outcomes, strict=True):
            if is_new and self.find(training) is not None:
                continue  # another process has trained it meanwhile, and others may stand on what it wrote
            self._keep_weights(training, outcome)
            if not is_new:  # its weights were missing; the record stays as it is
                continue
            own = self._recipe(training)
            assert own is not None
            result = {**_result(outcome), "trained_at_once": sum(map(len, group.values()))}
            self.record(training.identity(self.backbone_name), self.settings(training, own), result, seconds)
            log.info("%s: test accuracy %.1f %%, rate %g", training.name, 100 * outcome.right.mean(), outcome.rate)

    def _recipe(self, training: Training) -> Recipe | None:
        """The recipe, with the rate that was chosen; None if the training that chooses it has no record yet."""
        recipe = replace(self.scale.recipes[training.method.group], seed=training.seed)
        chooser = rate_chooser(training, self.scale)
        if chooser == training:
            return recipe
        record = self.find(chooser)
        return None if record is None else replace(recipe, learning_rates=(record.result["rate"],))

    def settings(self, training: Training, recipe: Recipe) -> dict[str, Any]:
        """Everything besides the identity that decides the result."""
        images, method = self.images(training), dict(training.method.arguments)
        if training.method.blocks is not None:
            method |= {"blocks": training.method.blocks, "rank": lora.RANK}
        if training.method.group == "lora":
            method = {"rank": lora.RANK, "alpha": lora.ALPHA, "projections": list(lora.PROJECTIONS)}
        return {
            "backbone_fingerprint": self.backbone.fingerprint,
            "preprocessing": str(self.preprocessing),
            "images": {name: len(split) for name, split in images.splits.items()},
            "data": {name: split.digest()[:16] for name, split in images.splits.items()},
            "classes": len(images.labels),
            "method": method,
            "recipe": recipe.record(),
            "parents": [parent.identity(self.backbone_name) for parent in training.parents],
        }

    def weights_folder(self, identity: Mapping[str, Any], settings: Mapping[str, Any]) -> Path:
        """Where a measurement that trains may keep what it has so far; other settings have another folder."""
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        return self.records.folder / "weights" / f"{self.records.path(identity).stem}-{digest}"

    def _weights_file(self, training: Training) -> Path:
        """Beside the records, and not part of them: weights can be trained again."""
        name = self.records.path(training.identity(self.backbone_name)).stem
        return self.records.folder / "weights" / f"{name}.safetensors"

    def _keep_weights(self, training: Training, outcome: Outcome) -> None:
        if outcome.task is None or not training.method.in_task_file:
            return
        file = self._weights_file(training)
        file.parent.mkdir(parents=True, exist_ok=True)
        save_task(replace(outcome.task, name=training.task_name), file)
        if outcome.branch is not None:
            save_branch(outcome.branch, file.with_suffix(".branch.safetensors"))

    def _with_ancestors(self, training: Training) -> Iterator[Task]:
        for parent in training.parents:
            yield from self._with_ancestors(parent)
        yield self.load(training)[0]


def right_answers_of(record: Record) -> RightAnswers:
    """Which test images the training of a record was right about."""
    identity, result = record.identity, record.result
    right = unpack_bits(result["right"], result["test_images"])
    return RightAnswers(identity["dataset"], identity["method"], identity["seed"], right)


def _result(outcome: Outcome) -> dict[str, Any]:
    return {
        "rate": outcome.rate,
        "searched": {f"{rate:g}": score for rate, score in outcome.searched.items()},
        "validation": outcome.searched[outcome.rate],
        "curve": [round(value, 6) for value in outcome.curve],
        "parameters": outcome.parameters,
        "bytes": outcome.size_bytes,
        "test": float(outcome.right.mean()),
        "test_images": len(outcome.right),
        "right": pack_bits(outcome.right),
    }
