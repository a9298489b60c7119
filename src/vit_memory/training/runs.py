"""A training as a folder.

config.json                  everything that decides the weights
log.jsonl                    one line per evaluation
curves.png, tensorboard/     the same as curves
checkpoint.safetensors       the state of the training, to resume it
settings.json                every setting with its validation score
bad-images.tsv               images that were left out, with the reason (if there are any)
<name>.branch.safetensors    the branch that was trained with the best task, or a copy of the one that it stands on
<name>.safetensors           the best setting's task, written last
<name>.backbone.safetensors  regime `full` only: the trained backbone, by the library's names
report.html                  the best task's scores, mistakes and pictures; written by the command (vit_memory.report)
"""

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vit_memory.atomic import write_atomic
from vit_memory.backbone import Backbone
from vit_memory.branch import Branch
from vit_memory.choices import Storage
from vit_memory.data.sources import Dataset
from vit_memory.data.splits import Split
from vit_memory.errors import TrainingError
from vit_memory.files.backbonefile import save_tuned_backbone
from vit_memory.files.branchfile import branch_file, save_branch
from vit_memory.files.taskfile import backbone_file, save_task
from vit_memory.task import Task
from vit_memory.training.branch_sweep import check_extends_nothing
from vit_memory.training.callbacks import Callbacks, Progress
from vit_memory.training.curves import draw_curves, read_curves, read_log
from vit_memory.training.fit import fit
from vit_memory.training.grid import Grid
from vit_memory.training.options import TrainingOptions
from vit_memory.training.recipe import Recipe
from vit_memory.training.results import FitResult, SettingResult, metric_key
from vit_memory.training.tensorboard_events import write_events

# Keys of config.json in which a resumed run may differ. `cache` is the storage that was chosen when the run started.
# `branch_name` is for people: a branch is its digest and may be renamed, and earlier versions did not write its name.
_NOT_COMPARED = {"cache", "branch_name"}


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What a run trains."""

    name: str
    grid: Grid = field(default_factory=Grid)
    recipe: Recipe = field(default_factory=Recipe)
    parents: tuple[Task, ...] = ()  # the tasks it extends, with all their ancestors
    extends: tuple[str, ...] = ()  # the names of the parents it extends directly
    branch: Branch | None = None  # the frozen branch it stands on
    parent_branches: tuple[Branch, ...] = ()  # those that its parents stand on
    per_class: int | None = None  # at most so many training images of a class; None: all

    def __post_init__(self) -> None:
        if self.grid.branch_grid is None:
            return
        if self.branch is not None:
            raise TrainingError(f"{self.name}: give a branch to stand on, or --branch-blocks to train one, not both.")
        check_extends_nothing(self.name, self.extends)

    @property
    def direct_parents(self) -> list[Task]:
        """The parents it extends directly."""
        return [task for task in self.parents if task.name in self.extends]

    def train_split(self, dataset: Dataset) -> Split:
        """The images that are trained on."""
        return dataset.train if self.per_class is None else dataset.train.per_class(self.per_class, self.recipe.seed)

    @property
    def frozen_branches(self) -> list[Branch]:
        """All branches that the training reads."""
        own = [] if self.branch is None else [self.branch]
        return [*own, *(b for b in self.parent_branches if self.branch is None or b.digest != self.branch.digest)]


def train_run(
    folder: Path,
    backbone: Backbone,
    dataset: Dataset,
    plan: TrainingPlan,
    options: TrainingOptions | None = None,
    callbacks: Callbacks | None = None,
) -> FitResult:
    """Train a task on a dataset into a folder. A folder with a training is resumed or refused, never overwritten.

    `options.resume` resumes it; the checkpoint is a file of the folder. Only the main process writes files.
    """
    options, callbacks = options or TrainingOptions(), callbacks or Callbacks()
    check_run_name(plan.name)
    options = replace(options, checkpoint=check_folder(folder, resume=options.resume))
    tasks, branches = _tasks_and_branches(backbone, dataset, plan)
    train = plan.train_split(dataset)
    config = _config(backbone, dataset, train, plan, options.image_size)
    if options.resume:
        options = _with_first_storage(options, read_config(folder / "config.json", config))
    ranks = options.ranks
    ranks.barrier()  # until every process has checked the folder
    log = RunLog(folder, anew=not options.resume) if ranks.is_main else None

    def on_progress(progress: Progress) -> None:
        if log is not None and progress.scores is not None:
            log.add(progress)
        callbacks.on_progress(progress)

    def on_storage(storage: Storage) -> None:  # after all checks: a refused training leaves no folder behind
        if ranks.is_main and not options.resume:
            write_json(folder / "config.json", {**config, "cache": storage})
        callbacks.on_storage(storage)

    result = fit(
        backbone,
        tasks,
        train,
        dataset.validation,
        plan.recipe,
        parents=plan.parents,
        branches=branches,
        train_branches=plan.grid.branch_grid is not None,
        options=options,
        callbacks=replace(callbacks, on_progress=on_progress, on_storage=on_storage),
    )
    if log is not None:
        if result.bad_images:
            result.bad_images.write(folder / "bad-images.tsv")
        write_json(folder / "settings.json", [settings_row(r, result.metric) for r in result.settings])
        draw_run_curves(folder, log.path, result)
        _save_best(folder, plan, result, {"data": dataset.record(), "per_class": plan.per_class})
    ranks.barrier()
    return result


def _tasks_and_branches(
    backbone: Backbone, dataset: Dataset, plan: TrainingPlan
) -> tuple[list[Task], Sequence[Branch]]:
    """The tasks to train, and the branches that they stand on: frozen ones, or new ones that are trained too."""
    grid, about = plan.grid, (backbone, plan.name, dataset.labels, plan.direct_parents, dataset.kind)
    if grid.branch_grid is None:
        return grid.tasks(*about, plan.branch), plan.frozen_branches
    tasks, branches = [], []
    for seed in grid.seeds:
        for branch in grid.branch_grid.branches(backbone, plan.name, seed):
            branches.append(branch)
            tasks += replace(grid, seeds=(seed,)).tasks(*about, branch)
    return tasks, branches


def check_run_name(name: str) -> None:
    """Raise TrainingError if the file of a task of that name would be another file of the run."""
    if name.casefold() == "checkpoint" or name.casefold().endswith((".branch", ".backbone")):
        raise TrainingError(
            f"task name {name!r}: its file would be mistaken for another of the run; give a name other than "
            f"checkpoint that does not end in .branch or .backbone."
        )


def check_folder(folder: Path, *, resume: bool) -> Path:
    """The folder's checkpoint file; raises TrainingError if the folder can be neither started nor resumed."""
    checkpoint = folder / "checkpoint.safetensors"
    if checkpoint.exists() and not resume:
        raise TrainingError(f"{folder}: holds a training already. Resume it with --resume, or use another --out.")
    if resume and not checkpoint.exists():
        raise TrainingError(f"{folder}: no checkpoint to resume from. Start without --resume.")
    return checkpoint


