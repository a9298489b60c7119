"""The records of one backbone, sorted for tables: nothing is drawn or written here."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vit_memory.evaluation.reproduce.records import Record
from vit_memory.evaluation.reproduce.runner import right_answers_of
from vit_memory.evaluation.statistics import Difference, Interval, RightAnswers, accuracy, difference


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """All records of one backbone."""

    backbone: str
    records: tuple[Record, ...]

    def of_kind(self, kind: str) -> list[Record]:
        """Records of one kind."""
        return [record for record in self.records if record.kind == kind]

    def together(self, kind: str) -> list[Record]:
        """Records of one kind about tasks of several datasets: those about most of them, by method and seed."""
        records = self.of_kind(kind)
        most: list[str] = max((record.identity["datasets"] for record in records), key=len, default=[])
        own = [record for record in records if record.identity["datasets"] == most]
        return sorted(own, key=lambda record: (record.identity["method"], record.identity["seed"]))

    @property
    def full_size(self) -> int | None:
        """Training images per class of the main comparison: the most that there are; None: all."""
        sizes = {record.identity["per_class"] for record in self.of_kind("training")}
        return None if None in sizes or not sizes else max(sizes)

    def trainings(self, per_class: int | None = None, *, label: str | None = None) -> "Comparison":
        """Trainings without parents, of one size (the full one by default) and one column of labels."""
        size = self.full_size if per_class is None else per_class
        chosen = [
            record
            for record in self.of_kind("training")
            if record.identity["per_class"] == size
            and record.identity["label"] == label
            and not record.identity["extends"]
        ]
        return Comparison(tuple(chosen))


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Trainings of several methods on the same datasets."""

    records: tuple[Record, ...]

    @property
    def tested(self) -> list[RightAnswers]:
        """Which test images each was right about."""
        return [right_answers_of(record) for record in self.records]

    def methods(self, known: Iterable[str] = ()) -> list[str]:
        """The trained methods: those that are known in their order, then the others."""
        trained = dict.fromkeys(record.identity["method"] for record in self.records)
        first = [name for name in known if name in trained]
        return [*first, *(name for name in trained if name not in first)]

    def datasets(self) -> list[str]:
        """By name."""
        return sorted({record.identity["dataset"] for record in self.records})

    def shared_datasets(self, methods: Sequence[str]) -> list[str]:
        """Those that all of the methods were trained on."""
        return [d for d in self.datasets() if all(self.of(method, d) for method in methods)]

    def on(self, datasets: Sequence[str]) -> "Comparison":
        """The same on some of the datasets."""
        return Comparison(tuple(record for record in self.records if record.identity["dataset"] in datasets))

    def with_seeds(self, seeds: Collection[int]) -> "Comparison":
        """The same with some of the seeds."""
        return Comparison(tuple(record for record in self.records if record.identity["seed"] in seeds))

    def of(self, method: str, dataset: str | None = None) -> list[Record]:
        """The records of a method, on one dataset or on all."""
        return [
            record
            for record in self.records
            if record.identity["method"] == method and dataset in (None, record.identity["dataset"])
        ]

    def accuracy(self, method: str, datasets: Sequence[str] | None = None) -> Interval | None:
        """Mean over the datasets, if the method was trained on all of them."""
        return accuracy(self.tested, method, datasets)

    def difference(self, method: str, other: str) -> Difference | None:
        """On the same test images and seeds."""
        return difference(self.tested, method, other)

    def steps(self, method: str) -> str:
        """Of its trainings."""
        return " or ".join(map(str, sorted({record.settings["recipe"]["steps"] for record in self.of(method)})))

    def seeds(self, method: str) -> int:
        """How many it was trained with, the fewest of any dataset that it was trained on."""
        return min(len(own) for dataset in self.datasets() if (own := self.of(method, dataset)))

    def parameters(self, method: str) -> tuple[int, int] | None:
        """The fewest and the most that were trained: heads depend on the number of classes."""
        sizes = [record.result["parameters"] for record in self.of(method)]
        return (min(sizes), max(sizes)) if sizes else None

    def mean_parameters(self, method: str) -> float:
        """Of its trainings, mean over the datasets."""
        sizes = {record.identity["dataset"]: record.result["parameters"] for record in self.of(method)}
        return float(np.mean(list(sizes.values())))

    def curve(self, method: str, datasets: Sequence[str]) -> tuple[list[int], list[float]] | None:
        """Steps, and validation accuracy as the mean over datasets and their seeds."""
        by_dataset = []
        for dataset in datasets:
            curves = [record.result["curve"] for record in self.of(method, dataset)]
            if not curves or len({len(curve) for curve in curves}) > 1:
                return None
            by_dataset.append(np.mean(curves, axis=0))
        if not by_dataset or len({len(curve) for curve in by_dataset}) > 1:
            return None
        recipe = self.of(method)[0].settings["recipe"]
        steps, every = recipe["steps"], recipe["evaluate_every"]
        return [min(steps, every * (i + 1)) for i in range(len(by_dataset[0]))], [
            float(value) for value in np.mean(by_dataset, axis=0)
        ]

    def training_seconds(self, method: str, timing: Mapping[str, Any]) -> float | None:
        """Of one training, mean over datasets, from the seconds per image of a timing; None if it was not timed."""
        seconds = []
        for record in self.of(method):
            recipe, images = record.settings["recipe"], record.settings["images"]["train"]
            batch = min(recipe["batch"], images)
            own = timing["own_pass"].get(method)
            if own is None and any(method.startswith(word) for word in ("branch", "LoRA", "full")):
                return None
            epochs = math.ceil(recipe["steps"] / math.ceil(images / batch))
            reads_store = own is None or method.startswith("branch")
            stored = images * min(recipe["views"] or epochs, epochs) * timing["forward"] if reads_store else 0.0
            seconds.append(stored + recipe["steps"] * batch * (timing["reading"] if own is None else own))
        return float(np.mean(seconds)) if seconds else None

    def note(self, methods: Sequence[str] | None = None) -> str:
        """How many images and seeds, and the commands."""
        own = [r for r in self.records if methods is None or r.identity["method"] in methods]
        images = {r.identity["dataset"]: r.result["test_images"] for r in own}
        by_count: dict[int, list[str]] = {}
        for method in dict.fromkeys(r.identity["method"] for r in own):
            by_count.setdefault(self.seeds(method), []).append(method)
        most = max(by_count, default=0)
        fewer = [f"{', '.join(names)}: {count}" for count, names in by_count.items() if count != most]
        return (
            f"n = {sum(images.values())} test images of {len(images)} datasets; {most} seed{'s' * (most != 1)}"
            f"{' (' + '; '.join(fewer) + ')' if fewer else ''}. {commands(own)}"
        )


def commands(records: Iterable[Record]) -> str:
    """What made some records: program and experiment. The options of each command are in the report's last section."""
    programs = dict.fromkeys(" ".join((record.made.get("command") or "").split()[:3]) for record in records)
    listed = [program for program in programs if program]
    return f"Made by: {', '.join(listed)}; with which options, the last section says." if listed else ""


def percent(interval: Interval | None) -> str:
    """An accuracy with its interval: 83.4 (82.0 to 84.7)."""
    if interval is None:
        return "–"
    return f"{100 * interval.mean:.1f} ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def points(interval: Interval | None) -> str:
    """A difference with its interval: +4.6 (+2.9 to +6.4)."""
    if interval is None or math.isnan(interval.mean):
        return "–"
    return f"{100 * interval.mean:+.1f} ({100 * interval.low:+.1f} to {100 * interval.high:+.1f})"


def amount(sizes: tuple[int, int] | None) -> str:
    """Parameters: 25 k to 35 k, 22.1 M."""
    if sizes is None:
        return "–"
    words = [f"{size / 1e6:.1f} M" if size >= 1e6 else f"{size / 1e3:.0f} k" for size in sizes]
    return " to ".join(dict.fromkeys(words))
