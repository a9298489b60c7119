"""A training as a folder: what was asked, what happened, what came out.

config.json                  everything that decides the weights, resolved
log.jsonl                    one line per look at the validation images
curves.png, tensorboard/     the same lines for the eye
checkpoint.safetensors       where it stands; resuming goes on from it
settings.json                every setting with its validation score
bad-images.tsv               images that were left out, with the reason, if any
<name>.safetensors           the best setting's task, written last
<name>.backbone.safetensors  regime `full` only: the backbone that was trained, by the library's names
report.html                  the best task's scores, mistakes and pictures; the command adds it (vit_memory.report)
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from vit_memory.backbone import Backbone
from vit_memory.data.loading import BadImages, OnBadImage
from vit_memory.data.sources import Dataset
from vit_memory.errors import TrainingError
from vit_memory.files.atomic import write_atomic
from vit_memory.files.container import write_container
from vit_memory.task import Kind, Regime, Start, Task, new_task
from vit_memory.training.cache import Cache
from vit_memory.training.crew import Crew
from vit_memory.training.curves import draw_curves, read_curves, read_log, write_events
from vit_memory.training.loop import FitResult, Progress, SettingResult, fit, metric_key
from vit_memory.training.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Grid:
    """Which tasks are trained beside each other; rates and decays are the recipe's."""

    regimes: tuple[Regime, ...] = ("memory",)
    cells: tuple[int, ...] = (5,)  # of the regimes with memory; none in `memory` is `class`
    starts: tuple[Start, ...] = ("original",)
    seeds: tuple[int, ...] = (0,)

    def tasks(
        self,
        backbone: Backbone,
        name: str,
        labels: Sequence[str],
        parents: Sequence[Task],
        kind: Kind = "single-label",
    ) -> list[Task]:
        """A fresh task for every point, no two alike."""
        made: dict[tuple[Any, ...], Task] = {}
        for regime, cells, start, seed in product(self.regimes, self.cells, self.starts, self.seeds):
            trained: Regime = "class" if regime == "memory" and cells == 0 else regime
            size = 0 if trained in ("head", "class", "full") else cells
            # A head knows neither cells, start nor randomness, nor does a backbone: one of them is enough.
            point = (trained,) if trained in ("head", "full") else (trained, size, start, seed)
            if point in made:
                continue
            generator = torch.Generator().manual_seed(seed)
            task = new_task(
                backbone,
                name,
                labels,
                cells=size,
                regime=trained,
                kind=kind,
                start=start,
                generator=generator,
                parents=parents,
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
    cache: Cache | None = None,
    workers: int = 0,
    threads: int | None = None,
    on_bad_image: OnBadImage = "fail",
    resume: bool = False,
    report: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    crew: Crew | None = None,
) -> FitResult:
    """Train a task on a dataset into a folder. A folder that holds a training already is only resumed, never replaced.

    `parents` are the tasks it extends with all their ancestors; `direct_parents` names the first of these. Of a crew,
    only the first process writes.
    """
    crew, cache = crew or Crew(), cache or Cache()
    checkpoint = folder / "checkpoint.safetensors"
    if checkpoint.exists() and not resume:
        raise TrainingError(f"{folder}: holds a training already. Go on with it (--resume), or give another --out.")
    if resume and not checkpoint.exists():
        raise TrainingError(f"{folder}: no checkpoint to go on from. Begin without --resume.")
    train = dataset.train if per_class is None else dataset.train.per_class(per_class, recipe.seed)
    above = [task for task in parents if task.name in direct_parents]
    tasks = grid.tasks(backbone, name, dataset.labels, above, dataset.kind)
    config = {
        "format": "vit-memory-run/1",
        "name": name,
        "backbone": {**asdict(backbone.identity), "dtype": str(backbone.dtype)},
        "data": dataset.record(),
        "train_images": len(train),
        "per_class": per_class,
        "kind": dataset.kind,
        "labels": list(dataset.labels),
        "extends": {task.name: task.digest for task in above},
        "grid": asdict(grid),
        "recipe": asdict(recipe),
        "image_size": image_size,
    }
    if resume:
        begun = _read_begun(folder / "config.json", config)
        # Free room may have changed since; what was decided then decides now, so that the weights are the same.
        cache = replace(cache, mode=begun.get("cache", cache.mode)) if cache.mode == "auto" else cache
    crew.wait()  # until all have looked at the folder as it was
    log = _Log(folder, anew=not resume) if crew.first else None
    bad = BadImages()

    def note(progress: Progress) -> None:
        if log is not None and progress.scores is not None:
            log.add(progress)
        if report is not None:
            report(progress)

    def decided(kind: str) -> None:  # once all checks have passed: a refused training leaves no folder behind
        if crew.first and not resume:
            _write_json(folder / "config.json", {**config, "cache": kind})

    result = fit(
        backbone,
        tasks,
        train,
        dataset.validation,
        recipe,
        parents=parents,
        image_size=image_size,
        cache=cache,
        workers=workers,
        threads=threads,
        on_bad_image=on_bad_image,
        bad=bad,
        report=note,
        decided=decided,
        stop=stop,
        crew=crew,
        checkpoint=checkpoint,
        resume=resume,
    )
    if log is not None:
        if bad:
            bad.write(folder / "bad-images.tsv")
        _write_json(folder / "settings.json", [_row(r, result.metric) for r in result.settings])
        log.draw([r.setting.name for r in result.settings])
        curves = read_curves(log.path, result)
        write_atomic(folder / "curves.png", [draw_curves(curves, result.metric)])
        _save_best(folder, name, result, {"data": dataset.record(), "per_class": per_class})
    crew.wait()
    return result