def _config(
    backbone: Backbone, dataset: Dataset, train: Split, plan: TrainingPlan, image_size: int | None
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "format": "vit-memory-run/1",
        "name": plan.name,
        "backbone": {**asdict(backbone.identity), "dtype": str(backbone.dtype)},
        "data": dataset.record(),
        "train_images": len(train),
        "per_class": plan.per_class,
        "kind": dataset.kind,
        "labels": list(dataset.labels),
        "extends": {task.name: task.digest for task in plan.direct_parents},
        "grid": plan.grid.record(),
        "recipe": plan.recipe.record(),
        "image_size": image_size,
    }
    if plan.branch is not None:
        config |= {"branch": plan.branch.digest, "branch_name": plan.branch.name}
    return config


def _with_first_storage(options: TrainingOptions, config: Mapping[str, Any]) -> TrainingOptions:
    """The storage that was chosen when the run started, so that the weights are the same if the free space changed."""
    if options.cache.mode != "auto":
        return options
    return replace(options, cache=replace(options.cache, mode=config.get("cache", options.cache.mode)))


def _save_best(folder: Path, plan: TrainingPlan, result: FitResult, data_record: Mapping[str, Any]) -> None:
    best, name = result.best, plan.name
    for frozen in plan.frozen_branches:  # a copy, so that the task finds it beside its own file
        save_branch(frozen, branch_file(folder, frozen.name))
    if best.backbone is not None:
        save_tuned_backbone(best.backbone, name, backbone_file(folder / f"{name}.safetensors"))
    if best.branch is not None:
        record = replace(best.branch.record, recipe={**best.branch.record.recipe, **data_record})
        save_branch(replace(best.branch, record=record), branch_file(folder, name))
    record = replace(best.task.record, recipe={**best.task.record.recipe, **data_record})
    save_task(replace(best.task, record=record), folder / f"{name}.safetensors")


