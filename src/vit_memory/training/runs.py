"""A training as a folder: what was asked, what happened, what came out.

config.json             everything that decides the weights, resolved
log.jsonl               one line per look at the validation images
checkpoint.safetensors  where it stands; resuming goes on from it
settings.json           every setting with its validation accuracy
bad-images.tsv          images that were left out, with the reason, if any
<name>.safetensors      the best setting's task, written last
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from vit_memory.backbone import Backbone
from vit_memory.data.loading import BadImages, OnBadImage
from vit_memory.data.sources import Dataset
from vit_memory.errors import TrainingError
from vit_memory.files.atomic import write_atomic
from vit_memory.task import Start, Task, new_task
from vit_memory.training.loop import FitResult, Progress, SettingResult, fit
from vit_memory.training.recipe import Recipe

ComposableRegime = Literal["head", "class", "memory"]


@dataclass(frozen=True, slots=True)
class Grid:
    """Which tasks are trained beside each other; rates and decays are the recipe's."""

    regimes: tuple[ComposableRegime, ...] = ("memory",)
    cells: tuple[int, ...] = (5,)  # of the memory regime; 0 is the class regime
    starts: tuple[Start, ...] = ("original",)
    seeds: tuple[int, ...] = (0,)

    def tasks(self, backbone: Backbone, name: str, labels: Sequence[str], parents: Sequence[Task]) -> list[Task]:
        """A fresh task for every point, no two alike."""
        made: dict[tuple[Any, ...], Task] = {}
        for regime, cells, start, seed in product(self.regimes, self.cells, self.starts, self.seeds):
            kind = "class" if regime == "memory" and cells == 0 else regime
            size = cells if kind == "memory" else 0
            # A head knows neither cells, start nor randomness: one of it is enough.
            point = (kind, size, start, seed) if kind != "head" else (kind,)
            if point in made:
                continue
            generator = torch.Generator().manual_seed(seed)
            task = new_task(
                backbone, name, labels, cells=size, regime=kind, start=start, generator=generator, parents=parents
            )
            told = {"start": start, "task_seed": seed}
            made[point] = replace(task, record=replace(task.record, recipe=told))
        return list(made.values())


def train_run(
    folder: Path,
    backbone: Backbone,
    dataset: Dataset,
    name: str,
    grid: Grid,
    recipe: Recipe,
    *,
    parents: Sequence[Task] = (),
    direct_parents: Sequence[str] = (),
    image_size: int | None = None,
    per_class: int | None = None,
    workers: int = 0,
    on_bad_image: OnBadImage = "fail",
    resume: bool = False,
    report: Callable[[Progress], None] | None = None,
) -> FitResult:
    """Train a task on a dataset into a folder. A folder that holds a training already is only resumed, never replaced.

    `parents` are the tasks it extends with all their ancestors; `direct_parents` names the first of these.
    """
    checkpoint, log = folder / "checkpoint.safetensors", folder / "log.jsonl"
    if checkpoint.exists() and not resume:
        raise TrainingError(f"{folder}: holds a training already. Go on with it (--resume), or give another --out.")
    if resume and not checkpoint.exists():
        raise TrainingError(f"{folder}: no checkpoint to go on from. Begin without --resume.")
    train = dataset.train if per_class is None else dataset.train.per_class(per_class, recipe.seed)
    above = [task for task in parents if task.name in direct_parents]
    tasks = grid.tasks(backbone, name, dataset.labels, above)
    config = {
        "format": "vit-memory-run/1",
        "name": name,
        "backbone": asdict(backbone.identity),
        "data": dataset.record(),
        "train_images": len(train),
        "per_class": per_class,
        "labels": list(dataset.labels),
        "extends": {task.name: task.digest for task in above},
        "grid": asdict(grid),
        "recipe": asdict(recipe),
        "image_size": image_size,
    }
    if resume:
        _check_same(folder / "config.json", config)
    else:
        _write_json(folder / "config.json", config)
        log.unlink(missing_ok=True)
    bad = BadImages()

    def note(progress: Progress) -> None:
        # A resumed training may look again at what it looked at before it was stopped: the later line counts.
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(progress)) + "\n")
        if report is not None:
            report(progress)

    result = fit(
        backbone,
        tasks,
        train,
        dataset.validation,
        recipe,
        parents=parents,
        image_size=image_size,
        workers=workers,
        on_bad_image=on_bad_image,
        bad=bad,
        report=note,
        checkpoint=checkpoint,
        resume=resume,
    )
    if bad:
        bad.write(folder / "bad-images.tsv")
    _write_json(folder / "settings.json", [_row(r) for r in result.settings])
    best = result.best.task
    told = {**best.record.recipe, "data": dataset.record(), "per_class": per_class}
    replace(best, record=replace(best.record, recipe=told)).save(folder / f"{name}.safetensors")
    return result


def _check_same(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse to go on with another training than the folder's, naming what differs."""
    try:
        begun = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path}: cannot be read ({error}), so it is not known what to go on with.") from error
    now = json.loads(json.dumps(config))
    different = sorted(key for key in {*begun, *now} if begun.get(key) != now.get(key))
    if different:
        details = [
            f"{key}.{part}: {begun[key].get(part)} then, {now[key].get(part)} now"
            for key in different
            if isinstance(begun.get(key), dict) and isinstance(now.get(key), dict)
            for part in sorted({*begun[key], *now[key]})
            if begun[key].get(part) != now[key].get(part)
        ] + [f"{key} differ" for key in different if not isinstance(begun.get(key), dict)]
        raise TrainingError(
            f"{path.parent}: was begun with other settings: {'; '.join(details[:6])}. "
            f"Resume with the same, or begin anew with another --out."
        )


def _row(result: SettingResult) -> dict[str, Any]:
    task = result.task
    return {
        "setting": result.setting.name,
        "regime": task.regime,
        "cells": task.cells,
        "learning_rate": result.setting.learning_rate,
        "weight_decay": result.setting.weight_decay,
        "start": task.record.recipe.get("start"),
        "seed": task.record.recipe.get("task_seed"),
        "parameters": task.parameters,
        "validation_accuracy": result.accuracy,
        "stopped_at": result.stopped_at,
    }


def _plain(progress: Progress) -> dict[str, Any]:
    """JSON has no NaN: settings that were stopped are null."""

    def numbers(values: Iterable[float]) -> list[float | None]:
        return [value if value == value else None for value in values]  # noqa: PLR0124 - NaN is not itself

    return {
        "step": progress.step,
        "losses": numbers(progress.losses),
        "validation_accuracies": None if progress.accuracies is None else numbers(progress.accuracies),
    }


def _write_json(path: Path, value: Any) -> None:
    write_atomic(path, [json.dumps(value, indent=2, ensure_ascii=False).encode(), b"\n"])
