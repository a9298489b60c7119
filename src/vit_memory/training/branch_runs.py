"""The training of a branch on several datasets as a folder.

config.json, log.jsonl, curves.png, tensorboard/, checkpoint.safetensors, settings.json, bad-images.tsv: as in `runs.py`
<name>.branch.safetensors    the best setting's branch
<task>.safetensors           its tasks, one for every dataset, written last
report.html                  their scores, mistakes and pictures; written by the command (vit_memory.report)
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vit_memory.backbone import Backbone
from vit_memory.branch import Branch
from vit_memory.choices import Regime, Storage
from vit_memory.data.sources import Dataset
from vit_memory.errors import TrainingError
from vit_memory.files.branchfile import branch_file, save_branch
from vit_memory.files.taskfile import save_task
from vit_memory.regimes import COMPOSABLE
from vit_memory.task import new_task
from vit_memory.training.callbacks import Callbacks, Progress
from vit_memory.training.fit_branch import TaskData, fit_branch
from vit_memory.training.grid import BranchGrid
from vit_memory.training.options import TrainingOptions
from vit_memory.training.recipe import Recipe
from vit_memory.training.results import FitResult
from vit_memory.training.runs import (
    RunLog,
    check_folder,
    check_run_name,
    draw_run_curves,
    read_config,
    settings_row,
    write_json,
)


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """What a run trains: branches, and on each a task of this regime for every dataset."""

    name: str
    grid: BranchGrid = field(default_factory=BranchGrid)
    recipe: Recipe = field(default_factory=Recipe.reader)
    regime: Regime = "class"
    seed: int = 0  # where branches and tasks start
    per_class: int | None = None  # at most so many training images of a class; None: all


def train_branch_run(
    folder: Path,
    backbone: Backbone,
    datasets: Mapping[str, Dataset],
    plan: BranchPlan,
    options: TrainingOptions | None = None,
    callbacks: Callbacks | None = None,
) -> FitResult:
    """Train a branch on datasets, by the names of their tasks, into a folder; resumed or refused, never overwritten."""
    options, callbacks = options or TrainingOptions(), callbacks or Callbacks()
    if plan.regime not in COMPOSABLE:
        raise TrainingError(
            f"regime {plan.regime!r} cannot stand on a branch; give one of {', '.join(sorted(COMPOSABLE))}."
        )
    for name in datasets:
        check_run_name(name)
    if len({name.casefold() for name in datasets}) < len(datasets):
        raise TrainingError(f"{', '.join(datasets)}: some file systems do not tell these names apart; choose others.")
    options = replace(options, checkpoint=check_folder(folder, resume=options.resume))
    branches = plan.grid.branches(backbone, plan.name, plan.seed)
    data = [_task_data(backbone, name, dataset, plan) for name, dataset in datasets.items()]
    config = _config(backbone, datasets, plan, options.image_size)
    if options.resume:
        first = read_config(folder / "config.json", config).get("cache")
        if options.cache.mode == "auto" and isinstance(first, list):  # as it was when the run started
            data = [replace(one, cache=storage) for one, storage in zip(data, first, strict=True)]
    ranks = options.ranks
    ranks.barrier()  # until every process has checked the folder
    log = RunLog(folder, anew=not options.resume) if ranks.is_main else None

    def on_progress(progress: Progress) -> None:
        if log is not None and progress.scores is not None:
            log.add(progress)
        callbacks.on_progress(progress)

    def on_storages(storages: Sequence[Storage]) -> None:  # after all checks: a refused training leaves no folder
        if ranks.is_main and not options.resume:
            write_json(folder / "config.json", {**config, "cache": list(storages)})

    result = fit_branch(
        backbone,
        branches,
        data,
        plan.recipe,
        options=options,
        callbacks=replace(callbacks, on_progress=on_progress),
        on_storages=on_storages,
    )
    if log is not None:
        if result.bad_images:
            result.bad_images.write(folder / "bad-images.tsv")
        write_json(folder / "settings.json", [settings_row(one, result.metric) for one in result.settings])
        draw_run_curves(folder, log.path, result)
        _save_best(folder, result, datasets, plan)
    ranks.barrier()
    return result


def _task_data(backbone: Backbone, name: str, dataset: Dataset, plan: BranchPlan) -> TaskData:
    generator = torch.Generator().manual_seed(plan.seed)
    options: dict[str, Any] = {"rank": 8, "gains": True} if plan.regime == "reader" else {}
    task = new_task(
        backbone, name, dataset.labels, regime=plan.regime, kind=dataset.kind, generator=generator, **options
    )
    recipe = {"start": "original", "task_seed": plan.seed}
    task = replace(task, record=replace(task.record, recipe=recipe))
    train = dataset.train if plan.per_class is None else dataset.train.per_class(plan.per_class, plan.recipe.seed)
    return TaskData(task, train, dataset.validation)


def _config(
    backbone: Backbone, datasets: Mapping[str, Dataset], plan: BranchPlan, image_size: int | None
) -> dict[str, Any]:
    return {
        "format": "vit-memory-branch-run/1",
        "name": plan.name,
        "backbone": {**asdict(backbone.identity), "dtype": str(backbone.dtype)},
        "data": {name: dataset.record() for name, dataset in datasets.items()},
        "labels": {name: list(dataset.labels) for name, dataset in datasets.items()},
        "per_class": plan.per_class,
        "regime": plan.regime,
        "grid": asdict(plan.grid),
        "seed": plan.seed,
        "recipe": plan.recipe.record(),
        "image_size": image_size,
    }


def _save_best(folder: Path, result: FitResult, datasets: Mapping[str, Dataset], plan: BranchPlan) -> None:
    best = result.best
    branch: Branch | None = best.branch
    assert branch is not None  # every setting has one
    data = {name: dataset.record() for name, dataset in datasets.items()}
    record = replace(branch.record, recipe={**branch.record.recipe, "datasets": data, "per_class": plan.per_class})
    save_branch(replace(branch, record=record), branch_file(folder, plan.name))
    for task in best.tasks:
        recipe = {**task.record.recipe, "data": data[task.name], "per_class": plan.per_class}
        save_task(replace(task, record=replace(task.record, recipe=recipe)), folder / f"{task.name}.safetensors")
