"""vit-memory evaluate and predict: what trained tasks say, and how often they are right."""

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vit_memory.cli.data import (
    SHOWN_CLASSES,
    DataDir,
    Download,
    ImageColumn,
    KindOption,
    LabelColumn,
    Seed,
    TaskKind,
    column_names,
)
from vit_memory.cli.progress import show_log, typed_command
from vit_memory.cli.tasks import Rename, parse_rename

if TYPE_CHECKING:
    from vit_memory.data.sources import Dataset
    from vit_memory.evaluation.answering import Answered, Evaluated, Model
    from vit_memory.evaluation.metrics import AnyScores, MultiLabelScores, RegressionScores, Scores
    from vit_memory.task import Task

Sources = Annotated[list[Path], typer.Argument(metavar="TASK|BUNDLE…", help="Task files or bundle folders.")]
BackboneOption = Annotated[str | None, typer.Option(help="Another source for the backbone than the tasks name.")]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="Only this task; may be given again.")]
Batch = Annotated[int, typer.Option(min=1, help="Images per pass.")]
Workers = Annotated[int | None, typer.Option(min=0, help="Processes that load images.  [default: cores]")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads that compute.  [default: cores]")]
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
    threads: Threads = None,
    on_bad_image: Annotated[str, typer.Option(help="fail or skip.")] = "fail",
    seed: Seed = 0,
    data_dir: DataDir = None,
    download: Download = False,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    kind: KindOption = TaskKind.auto,
    as_json: Annotated[bool, typer.Option("--json", help="All numbers as JSON, confusion matrices included.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="PAGE.html", help="Also write a page: charts, mistakes, example pictures.")
    ] = None,
) -> None:
    """Score tasks on labelled images, all of them in one pass.

    Single-label: accuracy with its interval, per class, calibration. Multi-label: mAP, F1, precision and recall.
    Regression: MAE, RMSE and R². The columns and the kind are those the task was trained with, unless told otherwise.
    """
    if on_bad_image not in ("fail", "skip"):
        raise typer.BadParameter(f"{on_bad_image}: expected fail, skip.", param_hint="--on-bad-image")
    from vit_memory.data.loading import BadImages, default_workers
    from vit_memory.data.sources import open_data
    from vit_memory.errors import DataError
    from vit_memory.evaluation.answering import evaluate as run
    from vit_memory.evaluation.answering import open_model, why_not_scored
    from vit_memory.parallel import limit_threads

    _check_writable(report)
    show_log()
    limit_threads(threads)
    model = open_model(sources, backbone, device, parse_rename(rename))
    chosen = [model.tasks[name] for name in task or model.tasks]
    open_for = partial(open_data, data, data_dir=data_dir, download=download, image_column=image_column, seed=seed)
    score = partial(
        run,
        model,
        batch=batch,
        workers=default_workers() if workers is None else workers,
        threads=threads,
        on_bad_image=on_bad_image,  # type: ignore[arg-type]
    )
    apart = kind is TaskKind.auto and label_column is None  # every task with the columns it was trained on
    sections: list[str] = []
    results: dict[str, Any] = {}
    skipped = BadImages()
    scored: list[tuple[Dataset, dict[str, Evaluated]]] = []
    reasons: dict[str, str] = {}  # why tasks of a bundle are not scored, by name
    for group in _by_columns(chosen) if apart else [chosen]:
        kinds = {one.kind for one in group}
        try:
            dataset = open_for(
                label_column=column_names(label_column, _columns(group[0]) if apart else ("label",)),
                kind=kinds.pop() if kind is TaskKind.auto and len(kinds) == 1 else kind.value,
                labels=group[0].labels if len(group) == 1 and group[0].kind == "multi-label" else None,
            )
        except DataError as error:
            reasons |= dict.fromkeys([one.name for one in group], f"{error}{_other_columns(group, apart)}")
            continue
        if split not in dataset.splits:
            raise typer.BadParameter(f"{split}: {data} has {', '.join(dataset.splits)}.", param_hint="--split")
        found = {one.name: why_not_scored(one, dataset.splits[split], dataset.labels) for one in group}
        reasons |= {name: reason for name, reason in found.items() if reason}
        names = [name for name, reason in found.items() if not reason]
        if not names or (task and reasons):
            continue
        bad = BadImages()
        evaluated = score(dataset.splits[split], dataset.labels, names, bad=bad)
        scored.append((dataset, evaluated))
        skipped.reasons.update(bad.reasons)
        results |= {name: one.scores.as_json() for name, one in evaluated.items()}
        left_out = f", {len(bad)} bad ones left out" if bad else ""
        sections.append(f"{data}, {split}: {len(dataset.splits[split]) - len(bad)} images{left_out}")
        sections += [page(name, one.scores) for name, one in evaluated.items()]
    if reasons and (task or not results):  # a bundle may hold tasks that these images say nothing of, not all of them
        raise DataError("\n".join(dict.fromkeys(reasons.values())))
    for name, reason in reasons.items():
        typer.echo(f"not scored: {name}. {reason}", err=True)
    if report is not None:
        _write_report(report, model, scored, split, skipped.reasons)
    typer.echo(_record(data, split, skipped.reasons, results) if as_json else "\n\n".join(sections))


def _record(data: str, split: str, skipped: Mapping[str, str], results: Mapping[str, Any]) -> str:
    """All numbers as JSON."""
    bad_images = [{"image": name, "reason": reason} for name, reason in skipped.items()]
    record = {"data": data, "split": split, "skipped": bad_images, "tasks": results}
    return json.dumps(record, indent=2, ensure_ascii=False)


def _check_writable(report: Path | None) -> None:
    """Refuse a page that cannot be written before the images are scored."""
    from vit_memory.report.page import check_writable

    if report is not None:
        check_writable(report)


def _write_report(
    path: Path,
    model: "Model",
    scored: "list[tuple[Dataset, dict[str, Evaluated]]]",
    split: str,
    bad_images: "Mapping[str, str]",
) -> None:
    from vit_memory.report.page import About, ScoredSplit, write_report

    data = scored[0][0].source
    notes = {
        "test": f"Scored on the test split of {data} ({scored[0][0].origin[split]}).",
        "validation": "These are validation images. If they also chose the setting of a task, expect somewhat lower "
        "figures on new images.",
        "train": "These are training images. A task that was trained on them does less well on new images.",
    }
    about = About(data, split, notes[split], split == "test", typed_command(), bad_images)
    write_report(path, model, [ScoredSplit(dataset.splits[split], tasks) for dataset, tasks in scored], about)
    typer.echo(f"{path}: written", err=True)


def _columns(task: "Task") -> tuple[str, ...]:
    """The label columns that a task was trained with."""
    return tuple(task.record.recipe.get("data", {}).get("columns", ("label",)))


def _by_columns(tasks: "Sequence[Task]") -> "list[list[Task]]":
    """Tasks that the same columns of a table can be the truth for, together."""
    groups: dict[tuple[str, tuple[str, ...]], list[Task]] = {}
    for task in tasks:
        groups.setdefault((task.kind, _columns(task)), []).append(task)
    return list(groups.values())


def _other_columns(tasks: "Sequence[Task]", apart: bool) -> str:
    """What to do where the columns that tasks were trained with are not those of the images."""
    columns = ", ".join(_columns(tasks[0]))
    if not apart or columns == "label":
        return ""
    names = ", ".join(task.name for task in tasks)
    return f" {names} was trained with {columns}; name other columns, or some of these, with --label-column."


def page(name: str, found: "AnyScores") -> str:
    """One task's scores for a person to read."""
    from vit_memory.evaluation.metrics import MultiLabelScores, RegressionScores

    if isinstance(found, MultiLabelScores):
        return _labels_page(name, found)
    if isinstance(found, RegressionScores):
        return _values_page(name, found)
    return _classes_page(name, found)


def _classes_page(name: str, found: "Scores") -> str:
    low, high = (100 * end for end in found.interval)
    lines = [f"{name}: accuracy {100 * found.top1:.1f} % (95 % interval {low:.1f} to {high:.1f})"]
    if found.top5 is not None:
        lines.append(f"  top-5 accuracy         {100 * found.top5:.1f} %")
    lines.append(f"  balanced accuracy      {100 * found.balanced_accuracy:.1f} %")
    lines.append(f"  macro F1               {found.macro_f1:.3f}")
    lines.append(f"  calibration error      {100 * found.calibration_error:.1f} points")
    hardest = sorted(
        ((row["recall"], label) for label, row in found.per_class().items() if row["recall"] is not None),
    )[:3]
    lines.append(
        "  lowest recall          " + ", ".join(f"{label} ({100 * recall:.0f} %)" for recall, label in hardest)
    )
    confused = ", ".join(f"{shown} as {answered} ({times})" for shown, answered, times in found.mistakes(3))
    if confused:
        lines.append(f"  most confused          {confused}")
    return "\n".join(lines)


def _labels_page(name: str, found: "MultiLabelScores") -> str:
    low, high = found.interval
    lines = [f"{name}: mAP {found.mean_average_precision:.3f} (95 % interval {low:.3f} to {high:.3f})"]
    lines.append(f"  F1, over all labels    {found.micro_f1:.3f}")
    lines.append(f"  F1, mean over labels   {found.macro_f1:.3f}")
    if found.subset_accuracy is not None:
        lines.append(f"  every label right      {100 * found.subset_accuracy:.1f} % of the images")
    columns = ("images", "average_precision", "precision", "recall", "f1")
    lines.append(
        "  " + "label".ljust(28) + "".join(f"{title:>10}" for title in ("images", "AP", "precision", "recall", "F1"))
    )
    known = sorted(found.per_label.items(), key=lambda item: -item[1].images)
    for label, one in known[:SHOWN_CLASSES]:
        cells = [getattr(one, column) for column in columns]
        text = "".join(
            f"{'-' if cell is None else format(cell, 'd' if isinstance(cell, int) else '.3f'):>10}" for cell in cells
        )
        lines.append(f"  {label[:27]:28}{text}")
    if len(known) > SHOWN_CLASSES:
        lines.append(f"  … and {len(known) - SHOWN_CLASSES} more (--json lists all)")
    return "\n".join(lines)


def _values_page(name: str, found: "RegressionScores") -> str:
    lines = [f"{name}: R² {found.r2:.3f}"]
    for label, one in found.per_value.items():
        figures = (
            ("R²", one.r2, one.r2_interval),
            ("MAE", one.mae, one.mae_interval),
            ("RMSE", one.rmse, one.rmse_interval),
        )
        lines.append(f"  {label}, {one.images} images")
        lines += [
            f"    {title:6}{value:10.4g}  (95 % interval {low:.4g} to {high:.4g})"
            for title, value, (low, high) in figures
        ]
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
    threads: Threads = None,
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
    from vit_memory.parallel import limit_threads

    limit_threads(threads)
    model = open_model(sources, backbone, device, parse_rename(rename))
    names = task or list(model.tasks)
    workers = default_workers() if workers is None else workers
    one = len(images) == 1 and images[0].is_file()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    tasks = [model.tasks[name] for name in names]
    if form == "csv":
        writer.writerow(["image", *(title for one in tasks for title in _csv_titles(one)), "error"])
    good = False
    found = run(model, image_files(images), names, batch=batch, workers=0 if one else workers, threads=threads)
    for answered in found:
        good |= answered.error is None
        if form == "csv":
            cells = [cell for one in tasks for cell in _csv_cells(one, answered)]
            writer.writerow([answered.path, *cells, answered.error or ""])
        else:
            typer.echo(_json_line(answered) if form == "jsonl" else _text_line(answered))
    if not good:
        raise typer.Exit(1)


def _csv_titles(task: "Task") -> list[str]:
    if task.kind == "regression":
        return [f"{task.name} {label}" for label in task.labels]
    return [task.name, f"{task.name} {'confidence' if task.kind == 'single-label' else 'probabilities'}"]


def _csv_cells(task: "Task", answered: "Answered") -> list[str]:
    """A label and its confidence; the labels present and their probabilities, separated by semicolons; or values."""
    prediction = answered.answers.get(task.name)
    if prediction is None:
        return [""] * len(_csv_titles(task))
    values = prediction.as_json()
    if "values" in values:
        return [f"{value:.7g}" for value in values["values"].values()]
    if "labels" in values:
        present = values["labels"]
        return [";".join(p["label"] for p in present), ";".join(f"{p['probability']:.4f}" for p in present)]
    return [values["label"], f"{values['confidence']:.4f}"]


def _json_line(answered: "Answered") -> str:
    said = {name: prediction.as_json() for name, prediction in answered.answers.items()}
    told = {"image": answered.path, "tasks": said} | ({"error": answered.error} if answered.error else {})
    return json.dumps(told, ensure_ascii=False)


def _text_line(answered: "Answered") -> str:
    if answered.error:
        return f"{answered.path}  error: {answered.error}"
    said = "  ".join(f"{name}: {prediction.text()}" for name, prediction in answered.answers.items())
    return f"{answered.path}  {said}"
