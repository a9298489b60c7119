"""vit-memory train: train a task on a folder of images."""

import math
from typing import TYPE_CHECKING

import typer

from vit_memory.cli.data import Source, column_names, looked_at, page
from vit_memory.cli.options import spread_options
from vit_memory.cli.progress import Meter, score_text, show_log, stopping
from vit_memory.cli.train_options import (
    CacheOptions,
    DataOptions,
    GridOptions,
    MachineOptions,
    OnBadImage,
    Precision,
    RecipeOptions,
    RunOptions,
)

if TYPE_CHECKING:
    import torch

    from vit_memory.data.sources import Dataset
    from vit_memory.training.results import FitResult
    from vit_memory.training.runs import TrainingPlan


@spread_options
def train(
    source: Source,
    run: RunOptions,
    grid: GridOptions,
    recipe: RecipeOptions,
    cache: CacheOptions,
    machine: MachineOptions,
    data: DataOptions,
) -> None:
    """Train a task on DATA and write it, with its log and checkpoint, to a folder.

    Every combination of --regime, --memory, --start, --seeds, --lr and --weight-decay is trained at once, for little
    more than the cost of one; the best by validation score (accuracy, mAP or R²) becomes the task file.
    """
    from vit_memory.backbone import load_backbone
    from vit_memory.errors import TrainingStopped
    from vit_memory.parallel import limit_threads
    from vit_memory.task import check_name
    from vit_memory.training.callbacks import Callbacks
    from vit_memory.training.ranks import init_ranks
    from vit_memory.training.runs import train_run

    check_name(run.name)
    show_log()
    limit_threads(machine.threads)
    plan = _plan(run, grid, recipe, data)
    dataset = _open(source, data, recipe.seed)
    _show_and_check(dataset, source, machine.on_bad_image)
    ranks = init_ranks(machine.device)
    device = ranks.device(machine.device)
    backbone = load_backbone(run.backbone, device=device, dtype=_dtype(machine.precision, machine.device))
    options = machine.build(cache.build(), ranks, resume=run.resume)
    with stopping() as should_stop:
        callbacks = Callbacks(should_stop=should_stop)
        if ranks.is_main:
            callbacks = Callbacks(on_progress=Meter(), should_stop=should_stop)
        try:
            result = train_run(run.folder, backbone, dataset, plan, options, callbacks)
        except TrainingStopped as stopped:
            saved = (run.folder / "checkpoint.safetensors").exists()
            if ranks.is_main:
                how = "Resume with the same command and --resume." if saved else "Start again with the same command."
                typer.echo(f"{stopped} {how}", err=True)
            raise typer.Exit(130) from None
    if ranks.is_main:
        file = run.folder / f"{run.name}.safetensors"
        typer.echo(table(result))
        typer.echo(f"\n{file}: {result.best.setting.name}, {file.stat().st_size / 1000:.0f} kB")


def _plan(run: RunOptions, grid: GridOptions, recipe: RecipeOptions, data: DataOptions) -> "TrainingPlan":
    from vit_memory.files.collect import collect_tasks
    from vit_memory.files.taskfile import read_task
    from vit_memory.training.runs import TrainingPlan

    files = run.extends or []
    return TrainingPlan(
        run.name,
        grid.build(),
        recipe.build(),
        parents=tuple(file.task for file in collect_tasks(files)),
        extends=tuple(read_task(path).name for path in files),
        per_class=data.per_class,
    )


def _open(source: str, data: DataOptions, seed: int) -> "Dataset":
    from vit_memory.data.sources import open_data

    return open_data(
        source,
        data_dir=data.data_dir,
        download=data.download,
        image_column=data.image_column,
        label_column=column_names(data.label_column),
        kind=data.kind.value,
        seed=seed,
    )


def _show_and_check(dataset: "Dataset", source: str, on_bad_image: OnBadImage) -> None:
    """Print a summary of the data; raise DataError for bad images unless they are left out."""
    from vit_memory.errors import DataError

    summary = looked_at(dataset)
    typer.echo(page(summary) + "\n", err=True)
    if summary.bad and on_bad_image is OnBadImage.fail:
        bad, reason = next(iter(summary.bad.items()))
        raise DataError(
            f"{source}: {len(summary.bad)} images cannot be used; the first, {bad}: {reason}. "
            f"Repair or remove them, or leave them out: --on-bad-image skip"
        )


def _dtype(precision: Precision, device: str) -> "torch.dtype":
    """Half precision only if the hardware supports it; elsewhere it can be much slower than float32."""
    import torch

    name = precision.value
    if precision is Precision.auto:
        name = "bfloat16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def table(result: "FitResult") -> str:
    """Every setting, best first."""
    metric = f"validation {result.metric}"
    lines = [f"{'setting':44} {'parameters':>10} {metric:>22}"]
    for r in sorted(result.settings, key=lambda r: -math.inf if r.score is None else r.score, reverse=True):
        score = f"diverged at {r.stopped_at}" if r.score is None else score_text(result.metric, r.score)
        lines.append(f"{r.setting.name:44} {r.task.parameters:10} {score:>22}")
    return "\n".join(lines)