def _save_best(folder: Path, name: str, result: FitResult, told: Mapping[str, Any]) -> None:
    best = result.best
    if best.backbone is not None:
        weights = {key: value.detach().cpu() for key, value in best.backbone.model.state_dict().items()}
        about = {"format": "vit-memory-backbone/1", "backbone": best.backbone.name, "task": name}
        write_container(folder / f"{name}.backbone.safetensors", about, weights)
    record = replace(best.task.record, recipe={**best.task.record.recipe, **told})
    replace(best.task, record=record).save(folder / f"{name}.safetensors")


class _Log:
    """One line per look. A resumed training may look again at what it looked at before it was stopped: the later
    line counts, and the earlier one goes when the curves are drawn. A power cut may leave a line cut off: it stays in
    the file, on a line of its own, and is left out of the curves.
    """

    def __init__(self, folder: Path, *, anew: bool) -> None:
        self.folder, self.path = folder, folder / "log.jsonl"
        if anew:
            self.path.unlink(missing_ok=True)

    def add(self, progress: Progress) -> None:
        line = json.dumps({"time": round(time.time(), 3), **_plain(progress)}).encode() + b"\n"
        with self.path.open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)  # at the end, wherever was read

    def draw(self, names: Sequence[str]) -> None:
        """Curves of every setting, for TensorBoard."""
        lines = read_log(self.path)
        if not lines:
            return
        rows = {line["step"]: line for line in lines}  # the later of two
        drawn: dict[str, dict[str, list[tuple[int, float]]]] = {}
        for key in ("losses", "scores"):
            drawn[key] = {
                name: [(step, rows[step][key][i]) for step in sorted(rows) if rows[step][key][i] is not None]
                for i, name in enumerate(names)
            }
        score = f"validation {lines[0]['metric']}"
        tags = {"losses": "loss", "scores": score}
        for i, name in enumerate(names):
            scalars = {tag: drawn[key][name] for key, tag in tags.items()}
            place = name.replace(", ", "_").replace(" ", "_")
            write_events(self.folder / "tensorboard" / place, str(i), lines[0]["time"], scalars)


def _read_begun(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the training was begun with; refuses to go on with another, naming what differs."""
    try:
        begun = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path}: cannot be read ({error}), so it is not known what to go on with.") from error
    now = json.loads(json.dumps(config))
    different = sorted(key for key in {*begun, *now} - {"cache"} if begun.get(key) != now.get(key))
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
    return dict(begun)


def _row(result: SettingResult, metric: str) -> dict[str, Any]:
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
        metric_key(metric): result.score,
        "stopped_at": result.stopped_at,
    }


def _plain(progress: Progress) -> dict[str, Any]:
    """JSON has no NaN: settings that were stopped are null."""

    def numbers(values: Iterable[float]) -> list[float | None]:
        return [value if value == value else None for value in values]  # noqa: PLR0124 - NaN is not itself

    return {
        "step": progress.step,
        "losses": numbers(progress.losses),
        "metric": progress.metric,
        "scores": None if progress.scores is None else numbers(progress.scores),
    }


def _write_json(path: Path, value: Any) -> None:
    write_atomic(path, [json.dumps(value, indent=2, ensure_ascii=False).encode(errors="backslashreplace"), b"\n"])
