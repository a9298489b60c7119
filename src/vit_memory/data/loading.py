"""Batches of images: read, decoded and transformed by worker processes, in a given order.

A worker returns whole batches of uint8 pixels, a quarter of the bytes of float32, and the main process normalises them.
The batches depend only on the split, the transform, the order and the seed, not on the number of workers.
"""

import logging
import math
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from vit_memory.atomic import write_atomic
from vit_memory.choices import OnBadImage
from vit_memory.data.decoding import Encoded, decode
from vit_memory.data.splits import Split, why_empty
from vit_memory.data.transforms import TrainTransform, Transform
from vit_memory.errors import BadImage, DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some images of a split, as the backbone's input."""

    images: Tensor  # (B, 3, height, width) float32, normalised
    targets: Tensor  # (B,) int64 class numbers, or (B, C) labels or values
    indices: Tensor  # (B,) int64, in the split


@dataclass(slots=True)
class BadImages:
    """The images that could not be loaded, with the reason; each is logged once."""

    reasons: dict[str, str] = field(default_factory=dict)  # by name

    def add(self, name: str, reason: str) -> None:
        """Add an image, and log it the first time."""
        if name not in self.reasons:
            log.warning("skipped %s: %s", name, reason)
            self.reasons[name] = reason

    def __len__(self) -> int:
        return len(self.reasons)

    @property
    def first(self) -> BadImage | None:
        """The first bad image, if any."""
        return next((BadImage(name, reason) for name, reason in self.reasons.items()), None)

    def write(self, path: Path) -> None:
        """Write one line per image: name, tab, reason."""
        lines = [f"{name}\t{reason}\n" for name, reason in sorted(self.reasons.items())]
        write_atomic(path, [line.encode(errors="surrogateescape") for line in lines])  # names may be in any encoding


@dataclass(frozen=True, slots=True, eq=False)
class Loader:
    """Loads batches of a split. Iterate with `batches(order, view, seed)`, once per epoch."""

    split: Split
    transform: Transform
    batch_size: int
    workers: int = 0
    on_bad_image: OnBadImage = "fail"
    bad: BadImages = field(default_factory=BadImages)
    in_threads: bool = False  # the workers are threads, for a process that must not fork

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"the batch size is {self.batch_size}; expected 1 or more.")
        if not len(self.split):
            raise DataError(f"the split holds no images: {why_empty(self.split.kind)}.")

    def batches(self, order: Sequence[int] | None = None, view: int = 0, seed: int = 0) -> Iterator[Batch]:
        """Batches in the order of these indices; `view` and `seed` determine the augmentation of every image."""
        indices = list(range(len(self.split))) if order is None else [int(i) for i in order]
        groups = [(view, indices[i : i + self.batch_size]) for i in range(0, len(indices), self.batch_size)]
        return (batch for batch in self.planned(groups, seed) if len(batch.indices))

    def planned(self, groups: Sequence[tuple[int, Sequence[int]]], seed: int = 0) -> Iterator[Batch]:
        """One batch per group of (view, indices); a batch is empty if all its images are bad.

        With the groups of many epochs, the workers stay busy between epochs.
        """
        for result in self._load(_Batches(self.split, self.transform, groups, seed, self.on_bad_image)):
            if isinstance(result, BadImage):
                advice = "Repair or remove it, or leave bad images out: --on-bad-image skip"
                raise BadImage(result.name, f"{result.reason}. {advice}")
            images, indices, bad = result
            for name, reason in bad:
                self.bad.add(name, reason)
            targets = torch.from_numpy(self.split.targets)[indices]
            yield Batch(self.transform.normalised(images), targets, indices)

    def _load(self, batches: "_Batches") -> "Iterable[_Loaded | BadImage]":
        workers = min(self.workers, len(batches))
        if workers == 0:
            return (batches[i] for i in range(len(batches)))
        if self.in_threads:
            return _load_in_threads(batches, workers)
        return DataLoader(
            batches,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=4,
            worker_init_fn=_init_worker,
            generator=torch.Generator(),  # so that the global generator is not used
        )

    def check_usable(self, what: str) -> None:
        """Raise DataError if no image of the split can be loaded; `what` is "training image" or the like.

        Stops at the first good image, which is usually the first. Does nothing if bad images are not skipped: then the
        first bad image raises when it is loaded.
        """
        if self.on_bad_image == "fail":
            return
        first: BadImage | None = None
        for i in range(len(self.split)):
            try:
                load_one(self.split, i, self.transform, view_seed(0, 0, i))
            except BadImage as error:
                first = first or error
            else:
                return
        raise nothing_usable(what, first)


