"""vit-memory train: a task from a folder of images."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vit_memory.cli.cache import read_size
from vit_memory.cli.data import (
    DataDir,
    Download,
    ImageColumn,
    KindOption,
    LabelColumn,
    Source,
    TaskKind,
    column_names,
    looked_at,
    page,
)
from vit_memory.cli.progress import Meter, score_text, show_log, stopping, typed_command

if TYPE_CHECKING:
    import torch

    from vit_memory.backbone import Backbone
    from vit_memory.data.sources import Dataset
    from vit_memory.task import Task
    from vit_memory.training.loop import FitResult


def _listed(read: Callable[[str], Any], expected: str) -> Callable[[str], str]:
    """A parser that refuses a comma-separated list of the wrong kind, at the command line."""

    def check(text: str) -> str:
        try:
            [read(part) for part in text.split(",")]
        except ValueError:
            raise typer.BadParameter(f"{text!r}: expected {expected}, separated by commas.") from None
        return text

    return check


REGIMES = ("head", "class", "memory", "memory-unmasked", "propagated", "additive", "full")
Numbers = _listed(float, "numbers")
Counts = _listed(int, "whole numbers")


def train(
    source: Source,
    name: Annotated[str, typer.Option(help="What the task is called.", show_default=False)],
    backbone: Annotated[str, typer.Option(help="bundled, a Hugging Face id or folder, or timm:<name>.")] = "bundled",
    out: Annotated[Path | None, typer.Option(help="Folder of the run.  [default: runs/NAME]")] = None,
    extends: Annotated[
        list[Path] | None, typer.Option(help="Task file that this one builds on; may be given again.", exists=True)
    ] = None,
    regime: Annotated[
        str,
        typer.Option(
            help="head, class or memory, or several, separated by commas; or one that stands alone: memory-unmasked, "
            "propagated, additive, full."
        ),
    ] = "memory",
    memory: Annotated[str, typer.Option(help="Memory cells per block: 5, or several: 0,1,5.", callback=Counts)] = "5",
    lr: Annotated[str, typer.Option(help="Learning rate, several, or auto: a few are trained at once.")] = "auto",
    weight_decay: Annotated[str, typer.Option(help="Weight decay, or several.", callback=Numbers)] = "0",
    start: Annotated[str, typer.Option(help="Class token from: original, normal, or both.")] = "original",
    seeds: Annotated[str, typer.Option(help="Seeds of what tasks start from: 0, or several.", callback=Counts)] = "0",
    recipe: Annotated[
        str, typer.Option(help="What the options below start from: default, or paper (20 000 steps of 512 new views).")
    ] = "default",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps.  [default: 300]")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images per step.  [default: 64]")] = None,
    optimiser: Annotated[str, typer.Option(help="sgd or adamw.")] = "sgd",
    augment: Annotated[str, typer.Option(help="inception, randaugment, pad-crop or none.")] = "inception",
    flip: Annotated[bool, typer.Option(help="Mirror half of the views; not for digits or letters.")] = True,
    label_smoothing: Annotated[float, typer.Option(min=0, max=0.99)] = 0.0,
    balance: Annotated[
        bool,
        typer.Option("--balance", help="Weigh rare classes and labels as much as frequent ones."),
    ] = False,
    views: Annotated[
        int | None, typer.Option(min=0, help="Fixed views of every image, in turn; 0: new ones always.  [default: 8]")
    ] = None,
    cache: Annotated[str, typer.Option(help="Keep what the backbone saw: auto, ram, disk or off.")] = "auto",
    cache_dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    cache_dir: Annotated[Path | None, typer.Option(help="Where --cache disk keeps it.  [default: user cache]")] = None,
    cache_limit: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=read_size,
            help="Most that all stores there may take, such as 20GB; those unused for longest go first.  "
            "[default: 50GB, or a quarter of a smaller disk]",
        ),
    ] = None,
    patience: Annotated[
        int | None, typer.Option(min=1, help="End after so many evaluations without a better validation score.")
    ] = None,
    image_size: Annotated[int | None, typer.Option(min=1, help="Another size than the backbone's own.")] = None,
    per_class: Annotated[
        int | None, typer.Option(min=1, help="At most so many training images of a class (single-label).")
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between evaluations on the validation images.  [default: 50]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of splits, order and augmentation.")] = 0,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that load images.  [default: cores]")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that compute.  [default: cores]")] = None,
    on_bad_image: Annotated[str, typer.Option(help="fail or skip.")] = "fail",
    device: Annotated[str, typer.Option(help="cpu, cuda, mps.")] = "cpu",
    precision: Annotated[
        str, typer.Option(help="What the backbone computes in: float32, bfloat16, float16, or auto.")
    ] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    data_dir: DataDir = None,
    download: Download = False,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    kind: KindOption = TaskKind.auto,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Score the task on the test images and write report.html.")
    ] = True,
) -> None:
    """Train a task on DATA and write it, with its log and checkpoint, to a folder.

    Every combination of --regime, --memory, --lr, --weight-decay, --start and --seeds is trained at once, for little
    more than the price of one; the best by validation score (accuracy, mAP or R²) becomes the task file.
    """
    for option, value, allowed in (
        ("--regime", regime, REGIMES),
        ("--start", start, ("original", "normal")),
        ("--optimiser", optimiser, ("sgd", "adamw")),
        ("--augment", augment, ("inception", "randaugment", "pad-crop", "none")),
        ("--recipe", recipe, ("default", "paper")),
        ("--on-bad-image", on_bad_image, ("fail", "skip")),
        ("--cache", cache, ("auto", "ram", "disk", "off")),
        ("--cache-dtype", cache_dtype, ("float16", "bfloat16", "float32")),
        ("--precision", precision, ("auto", "float32", "bfloat16", "float16")),
    ):
        wrong = [word for word in value.split(",") if word not in allowed]
        if wrong:
            raise typer.BadParameter(f"{', '.join(wrong)}: expected {', '.join(allowed)}.", param_hint=option)

    from vit_memory.backbone import load_backbone
    from vit_memory.data.loading import default_workers
    from vit_memory.data.sources import open_data
    from vit_memory.errors import DataError, TrainingStopped
    from vit_memory.files.collect import collect_tasks
    from vit_memory.files.taskfile import read_task
    from vit_memory.parallel import limit_threads
    from vit_memory.task import check_name
    from vit_memory.training.cache import Cache
    from vit_memory.training.crew import join_crew
    from vit_memory.training.recipe import AUTO_RATES, Recipe
    from vit_memory.training.runs import Grid, train_run

    check_name(name)
    show_log()
    limit_threads(threads)
    rates = AUTO_RATES[optimiser] if lr == "auto" else tuple(map(float, Numbers(lr).split(",")))
    given: dict[str, Any] = {"steps": steps, "batch": batch, "evaluate_every": evaluate_every}
    given = {option: value for option, value in given.items() if value is not None}
    if views is not None:
        given["views"] = views or None
    followed = replace(
        Recipe.paper() if recipe == "paper" else Recipe(),
        optimiser=optimiser,  # type: ignore[arg-type]
        learning_rates=rates,
        weight_decays=tuple(map(float, weight_decay.split(","))),
        label_smoothing=label_smoothing,
        balance=balance,
        augment=augment,  # type: ignore[arg-type]
        flip=flip,
        patience=patience,
        seed=seed,
        **given,
    )
    grid = Grid(
        regimes=tuple(regime.split(",")),  # type: ignore[arg-type]
        cells=tuple(map(int, memory.split(","))),
        starts=tuple(start.split(",")),  # type: ignore[arg-type]
        seeds=tuple(map(int, seeds.split(","))),
    )
    dataset = open_data(
        source,
        data_dir=data_dir,
        download=download,
        image_column=image_column,
        label_column=column_names(label_column),
        kind=kind.value,
        seed=seed,
    )
    summary = looked_at(dataset)
    typer.echo(page(summary) + "\n", err=True)
    if summary.bad and on_bad_image == "fail":
        bad, reason = next(iter(summary.bad.items()))
        raise DataError(
            f"{source}: {len(summary.bad)} images cannot be used; the first, {bad}: {reason}. "
            f"Mend or remove them, or leave them out: --on-bad-image skip"
        )
    crew = join_crew(device)
    loaded = load_backbone(backbone, device=crew.device(device), dtype=_dtype(precision, device))
    folder = out or Path("runs") / name
    paths = extends or []
    parents = [file.task for file in collect_tasks(paths)]
    with stopping() as stop:
        try:
            result = train_run(
                folder,
                loaded,
                dataset,
                name,
                grid,
                followed,
                parents=parents,
                direct_parents=[read_task(path).name for path in paths],
                image_size=image_size,
                per_class=per_class,
                cache=Cache(cache, cache_dtype, cache_dir, cache_limit),  # type: ignore[arg-type]
                workers=default_workers() if workers is None else workers,
                threads=threads,
                on_bad_image=on_bad_image,  # type: ignore[arg-type]
                resume=resume,
                report=Meter() if crew.first else None,
                stop=stop,
                crew=crew,
            )
        except TrainingStopped as stopped:
            again = "with --resume" if (folder / "checkpoint.safetensors").exists() else "again"
            if crew.first:
                typer.echo(f"{stopped} Go on with the same command {again}.", err=True)
            raise typer.Exit(130) from None
    if not crew.first:
        return
    _print_result(result, folder / f"{name}.safetensors")
    if report:
        _write_report(folder, loaded, dataset, result, parents, workers, threads, on_bad_image)


def _print_result(result: "FitResult", file: Path) -> None:
    typer.echo(table(result))
    typer.echo(f"\n{file}: {result.best.setting.name}, {file.stat().st_size / 1000:.0f} kB")


def _write_report(
    folder: Path,
    backbone: "Backbone",
    dataset: "Dataset",
    result: "FitResult",
    parents: "list[Task]",
    workers: int | None,
    threads: int | None,
    on_bad_image: str,
) -> None:
    """The task file is written by now: a report that fails is told, and the training has still succeeded."""
    from vit_memory.data.loading import default_workers
    from vit_memory.errors import VitMemoryError
    from vit_memory.report.page import headline_text
    from vit_memory.report.run import REPORT, report_run, report_split

    split = report_split(dataset)
    typer.echo(f"scoring {len(dataset.splits[split])} {split} images for {REPORT}", err=True)
    try:
        evaluated = report_run(
            folder,
            backbone,
            dataset,
            result,
            parents=parents,
            workers=default_workers() if workers is None else workers,
            threads=threads,
            on_bad_image=on_bad_image,  # type: ignore[arg-type]
            command=typed_command(),
        )
    except VitMemoryError as error:
        typer.echo(f"{folder / REPORT}: not written. {error}", err=True)
        return
    typer.echo(f"{folder / REPORT}: {split} {headline_text(evaluated.scores)}, {evaluated.scores.images} images")


def _dtype(precision: str, device: str) -> "torch.dtype | None":
    """Half precision where the hardware has it for certain; elsewhere it can be slower than float32 by far."""
    import torch

    if precision == "auto":
        precision = "bfloat16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "float32"
    dtype: torch.dtype = getattr(torch, precision)
    return dtype


def table(result: "FitResult") -> str:
    """Every setting, best first."""
    metric = f"validation {result.metric}"
    lines = [f"{'setting':44} {'parameters':>10} {metric:>22}"]
    for r in sorted(result.settings, key=lambda r: -math.inf if r.score is None else r.score, reverse=True):
        score = f"diverged at {r.stopped_at}" if r.score is None else score_text(result.metric, r.score)
        lines.append(f"{r.setting.name:44} {r.task.parameters:10} {score:>22}")
    return "\n".join(lines)
