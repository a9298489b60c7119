"""vit-memory evaluate and predict: what trained tasks say, and how often they are right."""

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit_memory.cli.data import DataDir, Download, ImageColumn, LabelColumn, Seed
from vit_memory.cli.tasks import Rename, parse_rename

if TYPE_CHECKING:
    from vit_memory.evaluation.answering import Answered
    from vit_memory.evaluation.metrics import Scores

Sources = Annotated[list[Path], typer.Argument(metavar="TASK|BUNDLE…", help="Task files or bundle folders.")]
BackboneOption = Annotated[str | None, typer.Option(help="Another source for the backbone than the tasks name.")]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="Only this task; may be given again.")]
Batch = Annotated[int, typer.Option(min=1, help="Images per pass.")]
Workers = Annotated[int | None, typer.Option(min=0, help="Processes that load images.  [default: cores]")]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps.")]


def evaluate(
    sources: Sources,
    data: Annotated[str, typer.Option(help="Labelled images: DATA as in vit-memory data.", show_default=False)],
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    backbone: BackboneOption = None,
    task: Tasks = None,
    rename: Rename = None,
    batch: Batch = 64,
    workers: Workers = None,
    device: Device = "cpu",
    seed: Seed = 0,
    data_dir: DataDir = None,
    download: Download = False,
    image_column: ImageColumn = None,
    label_column: LabelColumn = "label",
    as_json: Annotated[bool, typer.Option("--json", help="All numbers as JSON, confusion matrices included.")] = False,
) -> None:
    """Score tasks on labelled images, all of them in one pass: top-1 with its interval, per class, calibration."""
    from vit_memory.data.loading import default_workers
    from vit_memory.data.sources import open_data
    from vit_memory.evaluation.answering import evaluate as run
    from vit_memory.evaluation.answering import open_model

    dataset = open_data(
        data,
        data_dir=data_dir,
        download=download,
        image_column=image_column,
        label_column=label_column,
        seed=seed,
    )
    if split not in dataset.splits:
        raise typer.BadParameter(f"{split}: {data} has {', '.join(dataset.splits)}.", param_hint="--split")
    model = open_model(sources, backbone, device, parse_rename(rename))
    names = task or [name for name in model.tasks if set(model.tasks[name].labels) == set(dataset.labels)]
    scores = run(
        model,
        dataset.splits[split],
        dataset.labels,
        names or list(model.tasks),
        batch=batch,
        workers=default_workers() if workers is None else workers,
    )
    if as_json:
        told = {"data": data, "split": split, "tasks": {name: found.as_json() for name, found in scores.items()}}
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
        return
    typer.echo(f"{data}, {split}: {len(dataset.splits[split])} images\n")
    typer.echo("\n\n".join(page(name, found) for name, found in scores.items()))


def page(name: str, found: "Scores") -> str:
    """One task's scores for a person to read."""
    low, high = (100 * end for end in found.interval)
    lines = [f"{name}: {100 * found.top1:.1f} % right (95 % interval {low:.1f} to {high:.1f})"]
    if found.top5 is not None:
        lines.append(f"  among the first five   {100 * found.top5:.1f} %")
    lines.append(f"  calibration error      {100 * found.calibration_error:.1f} points")
    hardest = sorted(
        ((row["recall"], label) for label, row in found.per_class().items() if row["recall"] is not None),
    )[:3]
    lines.append(
        "  hardest                " + ", ".join(f"{label} ({100 * recall:.0f} %)" for recall, label in hardest)
    )
    taken = ", ".join(f"{shown} for {said} ({times})" for shown, said, times in found.mistakes(3))
    if taken:
        lines.append(f"  taken for another      {taken}")
    return "\n".join(lines)


def predict(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE|FOLDER…", help="Images, or folders of any size.")],
    sources: Annotated[list[Path], typer.Option("--bundle", help="Bundle folder or task file; may be given again.")],
    backbone: BackboneOption = None,
    task: Tasks = None,
    rename: Rename = None,
    form: Annotated[str, typer.Option("--format", help="table, csv or jsonl.")] = "table",
    batch: Batch = 64,
    workers: Workers = None,
    device: Device = "cpu",
) -> None:
    """Print what every task says of every image, as it goes; a bad image gets its reason. Exit 1 if all are bad."""
    if form not in ("table", "csv", "jsonl"):
        raise typer.BadParameter(f"{form}: expected table, csv, jsonl.", param_hint="--format")
    missing = [str(path) for path in images if not path.exists()]
    if missing:
        raise typer.BadParameter(f"{', '.join(missing)}: no such file or folder.")
    from vit_memory.data.loading import default_workers
    from vit_memory.evaluation.answering import image_files, open_model
    from vit_memory.evaluation.answering import predict as run

    model = open_model(sources, backbone, device, parse_rename(rename))
    names = task or list(model.tasks)
    workers = default_workers() if workers is None else workers
    one = len(images) == 1 and images[0].is_file()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if form == "csv":
        writer.writerow(["image", *(f"{name}{end}" for name in names for end in ("", " confidence")), "error"])
    good = False
    for answered in run(model, image_files(images), names, batch=batch, workers=0 if one else workers):
        good |= answered.error is None
        if form == "csv":
            said = [answered.answers.get(name) for name in names]
            cells = [cell for a in said for cell in ((a.label, f"{a.confidence:.4f}") if a else ("", ""))]
            writer.writerow([answered.path, *cells, answered.error or ""])
        else:
            typer.echo(_json_line(answered) if form == "jsonl" else _text_line(answered))
    if not good:
        raise typer.Exit(1)


def _json_line(answered: "Answered") -> str:
    said = {name: {"label": a.label, "confidence": round(a.confidence, 6)} for name, a in answered.answers.items()}
    told = {"image": answered.path, "tasks": said} | ({"error": answered.error} if answered.error else {})
    return json.dumps(told, ensure_ascii=False)


def _text_line(answered: "Answered") -> str:
    if answered.error:
        return f"{answered.path}  error: {answered.error}"
    said = "  ".join(f"{name}: {a.label} ({100 * a.confidence:.0f} %)" for name, a in answered.answers.items())
    return f"{answered.path}  {said}"