def nothing_usable(what: str, first: BadImage | None) -> DataError:
    """The error for images that are all bad; `what` is "training image" or the like."""
    reason = "" if first is None else f"; the first, {first}"
    return DataError(f"not one {what} can be used{reason}. vit-memory data lists all bad images.")


_Loaded = tuple[Tensor, Tensor, list[tuple[str, str]]]  # pixels, indices, and name and reason of every bad image


@dataclass(frozen=True, slots=True, eq=False)
class _Batches(Dataset[Any]):
    """A torch Dataset whose items are batches, so that a worker stacks its own images."""

    split: Split
    transform: Transform
    groups: Sequence[tuple[int, Sequence[int]]]
    seed: int
    on_bad_image: OnBadImage

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, i: int) -> _Loaded | BadImage:
        view, group = self.groups[i]
        images = torch.empty(0)
        loaded: list[int] = []
        bad: list[tuple[str, str]] = []
        for index in group:
            try:
                pixels = load_one(self.split, index, self.transform, view_seed(self.seed, view, index))
            except BadImage as error:
                if self.on_bad_image == "fail":
                    return error  # returned: DataLoader would wrap a raised error in a worker's traceback
                bad.append((error.name, error.reason))
                continue
            if not loaded:
                images = _empty((len(group), *pixels.shape), pixels.dtype)
            images[len(loaded)] = pixels
            loaded.append(index)
        return images[: len(loaded)], torch.tensor(loaded, dtype=torch.int64), bad


def _load_in_threads(batches: _Batches, workers: int) -> Iterator[_Loaded | BadImage]:
    """The batches in order; as many as there are threads are loaded ahead."""
    with ThreadPoolExecutor(workers, "load", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        ahead: deque[Future[_Loaded | BadImage]] = deque()
        for i in range(len(batches)):
            ahead.append(pool.submit(batches.__getitem__, i))
            if len(ahead) > workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor; in a worker, in shared memory, so that DataLoader does not copy it there."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    storage = torch.UntypedStorage._new_shared(dtype.itemsize * math.prod(shape))
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload,no-any-return]


def load_one(split: Split, index: int, transform: Transform, seed: int = 0) -> Tensor:
    """One image of a split, decoded and transformed: (3, h, w). Raises BadImage."""
    name = split.images.name(index)
    content = split.images.read(index)
    try:
        if isinstance(content, bytes) and isinstance(transform, TrainTransform):
            image = Encoded(content, name)
            pixels = image.decode(transform.min_decode_size(image.height, image.width, seed))
            return transform(pixels, seed, (image.height, image.width))
        return transform(decode(content, name), seed)
    except BadImage:
        raise
    except DataError as error:
        raise BadImage(name, str(error)) from error


def view_seed(seed: int, view: int, index: int) -> int:
    """The seed of one view of one image; distinct for distinct arguments."""
    return (seed * 1_000_003 + view) * 100_000_007 + index


def default_workers() -> int:
    """One worker per core that this process may use, at most eight."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return min(8, len(os.sched_getaffinity(0)))
    return min(8, os.cpu_count() or 1)


def _init_worker(worker: int) -> None:
    torch.set_num_threads(1)  # the workers run in parallel
    # Ctrl-C reaches the workers too, but the main process handles it and stops them; its handlers are not for workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
