"""vit-memory evaluate: score trained tasks on labelled images."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vit_memory.choices import SplitName
from vit_memory.cli.data import DataOptions, OnBadImageOption, Seed
from vit_memory.cli.models import ComputeOptions, ModelOptions
from vit_memory.cli.options import spread_options
from vit_memory.cli.options_2023 import DATASETS_2023, EvaluateOptions2023
from vit_memory.cli.progress import show_log, typed_command
from vit_memory.cli.score_pages import page

if TYPE_CHECKING:
    from vit_memory.data.sources import Dataset
    from vit_memory.evaluation.inference import Evaluated
    from vit_memory.evaluation.models import Model
    from vit_memory.task import Task


@dataclass(frozen=True)
class ScoredImages:
    """The images to score on."""

    data: Annotated[
        str | None,
        typer.Option(
            help="Labelled images: DATA as in vit-memory data.  [required, unless --models-list is given]",
            show_default=False,
        ),
    ] = None
    split: Annotated[SplitName, typer.Option(help="The images of DATA to score on.")] = "test"
    on_bad_image: OnBadImageOption = "fail"
    seed: Seed = 0


@spread_options
def evaluate(
    sources: Annotated[
        list[Path] | None, typer.Argument(metavar="TASK|BUNDLE", help="Task files or bundle folders.")
    ] = None,
    *,
    images: ScoredImages,
    data: DataOptions,
    model: ModelOptions,
    compute: ComputeOptions,
    as_json: Annotated[bool, typer.Option("--json", help="JSON with confusion matrices instead of text.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="PAGE.html", help="Also write a page: charts, mistakes, example pictures.")
    ] = None,
    as_2023: EvaluateOptions2023,
) -> None:
    """Score tasks on labelled images, all tasks in one pass.

    Single-label: accuracy with interval, precision and recall per class, calibration. Multi-label: mAP, F1, precision
    and recall. Regression: MAE, RMSE and R². By default every task is scored with the columns and the kind that it was
    trained with. Tasks whose labels the images do not have are left out, unless they are named with --task.
    """
    models = as_2023.models(sources or [])
    data, compute = as_2023.data_options(data), as_2023.compute_options(compute)
    if models:
        _check_with_models(models, images, model, report)
    elif not sources or images.data is None:
        raise typer.BadParameter("give the task files or bundles to score, and the images to score them on: --data.")
    if report is not None:
        _check_writable(report)
    show_log()
    compute.limit_threads()
    opened = model.open(list(models.values()) or sources or [])
    if models:
        jobs = [(DATASETS_2023[name], [opened.tasks[_task_name(file)]]) for name, file in models.items()]
    else:
        jobs = [(str(images.data), [opened.tasks[name] for name in model.task or opened.tasks])]
    as_2023.check_cells([task for _, tasks in jobs for task in tasks])
    named = bool(model.task or models)
    scored = [_Evaluation(opened, source, images, data, compute, named=named).run(tasks) for source, tasks in jobs]
    for results in scored:
        for name, reason in results.not_scored.items():
            typer.echo(f"not scored: {name}. {reason}", err=True)
    if report is not None:
        _write_report(report, opened, scored[0], images.split)
    if as_json:
        records = [results.as_json(source, images.split) for results, (source, _) in zip(scored, jobs, strict=True)]
        typer.echo(json.dumps(records if models else records[0], indent=2, ensure_ascii=False))
    else:
        typer.echo("\n\n".join(section for results in scored for section in results.sections))


def _check_with_models(
    models: Mapping[str, Path], images: ScoredImages, model: ModelOptions, report: Path | None
) -> None:
    """Refuse options that do not go with --models-list."""
    if images.data is not None:
        raise typer.BadParameter(
            f"--models-list scores every model on its own dataset. To score them on {images.data}: vit-memory evaluate "
            f"{' '.join(map(str, models.values()))} --data {images.data}"
        )
    if model.task or model.rename:
        raise typer.BadParameter("--models-list names the tasks already; leave --task and --rename out.")
    if report is not None and len(models) > 1:
        raise typer.BadParameter("--report is a page about one dataset; name one model at a time.")


def _task_name(file: Path) -> str:
    from vit_memory.files.taskfile import load_task

    return load_task(file).name


@dataclass(frozen=True, slots=True)
class _Results:
    """What was scored, and what was not."""

    sections: list[str] = field(default_factory=list)
    scores: dict[str, Any] = field(default_factory=dict)  # JSON values by task
    evaluated: list[tuple["Dataset", dict[str, "Evaluated"]]] = field(default_factory=list)  # for the report
    skipped: dict[str, str] = field(default_factory=dict)  # reasons by image
    not_scored: dict[str, str] = field(default_factory=dict)  # reasons by task

    def as_json(self, source: str, split: SplitName) -> dict[str, Any]:
        skipped = [{"image": name, "reason": reason} for name, reason in self.skipped.items()]
        return {"data": source, "split": split, "skipped": skipped, "tasks": self.scores}


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """Scores tasks in groups: one group per kind and label columns, as each needs the data opened in its own way."""

    model: "Model"
    source: str  # DATA
    images: ScoredImages
    data: DataOptions
    compute: ComputeOptions
    named: bool  # the user named the tasks, so each has to be scored

    def run(self, tasks: "Sequence[Task]") -> _Results:
        from vit_memory.errors import DataError

        results = _Results()
        for group in _by_columns(tasks) if self._own_columns else [tasks]:
            try:
                dataset = self._open(group)
            except DataError as error:
                reason = f"{error}{self._column_hint(group)}"
                results.not_scored.update(dict.fromkeys([task.name for task in group], reason))
            else:
                self._score(group, dataset, results)
        if results.not_scored and (self.named or not results.scores):
            raise DataError("\n".join(dict.fromkeys(results.not_scored.values())))
        return results

    @property
    def _own_columns(self) -> bool:
        """Whether every task is scored with the columns and the kind that it was trained with."""
        return self.data.kind == "auto" and self.data.label_column is None

    def _open(self, group: "Sequence[Task]") -> "Dataset":
        kinds = {task.kind for task in group}
        return self.data.open(
            self.source,
            self.images.seed,
            columns=_columns(group[0]) if self._own_columns else ("label",),
            kind=kinds.pop() if len(kinds) == 1 else "auto",
            labels=group[0].labels if len(group) == 1 and group[0].kind == "multi-label" else None,
        )

    def _score(self, group: "Sequence[Task]", dataset: "Dataset", results: _Results) -> None:
        from vit_memory.data.loading import BadImages
        from vit_memory.evaluation.inference import evaluate as score
        from vit_memory.evaluation.inference import why_not_scored

        name = self.images.split
        if name not in dataset.splits:
            raise typer.BadParameter(f"{name}: {self.source} has {', '.join(dataset.splits)}.", param_hint="--split")
        split = dataset.splits[name]
        reasons = {task.name: why_not_scored(task, split, dataset.labels) for task in group}
        results.not_scored.update({task: reason for task, reason in reasons.items() if reason})
        names = [task for task, reason in reasons.items() if not reason]
        if not names or (self.named and results.not_scored):
            return
        skipped = BadImages()
        evaluated = score(
            self.model,
            split,
            dataset.labels,
            names,
            batch=self.compute.images_per_pass,
            workers=self.compute.loader_processes,
            threads=self.compute.threads,
            skipped=skipped if self.images.on_bad_image == "skip" else None,
        )
        results.skipped.update(skipped.reasons)
        results.evaluated.append((dataset, evaluated))
        results.scores.update({task: one.scores.as_json() for task, one in evaluated.items()})
        bad = f", {len(skipped)} bad ones skipped" if skipped else ""
        results.sections.append(f"{self.source}, {name}: {len(split) - len(skipped)} images{bad}")
        results.sections.extend(page(task, one.scores) for task, one in evaluated.items())

    def _column_hint(self, tasks: "Sequence[Task]") -> str:
        """What to do if the data lack the columns that tasks were trained with."""
        columns = ", ".join(_columns(tasks[0]))
        if not self._own_columns or columns == "label":
            return ""
        names = ", ".join(task.name for task in tasks)
        return f" {names} was trained with {columns}; name other columns, or some of these, with --label-column."


def _check_writable(report: Path) -> None:
    """Refuse a page that cannot be written before the images are scored."""
    from vit_memory.report.frame import check_writable

    check_writable(report)


def _write_report(path: Path, model: "Model", results: _Results, split: str) -> None:
    from vit_memory.report.page import About, ScoredSplit, write_report

    dataset = results.evaluated[0][0]
    notes = {
        "test": f"Scored on the test split of {dataset.source} ({dataset.origin[split]}).",
        "validation": "These are validation images. If they also chose the setting of a task, expect somewhat lower "
        "figures on new images.",
        "train": "These are training images. A task that was trained on them does less well on new images.",
    }
    about = About(dataset.source, split, notes[split], split == "test")
    scored = [ScoredSplit(dataset.splits[split], tasks, about) for dataset, tasks in results.evaluated]
    write_report(path, model, scored, command=typed_command(), bad_images=results.skipped)
    typer.echo(f"{path}: written", err=True)


def _columns(task: "Task") -> tuple[str, ...]:
    """The label columns that a task was trained with."""
    return tuple(task.record.recipe.get("data", {}).get("columns", ("label",)))


def _by_columns(tasks: "Sequence[Task]") -> "list[list[Task]]":
    """Tasks of the same kind and label columns, together."""
    groups: dict[tuple[str, tuple[str, ...]], list[Task]] = {}
    for task in tasks:
        groups.setdefault((task.kind, _columns(task)), []).append(task)
    return list(groups.values())