class RunLog:
    """log.jsonl: one line per evaluation.

    A resumed training may repeat evaluations that it did before it was stopped: the curves use the later line. A power
    cut may leave an incomplete line: it stays in the file, on a line of its own, and the curves leave it out.
    """

    def __init__(self, folder: Path, *, anew: bool) -> None:
        self.folder, self.path = folder, folder / "log.jsonl"
        if anew:
            self.path.unlink(missing_ok=True)

    def add(self, progress: Progress) -> None:
        """Append an evaluation."""
        line = json.dumps({"time": round(time.time(), 3), **_log_row(progress)}).encode() + b"\n"
        with self.path.open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)  # mode a: always at the end of the file


def draw_run_curves(folder: Path, log: Path, result: FitResult) -> None:
    """The curves of every setting, as a picture and for TensorBoard."""
    lines = read_log(log)
    curves = read_curves(log, result)
    write_atomic(folder / "curves.png", [draw_curves(curves, result.metric)])
    for i, (curve, one) in enumerate(zip(curves, result.settings, strict=True)):
        setting = re.sub(r"[^\w.+-]+", "_", one.setting.name)  # a file name everywhere
        scalars = {"loss": curve.losses, f"validation {result.metric}": curve.scores}
        write_events(folder / "tensorboard" / setting, str(i), lines[0]["time"] if lines else 0.0, scalars)


def read_config(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that the run was started with; raises TrainingError if it differs from the present config."""
    try:
        first = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"{path}: cannot be read ({error}), but resuming needs it. Restore it, or use another --out."
        ) from error
    now = json.loads(json.dumps(config))
    different = sorted(key for key in {*first, *now} - _NOT_COMPARED if first.get(key) != now.get(key))
    if different:
        details = [
            f"{key}.{part}: {first[key].get(part)} then, {now[key].get(part)} now"
            for key in different
            if isinstance(first.get(key), dict) and isinstance(now.get(key), dict)
            for part in sorted({*first[key], *now[key]})
            if first[key].get(part) != now[key].get(part)
        ] + [f"{key} differ" for key in different if not isinstance(first.get(key), dict)]
        raise TrainingError(
            f"{path.parent}: was started with other options: {'; '.join(details[:6])}. "
            f"Resume with the same ones, or start again with another --out."
        )
    return dict(first)


def settings_row(result: SettingResult, metric: str) -> dict[str, Any]:
    """One setting as a row of settings.json."""
    task = result.task
    return {
        "setting": result.setting.name,
        "regime": task.regime,
        "cells": task.cells,
        **_reader_row(task),
        **_branch_row(result.setting.branch),
        "learning_rate": result.setting.learning_rate,
        "weight_decay": result.setting.weight_decay,
        "start": task.record.recipe.get("start"),
        "seed": task.record.recipe.get("task_seed"),
        "parameters": result.parameters,
        metric_key(metric): result.score,
        "stopped_at": result.stopped_at,
    }


def _reader_row(task: Task) -> dict[str, Any]:
    """What a learned reader consists of; nothing for other tasks."""
    if task.reader is None:
        return {}
    rank = {projection: update.rank for projection, update in task.reader.low_rank.items()}
    return {"rank": rank, "gains": task.reader.gains is not None, "read_out": str(task.read_out)}


def _branch_row(branch: Branch | None) -> dict[str, Any]:
    """What the branch of a setting consists of; nothing for other settings."""
    if branch is None:
        return {}
    rank = {projection: update.rank for projection, update in branch.adapter.low_rank.items()}
    gains = branch.adapter.gains is not None
    return {"branch_blocks": branch.blocks, "branch_rank": rank, "branch_gains": gains}


def _log_row(progress: Progress) -> dict[str, Any]:
    """A line of the log. JSON has no NaN: stopped settings are null."""

    def numbers(values: Iterable[float]) -> list[float | None]:
        return [value if value == value else None for value in values]  # noqa: PLR0124 - NaN is not itself

    return {
        "step": progress.step,
        "losses": numbers(progress.losses),
        "metric": progress.metric,
        "scores": None if progress.scores is None else numbers(progress.scores),
    }


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_atomic(path, [json.dumps(value, indent=2, ensure_ascii=False).encode(errors="backslashreplace"), b"\n"])
