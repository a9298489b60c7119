"""vit-memory predict: print the predictions of trained tasks for images."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vit_memory.cli.models import ComputeOptions, ModelOptions
from vit_memory.cli.options import spread_options

if TYPE_CHECKING:
    from vit_memory.evaluation.inference import FilePrediction
    from vit_memory.task import Task


Format = Literal["table", "csv", "jsonl"]


@spread_options
def predict(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE|FOLDER", help="Images, or folders of any size.")],
    sources: Annotated[list[Path], typer.Option("--bundle", help="Bundle folder or task file; may be repeated.")],
    *,
    model: ModelOptions,
    output: Annotated[Format, typer.Option("--format", help="One line per image in this format.")] = "table",
    compute: ComputeOptions,
) -> None:
    """Print the predictions of tasks for images.

    Single-label tasks give a label and its probability, multi-label tasks the labels whose probability reaches their
    threshold, regression tasks values. A bad image gets the reason; exit 1 if all are bad.
    """
    missing = [str(path) for path in images if not path.exists()]
    if missing:
        raise typer.BadParameter(f"{', '.join(missing)}: no such file or folder.")
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
    if task.kind == "regression":
        return [f"{task.name} {label}" for label in task.labels]
    return [task.name, f"{task.name} {'confidence' if task.kind == 'single-label' else 'probabilities'}"]


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
