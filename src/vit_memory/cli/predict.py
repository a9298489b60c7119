"""vit-memory predict: print the predictions of trained tasks for images."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vit_memory.cli.models import ComputeOptions, ModelOptions
from vit_memory.cli.options import spread_options
from vit_memory.cli.progress import ScoringProgress, show_log
from vit_memory.cli.ray import require_ray

if TYPE_CHECKING:
    from vit_memory.evaluation.inference import FilePrediction
    from vit_memory.task import Task


Format = Literal["table", "csv", "jsonl"]


@dataclass(frozen=True)
class ScoringOptions:
    """Large sets of images, with Ray."""

    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Spread the images over this machine, or over the cluster that RAY_ADDRESS names, into --out."
        ),
    ] = False
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER|ADDRESS", help="With --ray: a folder for Parquet files; a second start goes on."),
    ] = None
    part_size: Annotated[int, typer.Option(min=1, help="With --ray: images per Parquet file.")] = 512

    def check(self, output: str, images: Sequence[str]) -> None:
        """Raise BadParameter if the options do not go together, or Ray is missing."""
        if not self.ray:
            if self.out is not None:
                raise typer.BadParameter("--out is for --ray; without it, the answers are printed.")
            if addresses := [image for image in images if "://" in image]:
                raise typer.BadParameter(f"{addresses[0]}: an address is read with --ray only.")
            return
        if self.out is None:
            raise typer.BadParameter("--ray needs --out FOLDER, where it writes Parquet files.")
        if output != "table":
            raise typer.BadParameter("--format is for answers that are printed; --ray writes Parquet files.")
        require_ray()


@spread_options
def predict(
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE|FOLDER", help="Images, or folders of any size; with --ray also s3://… and such."),
    ],
    sources: Annotated[list[Path], typer.Option("--bundle", help="Bundle folder or task file; may be repeated.")],
    *,
    model: ModelOptions,
    output: Annotated[Format, typer.Option("--format", help="One line per image in this format.")] = "table",
    compute: ComputeOptions,
    scoring: ScoringOptions,
) -> None:
    """Print the predictions of tasks for images, or with --ray write them to Parquet files.

    Single-label tasks give a label and its probability, multi-label tasks the labels whose probability reaches their
    threshold, regression tasks values. A bad image gets the reason; exit 1 if all are bad.
    """
    scoring.check(output, images)
    missing = [image for image in images if "://" not in image and not Path(image).exists()]
    if missing:
        raise typer.BadParameter(f"{', '.join(missing)}: no such file or folder.")
    if scoring.ray:
        _predict_with_ray(images, sources, model, compute, scoring)
    else:
        _predict_here([Path(image) for image in images], sources, model, output, compute)


def _predict_here(
    images: Sequence[Path], sources: Sequence[Path], model: ModelOptions, output: Format, compute: ComputeOptions
) -> None:
    from vit_memory.evaluation import inference

    compute.limit_threads()
    opened = model.open(sources)
    tasks = [opened.tasks[name] for name in model.task or opened.tasks]
    if output == "csv":
        typer.echo(_csv_row(["image", *(title for task in tasks for title in _csv_titles(task)), "error"]))
    line = _line_writer(output, tasks)
    single_file = len(images) == 1 and images[0].is_file()
    count = good = 0
    for prediction in inference.predict(
        opened,
        inference.image_files(images),
        [task.name for task in tasks],
        batch=compute.images_per_pass,
        workers=0 if single_file else compute.loader_processes,
        threads=compute.threads,
    ):
        count += 1
        good += prediction.error is None
        typer.echo(line(prediction))
    if not count:
        typer.echo(f"no images in {', '.join(map(str, images))}.", err=True)
    if not good:
        raise typer.Exit(1)


def _predict_with_ray(
    images: Sequence[str],
    sources: Sequence[Path],
    model: ModelOptions,
    compute: ComputeOptions,
    scoring: ScoringOptions,
) -> None:
    from vit_memory.cli.tasks import parse_rename
    from vit_memory.serving.ray_data import ScoringJob, score

    assert scoring.out is not None
    job = ScoringJob(
        images=tuple(images),
        sources=tuple(sources),
        out=scoring.out,
        backbone=model.backbone,
        device=model.device,
        tasks=tuple(model.task or ()),
        rename=parse_rename(model.rename),
        batch=compute.images_per_pass,
        part_size=scoring.part_size,
        threads=compute.threads or 1,
        workers=compute.workers or 0,
    )
    show_log()
    with closing(ScoringProgress()) as show:
        for progress in score(job):
            show(progress)
    there = progress.total - progress.scored
    before = f", {there} of them before" if there else ""
    typer.echo(f"{scoring.out}: {progress.total} images{before}; {progress.bad} bad ones now")
    if progress.scored and progress.bad == progress.scored:
        raise typer.Exit(1)


def _line_writer(output: Format, tasks: "Sequence[Task]") -> "Callable[[FilePrediction], str]":
    if output == "csv":
        return partial(_csv_line, tasks)
    return _table_line if output == "table" else _json_line


def _table_line(prediction: "FilePrediction") -> str:
    if prediction.error:
        return f"{prediction.path}  error: {prediction.error}"
    return f"{prediction.path}  " + "  ".join(f"{name}: {one.text()}" for name, one in prediction.tasks.items())


def _json_line(prediction: "FilePrediction") -> str:
    tasks = {name: one.as_json() for name, one in prediction.tasks.items()}
    error = {"error": prediction.error} if prediction.error else {}
    return json.dumps({"image": prediction.path, "tasks": tasks, **error}, ensure_ascii=False)


def _csv_line(tasks: "Sequence[Task]", prediction: "FilePrediction") -> str:
    cells = [cell for task in tasks for cell in _csv_cells(task, prediction)]
    return _csv_row([prediction.path, *cells, prediction.error or ""])


def _csv_row(cells: Sequence[str]) -> str:
    row = io.StringIO()
    csv.writer(row, lineterminator="").writerow(cells)
    return row.getvalue()


def _csv_titles(task: "Task") -> list[str]:
    from vit_memory.predictions import column_names

    return column_names(task)


def _csv_cells(task: "Task", prediction: "FilePrediction") -> list[str]:
    """A label and its confidence; the labels present and their probabilities, separated by semicolons; or values."""
    if task.name not in prediction.tasks:
        return [""] * len(_csv_titles(task))
    values = prediction.tasks[task.name].as_json()
    if "not_a_number" in values:
        return ["nan"] * len(_csv_titles(task))
    if "values" in values:
        return [f"{value:.7g}" for value in values["values"].values()]
    if "labels" in values:
        present = values["labels"]
        return [";".join(p["label"] for p in present), ";".join(f"{p['probability']:.4f}" for p in present)]
    return [values["label"], f"{values['confidence']:.4f}"]
