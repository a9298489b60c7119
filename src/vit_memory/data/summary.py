"""What is in a dataset, told before anything is trained on it: classes, counts, splits, and the files that are bad."""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vit_memory.data.decoding import Encoded, decode
from vit_memory.data.images import Images
from vit_memory.data.sources import Dataset
from vit_memory.data.splits import Split, why_empty
from vit_memory.errors import BadImage
from vit_memory.task import Kind

Check = Literal["decode", "headers", "none"]
_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Summary:
    """A dataset in numbers."""

    source: str
    layout: str
    kind: Kind
    kind_reason: str  # how the kind was decided
    labels: tuple[str, ...]
    images: dict[str, int]  # split -> images
    counts: dict[str, dict[str, int]]  # split -> label -> images that show it, or whose value is known
    unknown: dict[str, int]  # split -> cells of labels or values that are not known
    values: dict[str, dict[str, float]]  # regression: value -> smallest, mean, standard deviation, largest in training
    origin: dict[str, str]  # split -> where it comes from
    sizes: dict[str, list[int]] | None  # smallest, median and largest (width, height) by area; None if not looked at
    formats: dict[str, int]
    bad: dict[str, str]  # name -> reason
    shared: dict[str, int]  # "train and test" -> images whose content is in both
    ignored: tuple[str, ...]
    check: Check

    @property
    def imbalance(self) -> float | None:
        """Images of the largest training class for one of the smallest; None where a class has none, or for values."""
        counts = self.counts["train"].values()
        return max(counts) / min(counts) if self.kind != "regression" and min(counts) else None

    def notes(self) -> list[str]:
        """What somebody should know before training on it."""
        said = []
        empty = [label for label, count in self.counts["train"].items() if count == 0]
        if self.kind == "single-label" and len(self.labels) < 2:
            said.append(f"only one class, {self.labels[0]!r}: there is nothing to tell apart")
        if empty:
            what = {"single-label": "classes", "multi-label": "labels", "regression": "values"}[self.kind]
            said.append(f"{len(empty)} {what} without a training image: {_some(empty)}")
        elif self.imbalance is not None and self.imbalance >= 5:
            smallest = min(self.counts["train"], key=self.counts["train"].__getitem__)
            said.append(
                f"unbalanced: the largest class has {self.imbalance:.0f} times the images of the smallest, "
                f"{smallest!r}; --balance weighs them alike"
            )
        if any(self.unknown.values()):
            cells = ", ".join(f"{count} in {name}" for name, count in self.unknown.items() if count)
            said.append(f"cells that say nothing are left out as not known: {cells}")
        said += [
            f"the {name} split holds no images: {why_empty(self.kind)}"
            for name, count in self.images.items()
            if not count
        ]
        if "test" not in self.counts:
            said.append("no test images: what is reported on validation images was also used to choose")
        said += [f"{count} images are in both {pair}: results on them flatter" for pair, count in self.shared.items()]
        if self.bad:
            said.append(f"{len(self.bad)} bad images; training stops at the first, or skips them: --on-bad-image skip")
        if self.ignored:
            said.append(f"{len(self.ignored)} files ignored, no images by their names: {_some(self.ignored)}")
        return said

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
    """Count a dataset and look at its images: decode them, read their headers, or neither.

    `progress` is called with (images looked at, images in all).
    """
    sizes: list[tuple[int, int]] = []
    formats: Counter[str] = Counter()
    bad: dict[str, str] = {}
    if check != "none":
        total, seen = sum(len(split) for split in dataset.splits.values()), 0
        for split in dataset.splits.values():
            for looked in _looked_at(split.images, check, workers):
                for name, found in looked:
                    if isinstance(found, str):
                        bad[name] = found
                    else:
                        formats[found[0]] += 1
                        sizes.append(found[1:])
                seen += len(looked)
                if progress is not None:
                    progress(seen, total)
    contents = {name: set(split.digests) for name, split in dataset.splits.items()}
    names = list(contents)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    shared = {f"{a} and {b}": len(contents[a] & contents[b]) for a, b in pairs if contents[a] & contents[b]}
    by_area = sorted(sizes, key=lambda size: size[0] * size[1])
    return Summary(
        source=dataset.source,
        layout=dataset.layout,
        kind=dataset.kind,
        kind_reason=dataset.kind_reason,
        labels=dataset.labels,
        images={name: len(split) for name, split in dataset.splits.items()},
        counts={name: _counts(split, dataset.labels) for name, split in dataset.splits.items()},
        unknown={
            name: 0 if split.kind == "single-label" else int(np.isnan(split.targets).sum())
            for name, split in dataset.splits.items()
        },
        values=_ranges(dataset.train, dataset.labels) if dataset.kind == "regression" else {},
        origin=dict(dataset.origin),
        sizes=None
        if not by_area
        else {
            "smallest": list(by_area[0]),
            "median": list(by_area[len(by_area) // 2]),
            "largest": list(by_area[-1]),
        },
        formats=dict(sorted(formats.items())),
        bad=bad,
        shared=shared,
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


def _ranges(split: Split, labels: tuple[str, ...]) -> dict[str, dict[str, float]]:
    ranges = {}
    for label, column in zip(labels, split.targets.T, strict=True):
        known = column[np.isfinite(column)]
        if len(known):
            facts = {"min": known.min(), "mean": known.mean(), "std": known.std(), "max": known.max()}
            ranges[label] = {name: float(value) for name, value in facts.items()}
    return ranges


_Look = tuple[str, str | tuple[str, int, int]]  # name, and either what is wrong or format, width and height


def _looked_at(images: Images, check: Check, workers: int) -> Iterator[list[_Look]]:
    """Chunks of what was seen, by threads: Pillow and simplejpeg let others run while they decode."""
    with ThreadPoolExecutor(max(1, workers)) as pool:
        chunks = (images.select(range(i, min(i + _CHUNK, len(images)))) for i in range(0, len(images), _CHUNK))
        yield from pool.map(lambda chunk: _look(chunk, check), chunks)


def _look(images: Images, check: Check) -> list[_Look]:
    seen: list[_Look] = []
    for i in range(len(images)):
        name = images.name(i)
        try:
            source = images.read(i)
            if isinstance(source, np.ndarray):
                pixels = decode(source, name)
                seen.append((name, ("raw", pixels.shape[2], pixels.shape[1])))
                continue
            file = Encoded(source, name)
            if check == "decode":
                file.decode(at_least=(1, 1))  # an eighth of the work, and still every byte of a JPEG
            seen.append((name, (file.format, file.width, file.height)))
        except BadImage as error:
            seen.append((error.name, error.reason))
    return seen


def _some(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(map(str, names[:3])) + (" …" if len(names) > 3 else "")
