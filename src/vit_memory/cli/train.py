"""vit-memory train: a task from a folder of images."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vit_memory.cli.data import DataDir, Download, ImageColumn, LabelColumn, Source, looked_at, page

if TYPE_CHECKING:
    from vit_memory.training.loop import FitResult, Progress


def _listed(read: Callable[[str], Any], expected: str) -> Callable[[str], str]:
    """A parser that refuses a comma-separated list of the wrong kind, at the command line."""

    def check(text: str) -> str:
        try:
            [read(part) for part in text.split(",")]
        except ValueError:
            raise typer.BadParameter(f"{text!r}: expected {expected}, separated by commas.") from None
        return text

    return check


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
    regime: Annotated[str, typer.Option(help="head, class or memory, or several, separated by commas.")] = "memory",
    memory: Annotated[str, typer.Option(help="Memory cells per block: 5, or several: 0,1,5.", callback=Counts)] = "5",
    lr: Annotated[str, typer.Option(help="Learning rate, several, or auto: a few are trained at once.")] = "auto",
    weight_decay: Annotated[str, typer.Option(help="Weight decay, or several.", callback=Numbers)] = "0",
    start: Annotated[str, typer.Option(help="Class token from: original, normal, or both.")] = "original",
    seeds: Annotated[str, typer.Option(help="Seeds of what tasks start from: 0, or several.", callback=Counts)] = "0",
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 300,
    batch: Annotated[int, typer.Option(min=1, help="Images per step.")] = 64,
    optimiser: Annotated[str, typer.Option(help="sgd or adamw.")] = "sgd",
    augment: Annotated[str, typer.Option(help="inception, pad-crop or none.")] = "inception",
    flip: Annotated[bool, typer.Option(help="Mirror half of the views; not for digits or letters.")] = True,
    label_smoothing: Annotated[float, typer.Option(min=0, max=0.99)] = 0.0,
    image_size: Annotated[int | None, typer.Option(min=1, help="Another size than the backbone's own.")] = None,
    per_class: Annotated[int | None, typer.Option(min=1, help="At most so many training images of a class.")] = None,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between looks at the validation images.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of splits, order and augmentation.")] = 0,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that load images.  [default: cores]")] = None,
    on_bad_image: Annotated[str, typer.Option(help="fail or skip.")] = "fail",
    device: Annotated[str, typer.Option(help="cpu, cuda, mps.")] = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    data_dir: DataDir = None,
    download: Download = False,
    image_column: ImageColumn = None,
    label_column: LabelColumn = "label",
) -> None:
    """Train a task on DATA and write it, with its log and checkpoint, to a folder.

    Every combination of --regime, --memory, --lr, --weight-decay, --start and --seeds is trained at once, for little
    more than the price of one; the best by validation accuracy becomes the task file.
    """
    for option, value, allowed in (
        ("--regime", regime, ("head", "class", "memory")),
        ("--start", start, ("original", "normal")),
        ("--optimiser", optimiser, ("sgd", "adamw")),
        ("--augment", augment, ("inception", "pad-crop", "none")),
        ("--on-bad-image", on_bad_image, ("fail", "skip")),
    ):
        wrong = [word for word in value.split(",") if word not in allowed]
        if wrong:
            raise typer.BadParameter(f"{', '.join(wrong)}: expected {', '.join(allowed)}.", param_hint=option)

    from vit_memory.backbone import load_backbone
    from vit_memory.data.loading import default_workers
    from vit_memory.data.sources import open_data
    from vit_memory.errors import DataError
    from vit_memory.files.bundle import read_with_parents
    from vit_memory.files.taskfile import read_task
    from vit_memory.task import check_name
    from vit_memory.training.recipe import AUTO_RATES, Recipe
    from vit_memory.training.runs import Grid, train_run

    check_name(name)
    rates = AUTO_RATES[optimiser] if lr == "auto" else tuple(map(float, Numbers(lr).split(",")))
    recipe = Recipe(
        steps=steps,
        batch=batch,
        optimiser=optimiser,  # type: ignore[arg-type]
        learning_rates=rates,
        weight_decays=tuple(map(float, weight_decay.split(","))),
        label_smoothing=label_smoothing,
        augment=augment,  # type: ignore[arg-type]
        flip=flip,
        evaluate_every=evaluate_every,
        seed=seed,
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
        label_column=label_column,
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
    loaded = load_backbone(backbone, device=device)
    folder = out or Path("runs") / name
    paths = extends or []
    show = _Meter()
    result = train_run(
        folder,
        loaded,
        dataset,
        name,
        grid,
        recipe,
        parents=read_with_parents(paths),
        direct_parents=[read_task(path).name for path in paths],
        image_size=image_size,
        per_class=per_class,
        workers=default_workers() if workers is None else workers,
        on_bad_image=on_bad_image,  # type: ignore[arg-type]
        resume=resume,
        report=show,
    )
    typer.echo(table(result))
    file = folder / f"{name}.safetensors"
    typer.echo(f"\n{file}: {result.best.setting.name}, {file.stat().st_size / 1000:.0f} kB")


def table(result: "FitResult") -> str:
    """Every setting, best first."""
    lines = [f"{'setting':44} {'numbers':>9} {'validation':>11}"]
    for r in sorted(result.settings, key=lambda r: -1.0 if r.accuracy is None else r.accuracy, reverse=True):
        said = f"diverged at {r.stopped_at}" if r.accuracy is None else f"{100 * r.accuracy:.1f} %"
        lines.append(f"{r.setting.name:44} {r.task.parameters:9} {said:>11}")
    return "\n".join(lines)


class _Meter:
    """One line per look at the validation images, with the rate and what is left."""

    def __init__(self) -> None:
        self.began: tuple[float, int] | None = None

    def __call__(self, progress: "Progress") -> None:
        now = time.perf_counter()
        best = max((a for a in progress.accuracies or () if a == a), default=float("nan"))  # noqa: PLR0124 - NaN
        left = ""
        if self.began is not None and progress.step > self.began[1]:
            each = (now - self.began[0]) / (progress.step - self.began[1])
            left = f"  {1 / each:.1f} steps/s, {each * (progress.steps - progress.step):.0f} s left"
        else:
            self.began = (now, progress.step)
        sys.stderr.write(f"step {progress.step:5} of {progress.steps}  best validation {100 * best:5.1f} %{left}\n")
