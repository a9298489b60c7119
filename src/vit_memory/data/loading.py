"""Batches of images: read, decoded and transformed by worker processes, in a given order, bad ones told by name.

A worker makes whole batches of bytes, a quarter of what a backbone reads, and the receiving process normalises them.
What comes out depends on the split, the transform, the order and the seed alone, never on how many workers there are.
"""

import logging
import math
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from vit_memory.data.decoding import Encoded, decode
from vit_memory.data.splits import Split, why_empty
from vit_memory.data.transforms import Training, Transform
from vit_memory.errors import BadImage, DataError

OnBadImage = Literal["fail", "skip"]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some images of a split, ready for the backbone."""

    images: Tensor  # (B, 3, height, width) float32, normalised
    targets: Tensor  # (B,) int64 class numbers, or (B, C) labels or values
    indices: Tensor  # (B,) int64, their places in the split


@dataclass(slots=True)
class BadImages:
    """The images that could not be used, with the reason, each told once."""

    reasons: dict[str, str] = field(default_factory=dict)  # by name

    def add(self, name: str, reason: str) -> None:
        """Remember one, and log it the first time."""
        if name not in self.reasons:
            log.warning("skipped %s: %s", name, reason)
            self.reasons[name] = reason

    def __len__(self) -> int:
        return len(self.reasons)

    @property
    def first(self) -> BadImage | None:
        """The one that was found first, if any."""
        return next((BadImage(name, reason) for name, reason in self.reasons.items()), None)

    def write(self, path: Path) -> None:
        """One line each: name, tab, reason."""
        lines = [f"{name}\t{reason}\n" for name, reason in sorted(self.reasons.items())]
        path.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")  # names are bytes, of any encoding


@dataclass(frozen=True, slots=True, eq=False)
class Loader:
    """How batches of a split are made. Iterate with `batches(order, seed)`, once per epoch."""

    split: Split
    transform: Transform
    batch_size: int
    workers: int = 0
    on_bad_image: OnBadImage = "fail"
    bad: BadImages = field(default_factory=BadImages)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"the batch size is {self.batch_size}; expected 1 or more.")
        if not len(self.split):
            raise DataError(f"the split holds no images: {why_empty(self.split.kind)}.")

    def batches(self, order: Sequence[int] | None = None, view: int = 0, seed: int = 0) -> Iterator[Batch]:
        """Batches in that order of places in the split; `view` and `seed` choose the augmentation of every image."""
        places = list(range(len(self.split))) if order is None else [int(i) for i in order]
        groups = [(view, places[i : i + self.batch_size]) for i in range(0, len(places), self.batch_size)]
        return (batch for batch in self.planned(groups, seed) if len(batch.indices))

    def planned(self, groups: Sequence[tuple[int, Sequence[int]]], seed: int = 0) -> Iterator[Batch]:
        """One batch per group of places, each group with the view its images are seen in; empty if all are bad.

        A plan of many epochs keeps the workers busy across their borders.
        """
        work = _Work(self.split, self.transform, groups, seed, self.on_bad_image)
        workers = min(self.workers, len(groups))
        made: Any = (
            (work[i] for i in range(len(groups)))
            if workers == 0  # none were asked for, or there is nothing to load
            else DataLoader(
                work,
                batch_size=None,
                num_workers=workers,
                prefetch_factor=4,
                worker_init_fn=_one_thread,
                generator=torch.Generator(),  # the caller's randomness is left alone
            )
        )
        for result in made:
            if isinstance(result, BadImage):
                advice = "Mend or remove it, or leave bad images out: --on-bad-image skip"
                raise BadImage(result.name, f"{result.reason}. {advice}")
            images, indices, bad = result
            for name, reason in bad:
                self.bad.add(name, reason)
            targets = torch.from_numpy(self.split.targets)[indices]
            yield Batch(self.transform.normalised(images), targets, indices)

    def check_usable(self, what: str) -> None:
        """Raise DataError if not one image of the split can be loaded; `what` is "training image" or the like.

        Stops at the first good image, so it costs one image as a rule. Where bad images are not skipped, the first of
        them raises when it is loaded, and nothing is checked here.
        """
        if self.on_bad_image == "fail":
            return
        first: BadImage | None = None
        for place in range(len(self.split)):
            try:
                load_one(self.split, place, self.transform, view_seed(0, 0, place))
            except BadImage as error:
                first = first or error
            else:
                return
        raise nothing_usable(what, first)


def nothing_usable(what: str, first: BadImage | None) -> DataError:
    """The error for images that are all bad; `what` is "training image" or the like."""
    reason = "" if first is None else f"; the first, {first}"
    return DataError(f"not one {what} can be used{reason}. vit-memory data lists all bad images.")


@dataclass(frozen=True, slots=True, eq=False)
class _Work(Dataset[Any]):
    """One item is one batch, so that a worker stacks its own images."""

    split: Split
    transform: Transform
    groups: Sequence[tuple[int, Sequence[int]]]
    seed: int
    on_bad_image: OnBadImage

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, list[tuple[str, str]]] | BadImage:
        view, group = self.groups[i]
        images = torch.empty(0)
        places: list[int] = []
        bad: list[tuple[str, str]] = []
        for place in group:
            try:
                pixels = load_one(self.split, place, self.transform, view_seed(self.seed, view, place))
            except BadImage as error:
                if self.on_bad_image == "fail":
                    return error  # as a value: DataLoader would bury it in a worker's traceback
                bad.append((error.name, error.reason))
                continue
            if not places:
                images = _empty((len(group), *pixels.shape), pixels.dtype)
            images[len(places)] = pixels
            places.append(place)
        return images[: len(places)], torch.tensor(places, dtype=torch.int64), bad


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor to fill; a worker's lies in the memory it shares, where DataLoader would otherwise copy it."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    storage = torch.UntypedStorage._new_shared(dtype.itemsize * math.prod(shape))
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload,no-any-return]


def load_one(split: Split, place: int, transform: Transform, seed: int = 0) -> Tensor:
    """One image of a split, decoded and transformed: (3, h, w). Raises BadImage."""
    name = split.images.name(place)
    source = split.images.read(place)
    try:
        if isinstance(source, bytes) and isinstance(transform, Training):
            file = Encoded(source, name)
            pixels = file.decode(transform.wants(file.height, file.width, seed))
            return transform(pixels, seed, (file.height, file.width))
        return transform(decode(source, name), seed)
    except BadImage:
        raise
    except DataError as error:
        raise BadImage(name, str(error)) from error


def view_seed(seed: int, view: int, place: int) -> int:
    """The seed of one view of one image: distinct triples, distinct streams."""
    return (seed * 1_000_003 + view) * 100_000_007 + place


def default_workers() -> int:
    """One per core that this process may use, at most eight."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return min(8, len(os.sched_getaffinity(0)))
    return min(8, os.cpu_count() or 1)


def _one_thread(worker: int) -> None:
    torch.set_num_threads(1)  # the workers are the parallelism
    # A Ctrl-C reaches them too, but the process that started them decides; and its handlers are not theirs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
