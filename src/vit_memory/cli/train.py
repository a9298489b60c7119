"""vit-memory train: train a task on a folder of images."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vit_memory.choices import OnBadImage, PrecisionOrAuto
from vit_memory.cli.branch_options import BranchOptions
from vit_memory.cli.data import DataOptions, OptionalSource, page, summarise_images
from vit_memory.cli.options import spread_options
from vit_memory.cli.options_2023 import TrainOptions2023
from vit_memory.cli.progress import TrainingProgress, show_log, stopping, typed_command
from vit_memory.cli.settings_table import print_settings
from vit_memory.cli.train_options import (
    CacheOptions,
    GridOptions,
    MachineOptions,
    RecipeOptions,
    RunOptions,
)

if TYPE_CHECKING:
    import torch

    from vit_memory.backbone import Backbone
    from vit_memory.branch import Branch
    from vit_memory.data.sources import Dataset
    from vit_memory.task import Task
    from vit_memory.training.callbacks import Callbacks
    from vit_memory.training.options import TrainingOptions
    from vit_memory.training.ranks import Ranks
    from vit_memory.training.results import FitResult
    from vit_memory.training.runs import TrainingPlan


@spread_options
def train(
    source: OptionalSource = None,
    *,
    run: RunOptions,
    grid: GridOptions,
    branch: BranchOptions,
    recipe: RecipeOptions,
    cache: CacheOptions,
    machine: MachineOptions,
    data: DataOptions,
    as_2023: TrainOptions2023,
) -> None:
    """Train a task on DATA and write it, with its log and checkpoint, to a folder.

    Every combination of --regime, --memory, --rank, --projections, --read-out, --start, --seeds, --lr and
    --weight-decay is trained at once, for little more than the cost of one; the best by validation score (accuracy, mAP
    or R²) becomes the task file, the smaller one of equals. The table at the end shows the best of every method, from
    the smallest task to the largest. With --branch-blocks every setting also trains a branch of its own, which costs a
    part of a forward and backward pass each; the best one becomes a branch file beside the task file.
    """
    from vit_memory.backbone import load_backbone
    from vit_memory.files.branchfile import branch_file
    from vit_memory.parallel import limit_threads
    from vit_memory.task import check_name
    from vit_memory.training.ranks import init_ranks
    from vit_memory.training.runs import train_run

    source, run, data = as_2023.source(source), as_2023.run_options(run), as_2023.data_options(data)
    name, recipe = run.task_name, as_2023.recipe_options(recipe)
    check_name(name)
    show_log()
    limit_threads(machine.threads)
    plan = _plan(run, as_2023.grid_options(grid), branch, recipe)
    backbone_name = run.backbone or ("bundled" if plan.branch is None else plan.branch.backbone.name)
    ranks = init_ranks(machine.device)
    dataset = data.open(source, recipe.seed)
    with ranks.fail_together():
        if ranks.is_main:
            show_and_check(dataset, source, machine.on_bad_image)
    plan = as_2023.plan(plan, dataset, recipe.evaluate_every)
    if ranks.is_main:
        for note in as_2023.notes(run, plan, dataset):
            typer.echo(note, err=True)
    device = ranks.device(machine.device)
    backbone = load_backbone(backbone_name, device=device, dtype=backbone_dtype(machine.precision, machine.device))
    options = machine.build(cache.build(), ranks, resume=run.resume)
    result = run_training(
        run.folder, ranks, lambda callbacks: train_run(run.folder, backbone, dataset, plan, options, callbacks)
    )
    if ranks.is_main:
        file = run.folder / f"{name}.safetensors"
        print_settings(result)
        typer.echo(f"\n{file}: {result.best.setting.name}, {file.stat().st_size / 1000:.0f} kB")
        if result.best.branch is not None:
            path = branch_file(run.folder, name)
            typer.echo(f"{path}: {result.best.branch.method}, {path.stat().st_size / 1000:.0f} kB")
        if run.report:
            write_run_report(
                run.folder,
                backbone,
                {name: dataset},
                result,
                options,
                parents=plan.parents,
                branches=plan.frozen_branches,
            )


def run_training(folder: Path, ranks: "Ranks", train: "Callable[[Callbacks], FitResult]") -> "FitResult":
    """Train with progress on stderr; after Ctrl-C, say how to go on and exit with 130."""
    from vit_memory.errors import TrainingStopped
    from vit_memory.training.callbacks import Callbacks

    with stopping() as should_stop, closing(TrainingProgress()) as progress:
        callbacks = Callbacks(should_stop=should_stop)
        if ranks.is_main:
            callbacks = replace(callbacks, on_progress=progress)
        try:
            return train(callbacks)
        except TrainingStopped as stopped:
            progress.close()
            saved = (folder / "checkpoint.safetensors").exists()
            if ranks.is_main:
                how = "Resume with the same command and --resume." if saved else "Start again with the same command."
                typer.echo(f"{stopped} {how}", err=True)
            raise typer.Exit(130) from None


def write_run_report(
    folder: Path,
    backbone: "Backbone",
    datasets: "Mapping[str, Dataset]",
    result: "FitResult",
    options: "TrainingOptions",
    *,
    parents: "Sequence[Task]" = (),
    branches: "Sequence[Branch]" = (),
) -> None:
    """Score the best tasks on their datasets, given by the names of the tasks, and write the page of the run.

    The task files are already written: a report that fails is a warning, and the training has succeeded.
    """
    from vit_memory.errors import VitMemoryError
    from vit_memory.report.run import REPORT, report_run, report_split

    splits = {name: report_split(dataset) for name, dataset in datasets.items()}
    for name, split in splits.items():
        of_task = f" of {name}" if len(datasets) > 1 else ""
        typer.echo(f"scoring {len(datasets[name].splits[split])} {split} images{of_task} for {REPORT}", err=True)
    try:
        evaluated = report_run(
            folder,
            backbone,
            datasets,
            result,
            parents=parents,
            branches=branches,
            options=options,
            command=typed_command(),
        )
    except VitMemoryError as error:
        typer.echo(f"{folder / REPORT}: not written. {error}", err=True)
        return
    for name, one in evaluated.items():
        of_task = f"{name}, " if len(datasets) > 1 else ""
        typer.echo(f"{folder / REPORT}: {of_task}{splits[name]} {one.scores.headline}, {one.scores.images} images")


def _plan(run: RunOptions, grid: GridOptions, branch: BranchOptions, recipe: RecipeOptions) -> "TrainingPlan":
    from vit_memory.files.branchfile import load_branch
    from vit_memory.files.collect import collect
    from vit_memory.files.taskfile import load_task
    from vit_memory.training.runs import TrainingPlan

    files, task_grid = run.extends or [], grid.build(branch.build())
    parents = collect([*files, *([branch.branch] if files and branch.branch is not None else [])])
    return TrainingPlan(
        run.task_name,
        task_grid,
        recipe.build(task_grid),
        parents=tuple(parents.tasks),
        extends=tuple(load_task(path).name for path in files),
        branch=None if branch.branch is None else load_branch(branch.branch),
        parent_branches=tuple(parents.branches),
        per_class=run.per_class,
    )


def show_and_check(dataset: "Dataset", source: str, on_bad_image: OnBadImage) -> None:
    """Print a summary of the data; raise DataError for bad images unless they are left out."""
    from vit_memory.errors import DataError

    summary = summarise_images(dataset)
    typer.echo(page(summary) + "\n", err=True)
    if summary.bad and on_bad_image == "fail":
        bad, reason = next(iter(summary.bad.items()))
        raise DataError(
            f"{source}: {len(summary.bad)} images cannot be used; the first, {bad}: {reason}. "
            f"Repair or remove them, or leave them out: --on-bad-image skip"
        )


def backbone_dtype(precision: PrecisionOrAuto, device: str) -> "torch.dtype":
    """Half precision only if the hardware supports it; elsewhere it can be much slower than float32."""
    import torch

    name = precision
    if precision == "auto":
        name = "bfloat16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype
