"""A dataset's summary before training: classes, counts, splits, image sizes and bad images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from vit_memory.choices import Check, Kind
from vit_memory.data.checking import check_images
from vit_memory.data.sources import Dataset
from vit_memory.data.splits import Split, why_empty

_IMBALANCED = 5  # images of the largest class per image of the smallest


@dataclass(frozen=True, slots=True)
class Summary:
    """The counts of a dataset and the results of checking its images."""

    source: str
    layout: str
    kind: Kind
    kind_reason: str  # how the kind was decided
    labels: tuple[str, ...]
    images: dict[str, int]  # split -> images
    counts: dict[str, dict[str, int]]  # split -> label -> images with this label, or with a known value
    unknown: dict[str, int]  # split -> labels or values that are not known
    values: dict[str, dict[str, float]]  # regression: value -> min, mean, std, max of the training images
    origin: dict[str, str]  # split -> "official", or how it was drawn
    sizes: dict[str, list[int]] | None  # smallest, median and largest (width, height) by area; None if not checked
    formats: dict[str, int]
    bad: dict[str, str]  # name -> reason
    shared: dict[str, int]  # "train and test" -> images whose content is in both
    ignored: tuple[str, ...]
    check: Check

    @property
    def imbalance(self) -> float | None:
        """Training images of the largest class per image of the smallest; None for values or an empty class."""
        counts = self.counts["train"].values()
        return max(counts) / min(counts) if self.kind != "regression" and min(counts) else None

    def notes(self) -> list[str]:
        """Problems to know of before training."""
        notes = self._label_notes()
        notes += [
            f"the {name} split holds no images: {why_empty(self.kind)}"
            for name, count in self.images.items()
            if not count
        ]
        if "test" not in self.counts:
            notes.append("no test images: metrics on validation images are optimistic, because they select the model")
        notes += [
            f"{count} duplicate images are in both {pair}: metrics on them are optimistic"
            for pair, count in self.shared.items()
        ]
        if self.bad:
            notes.append(
                f"{len(self.bad)} bad images: training stops at the first one; --on-bad-image skip leaves them out"
            )
        if self.ignored:
            notes.append(f"{len(self.ignored)} files ignored, without an image extension: {_shown(self.ignored)}")
        return notes

    def _label_notes(self) -> list[str]:
        notes = []
        counts = self.counts["train"]
        empty = [label for label, count in counts.items() if count == 0]
        if self.kind == "single-label" and len(self.labels) < 2:
            notes.append(f"only one class, {self.labels[0]!r}: classification needs at least two")
        if empty:
            noun = {"single-label": "classes", "multi-label": "labels", "regression": "values"}[self.kind]
            notes.append(f"{len(empty)} {noun} without a training image: {_shown(empty)}")
        elif self.imbalance is not None and self.imbalance >= _IMBALANCED:
            notes.append(
                f"class imbalance: the largest class has {self.imbalance:.0f} times as many images as the smallest, "
                f"{min(counts, key=counts.__getitem__)!r}; --balance weights all classes equally"
            )
        if any(self.unknown.values()):
            unknown = ", ".join(f"{count} in {name}" for name, count in self.unknown.items() if count)
            notes.append(f"empty label cells count as not known; the loss and the metrics ignore them: {unknown}")
        return notes

    def as_json(self) -> dict[str, Any]:
        """Plain values, for --json."""
        return {
            "format": "vit-memory-data/1",
            "source": self.source,
            "layout": self.layout,
            "kind": self.kind,
            "kind_reason": self.kind_reason,
            "classes": len(self.labels),
            "labels": list(self.labels),
            "splits": {
                name: {
                    "images": self.images[name],
                    "origin": self.origin[name],
                    "per_class": counts,
                    "unknown": self.unknown[name],
                }
                for name, counts in self.counts.items()
            },
            "values": self.values,
            "imbalance": self.imbalance,
            "sizes": self.sizes,
            "formats": self.formats,
            "check": self.check,
            "bad": [{"image": name, "reason": reason} for name, reason in self.bad.items()],
            "in_two_splits": self.shared,
            "ignored": list(self.ignored),
            "notes": self.notes(),
        }


def summarise(
    dataset: Dataset,
    *,
    check: Check = "decode",
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Count a dataset's images and check them: decode them, read their headers, or neither.

    `progress` is called with (checked images, all images).
    """
    splits = dataset.splits
    checks = check_images(splits, check, workers, progress)
    return Summary(
        source=dataset.source,
        layout=dataset.layout,
        kind=dataset.kind,
        kind_reason=dataset.kind_reason,
        labels=dataset.labels,
        images={name: len(split) for name, split in splits.items()},
        counts={name: _counts(split, dataset.labels) for name, split in splits.items()},
        unknown={name: _unknown(split) for name, split in splits.items()},
        values=_ranges(dataset.train, dataset.labels) if dataset.kind == "regression" else {},
        origin=dict(dataset.origin),
        sizes=checks.size_range(),
        formats=dict(sorted(checks.formats.items())),
        bad=checks.bad,
        shared=_shared(splits),
        ignored=dataset.ignored,
        check=check,
    )


def _counts(split: Split, labels: tuple[str, ...]) -> dict[str, int]:
    if split.kind == "single-label":
        counts = np.bincount(split.targets, minlength=len(labels))
    elif split.kind == "multi-label":
        counts = (split.targets == 1).sum(axis=0)
    else:
        counts = np.isfinite(split.targets).sum(axis=0)
    return dict(zip(labels, counts.tolist(), strict=True))


def _unknown(split: Split) -> int:
    return 0 if split.kind == "single-label" else int(np.isnan(split.targets).sum())


def _ranges(split: Split, labels: tuple[str, ...]) -> dict[str, dict[str, float]]:
    ranges = {}
    for label, column in zip(labels, split.targets.T, strict=True):
        known = column[np.isfinite(column)]
        if len(known):
            statistics = {"min": known.min(), "mean": known.mean(), "std": known.std(), "max": known.max()}
            ranges[label] = {name: float(value) for name, value in statistics.items()}
    return ranges


def _shared(splits: Mapping[str, Split]) -> dict[str, int]:
    """The number of contents that two splits have in common, by pair."""
    contents = {name: set(split.digests) for name, split in splits.items()}
    counts = {f"{a} and {b}": len(contents[a] & contents[b]) for a, b in combinations(contents, 2)}
    return {pair: count for pair, count in counts.items() if count}


def _shown(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(map(str, names[:3])) + (" …" if len(names) > 3 else "")
