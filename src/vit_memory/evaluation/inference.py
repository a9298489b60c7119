"""Run tasks over many images, all tasks in one pass per batch: score a labelled split, or predict image files."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from vit_memory.data.decoding import EXTENSIONS
from vit_memory.data.images import ImageFiles, Images
from vit_memory.data.loading import BadImages, Loader, nothing_usable
from vit_memory.data.splits import Split
from vit_memory.data.transforms import EvalTransform
from vit_memory.errors import DataError
from vit_memory.evaluation.metrics import AnyScores, score_task
from vit_memory.evaluation.models import Model, preprocessing_of
from vit_memory.parallel import ChunkThreads, chunk_slices
from vit_memory.predictions import Prediction, predictions
from vit_memory.task import Task

_CHUNK = 512  # files whose names are held at a time


@dataclass(frozen=True, slots=True)
class FilePrediction:
    """The prediction of every task for one file, or the reason why there is none."""

    path: str
    tasks: Mapping[str, Prediction]  # by name
    error: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """One task on the images of a split that could be read: its outputs, the targets and the scores."""

    task: Task
    outputs: Tensor  # (n, C) float32: logits, or values of a regression task
    targets: Tensor  # (n,) or (n, C), in the order of the task's labels
    indices: Tensor  # (n,) int64, the images' positions in the split
    scores: AnyScores


def evaluate(
    model: Model,
    split: Split,
    labels: Sequence[str],
    names: Sequence[str],
    *,
    batch: int = 64,
    workers: int = 0,
    threads: int | None = None,
    skipped: BadImages | None = None,
) -> dict[str, Evaluated]:
    """Score the tasks `names` on a split whose targets refer to `labels`.

    Bad images are left out and added to `skipped`; without it, the first one raises BadImage.
    """
    for name in names:
        if reason := why_not_scored(model.tasks[name], split, labels):
            raise DataError(reason)
    transform = EvalTransform(preprocessing_of(model, names))
    if skipped is None:
        loader = Loader(split, transform, batch, workers, "fail")
    else:
        loader = Loader(split, transform, batch, workers, "skip", skipped)
    outputs, targets, indices = _run(model, loader, names, threads)
    if not bool(targets.isfinite().any()):
        raise DataError(
            f"not one of {len(targets)} images has a known {'value' if split.kind == 'regression' else 'label'}."
        )

    def scored(task: Task) -> Evaluated:
        ordered = _in_order_of(task, targets, labels)
        return Evaluated(task, outputs[task.name], ordered, indices, score_task(task, outputs[task.name], ordered))

    return {name: scored(model.tasks[name]) for name in names}


def predict(
    model: Model,
    paths: Iterable[str],
    names: Sequence[str],
    *,
    batch: int = 64,
    workers: int = 0,
    threads: int | None = None,
    images: Callable[[tuple[str, ...]], Images] = ImageFiles,
    in_threads: bool = False,
) -> Iterator[FilePrediction]:
    """Predict any number of files, in order and in constant memory; a bad image has its reason as `error`.

    `images` reads files by their names, from elsewhere than this machine for example. With `in_threads`, the workers
    are threads.
    """
    transform = EvalTransform(preprocessing_of(model, names))
    stream = iter(paths)
    while chunk := list(islice(stream, _CHUNK)):
        skipped = BadImages()
        split = Split(images(tuple(chunk)), torch.zeros(len(chunk), dtype=torch.int64).numpy(), (b"",) * len(chunk))
        loader = Loader(split, transform, batch, workers, "skip", skipped, in_threads)
        predicted: dict[int, dict[str, Prediction]] = {}
        with ChunkThreads(model.backbone.device, threads) as pool:
            for part in loader.batches():
                for name, output in _outputs(model, part.images, names, pool).items():
                    rows = zip(part.indices.tolist(), predictions(model.tasks[name], output), strict=True)
                    for i, prediction in rows:
                        predicted.setdefault(i, {})[name] = prediction
        for i, path in enumerate(chunk):
            error = None if i in predicted else skipped.reasons.get(path, "cannot be read")
            yield FilePrediction(path, predicted.get(i, {}), error)


def why_not_scored(task: Task, split: Split, labels: Sequence[str]) -> str | None:
    """The reason why a task cannot be scored on a split whose targets refer to `labels`; None if it can."""
    if task.kind != split.kind:
        return f"task {task.name!r} is {task.kind}, but the images are {split.kind}: --kind {task.kind}"
    unknown = sorted(set(labels) - set(task.labels))
    if not unknown:
        return None
    shown = ", ".join(unknown[:3]) + (" …" if len(unknown) > 3 else "")
    return (
        f"task {task.name!r} has other labels than the images: {len(unknown)} of the images' labels are unknown to it "
        f"({shown}). Its labels: {', '.join(task.labels[:5])}{' …' if len(task.labels) > 5 else ''}."
    )


def image_files(sources: Iterable[Path]) -> Iterator[str]:
    """Files as given, and every image below a folder in sorted order, one at a time."""
    for source in sources:
        if not source.is_dir():
            yield str(source)
            continue
        for parent, folders, names in os.walk(source):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                if Path(name).suffix.lower() in EXTENSIONS and not name.startswith("."):
                    yield str(Path(parent) / name)


def _run(
    model: Model, loader: Loader, names: Sequence[str], threads: int | None
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The outputs (n, C) of every task for all images of a loader, their targets, and their positions in the split."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in names}
    targets, indices = [], []
    with ChunkThreads(model.backbone.device, threads) as pool:
        for part in loader.batches():
            targets.append(part.targets)
            indices.append(part.indices)
            for name, output in _outputs(model, part.images, names, pool).items():
                outputs[name].append(output)
    if not targets:
        raise nothing_usable("image", loader.bad.first)
    return {name: torch.cat(parts) for name, parts in outputs.items()}, torch.cat(targets), torch.cat(indices)


@torch.no_grad()
def _outputs(model: Model, images: Tensor, names: Sequence[str], pool: ChunkThreads) -> dict[str, Tensor]:
    """The outputs of the tasks for a batch, on the CPU; each thread of the pool computes a chunk of the batch."""
    device = model.backbone.device

    def compute(part: slice) -> dict[str, Tensor]:
        with torch.no_grad():
            outputs = model(images[part].to(device), list(names))
        return {name: outputs[name].float().cpu() for name in names}

    parts = pool.map(compute, list(chunk_slices(len(images), pool.threads)))
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def _in_order_of(task: Task, targets: Tensor, labels: Sequence[str]) -> Tensor:
    """Targets in the order of the task's labels; NaN (unknown) for labels of the task that are not in `labels`."""
    positions = torch.tensor([task.labels.index(label) for label in labels])
    if task.kind == "single-label":
        return positions[targets]
    table = torch.full((len(targets), len(task.labels)), math.nan, dtype=targets.dtype)
    table[:, positions] = targets
    return table
