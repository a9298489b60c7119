"""report_run: the report of a training, written into its folder; of a branch and its tasks as well as of one task."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vit_memory.backbone import Backbone
from vit_memory.branch import Branch
from vit_memory.data.loading import BadImages
from vit_memory.data.sources import Dataset
from vit_memory.evaluation.inference import Evaluated, evaluate
from vit_memory.evaluation.models import Model
from vit_memory.model import MemoryViT
from vit_memory.regimes import COMPOSABLE
from vit_memory.report.page import About, ScoredSplit, write_report
from vit_memory.report.training import TrainingResult
from vit_memory.standalone import StandaloneModel
from vit_memory.task import Task
from vit_memory.training.curves import read_curves
from vit_memory.training.options import TrainingOptions
from vit_memory.training.results import FitResult

REPORT = "report.html"


def report_split(dataset: Dataset) -> str:
    """The split that a run is reported on: test if there is one, else validation."""
    return "test" if dataset.test is not None and len(dataset.test) else "validation"


def report_run(
    folder: Path,
    backbone: Backbone,
    datasets: Mapping[str, Dataset],
    result: FitResult,
    *,
    parents: Sequence[Task] = (),
    branches: Sequence[Branch] = (),
    options: TrainingOptions | None = None,
    command: str | None = None,
) -> dict[str, Evaluated]:
    """Score the best task, or tasks, of a training and write report.html into its folder; returns them with scores.

    `datasets` are those that the tasks were trained on, by the names of the tasks. `branches` are the frozen ones; one
    that was trained is in the result.
    """
    model = _model(backbone, result, parents, branches)
    options = options or TrainingOptions()
    bad = BadImages(dict(result.bad_images.reasons))
    scored = []
    for name, dataset in datasets.items():
        split = report_split(dataset)
        evaluated = evaluate(
            model,
            dataset.splits[split],
            dataset.labels,
            [name],
            workers=options.workers,
            threads=options.threads,
            skipped=bad if options.on_bad_image == "skip" else None,
        )
        about = About(dataset.source, split, _note(dataset, split), split == "test")
        scored.append(ScoredSplit(dataset.splits[split], evaluated, about))
    training = TrainingResult(result, read_curves(folder / "log.jsonl", result))
    write_report(folder / REPORT, model, scored, training, command=command, bad_images=bad.reasons)
    return {name: evaluated for one in scored for name, evaluated in one.tasks.items()}


def _model(backbone: Backbone, result: FitResult, parents: Sequence[Task], branches: Sequence[Branch]) -> Model:
    best = result.best
    if best.task.regime in COMPOSABLE:
        return MemoryViT(backbone, [*parents, *best.tasks], branches if best.branch is None else [best.branch])
    return StandaloneModel(best.backbone or backbone, best.task)


def _note(dataset: Dataset, name: str) -> str:
    images, origin = len(dataset.splits[name]), dataset.origin[name]
    if name == "test":
        return (
            f"Scored on the test split ({images} images; {origin}). These images took no part in training or in the "
            f"choice of the setting."
        )
    chosen = "the setting and the thresholds" if dataset.kind == "multi-label" else "the setting"
    return (
        f"There is no test split, so these figures are of the validation split ({images} images; {origin}). The same "
        f"images also chose {chosen}: expect somewhat lower figures on new images."
    )
