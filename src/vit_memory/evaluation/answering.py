"""Tasks over many images: all tasks in one pass per batch, from labelled splits or from files as they are found."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from vit_memory.backbone import Backbone, load_backbone
from vit_memory.data.decoding import EXTENSIONS
from vit_memory.data.images import ImageFiles
from vit_memory.data.loading import BadImages, Loader, OnBadImage, nothing_usable
from vit_memory.data.splits import Split
from vit_memory.data.transforms import Evaluation
from vit_memory.errors import BackboneMismatch, DataError, TaskError
from vit_memory.evaluation.metrics import AnyScores, score_task
from vit_memory.files.bundle import Bundle
from vit_memory.files.collect import collect_tasks
from vit_memory.files.container import read_container
from vit_memory.files.taskfile import backbone_file
from vit_memory.model import MemoryViT
from vit_memory.parallel import PieceThreads, pieces
from vit_memory.predictions import Prediction, predictions
from vit_memory.preprocessing import Preprocessing
from vit_memory.standalone import StandaloneModel
from vit_memory.task import COMPOSABLE, Task

_AT_ONCE = 512  # files whose names are held while a folder streams by


@dataclass(frozen=True, slots=True)
class Answered:
    """One file: what every task says, or why nothing can be said."""

    path: str
    answers: Mapping[str, Prediction]
    error: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """One task on the images of a split that could be used: its outputs, the targets and the scores."""

    task: Task
    outputs: Tensor  # (n, C) float32: logits, or values of a regression task
    targets: Tensor  # (n,) or (n, C), in the order of the task's labels
    indices: Tensor  # (n,) int64, the images' places in the split
    scores: AnyScores


Model = MemoryViT | StandaloneModel


def open_model(
    sources: Sequence[Path],
    backbone: str | None = None,
    device: str = "cpu",
    rename: Mapping[Path, str] | None = None,
) -> Model:
    """A model with the tasks of bundles and task files, on the backbone they name or the one given.

    `rename` gives the tasks of some of these files other names. A task that does not compose comes alone; one of the
    regime `full` brings its backbone in a file beside its own.
    """
    for path in sources:
        if not path.exists():
            raise TaskError(f"{path}: no such task file or bundle.")
    bundles = [Bundle.open(path) for path in sources if path.is_dir()]
    files = [path for path in sources if not path.is_dir()]
    collected = collect_tasks(files, bundles, rename=rename, option="--rename")
    tasks = [file.task for file in collected]
    if not tasks:
        raise TaskError(f"{', '.join(map(str, sources)) or 'nothing given'}: no tasks in it.")
    named = tasks[0].backbone.name
    loaded = load_backbone(backbone or named, device=device)
    loners = [file for file in collected if file.task.regime not in COMPOSABLE]
    if not loners:
        return MemoryViT(loaded, tasks)
    task = loners[0].task
    if len(tasks) > 1:
        raise TaskError(
            f"task {task.name!r} is of regime {task.regime!r} and cannot answer beside others; ask it alone."
        )
    return StandaloneModel(_tuned(loaded, task, loners[0].path) if task.regime == "full" else loaded, task)


def _tuned(backbone: Backbone, task: Task, path: Path) -> Backbone:
    """The backbone that was trained with a task, from the file beside the task's."""
    beside = backbone_file(path)
    if not beside.exists():
        raise TaskError(f"{path}: a task of regime 'full' answers with its own backbone; {beside} is missing.")
    _, weights = read_container(beside)
    try:
        backbone.model.load_state_dict(weights)
    except RuntimeError as error:
        raise BackboneMismatch(f"{beside}: these are not weights of {backbone.name} ({error}).") from error
    tuned = Backbone(backbone.model, backbone.family, backbone.name, backbone.preprocessing)
    if tuned.fingerprint != task.backbone.fingerprint:
        raise BackboneMismatch(f"{beside}: not the backbone that {path} was trained with.")
    return tuned


def preprocessing_of(model: Model, names: Iterable[str]) -> Preprocessing:
    """How these tasks want their images; one pass can serve only one way."""
    wanted = {name: model.tasks[name].record.preprocessing or model.backbone.preprocessing for name in names}
    if len(set(wanted.values())) > 1:
        said = "; ".join(f"{name}: {facts}" for name, facts in wanted.items())
        raise TaskError(f"these tasks were trained on differently prepared images; ask them apart. {said}")
    (facts,) = set(wanted.values())
    if facts is None:
        raise TaskError(f"neither tasks nor {model.backbone.name} say how images are prepared.")
    return facts


def evaluate(
    model: Model,
    split: Split,
    labels: Sequence[str],
    names: Sequence[str],
    *,
    batch: int = 64,
    workers: int = 0,
    threads: int | None = None,
    on_bad_image: OnBadImage = "fail",
    bad: BadImages | None = None,
) -> dict[str, Evaluated]:
    """Score tasks on a split whose targets mean `labels`; all of them in one pass per batch."""
    for name in names:
        if reason := why_not_scored(model.tasks[name], split, labels):
            raise DataError(reason)
    bad = BadImages() if bad is None else bad
    loader = Loader(split, Evaluation(preprocessing_of(model, names)), batch, workers, on_bad_image, bad)
    collected: dict[str, list[Tensor]] = {name: [] for name in names}
    targets, indices = [], []
    with PieceThreads(model.backbone.device, threads) as pool:
        for part in loader.batches():
            targets.append(part.targets)
            indices.append(part.indices)
            for name, outputs in _outputs(model, part.images, names, pool).items():
                collected[name].append(outputs)
    if not targets:
        raise nothing_usable("image", loader.bad.first)
    known = torch.cat(targets)
    if not bool(known.isfinite().any()):
        raise DataError(
            f"not one of {len(known)} images has a known {'value' if split.kind == 'regression' else 'label'}."
        )

    def evaluated(task: Task) -> Evaluated:
        outputs, wanted = torch.cat(collected[task.name]), _in_order_of(task, known, labels)
        return Evaluated(task, outputs, wanted, torch.cat(indices), score_task(task, outputs, wanted))

    return {name: evaluated(model.tasks[name]) for name in names}


@torch.no_grad()
def _outputs(model: Model, images: Tensor, names: Sequence[str], pool: PieceThreads) -> dict[str, Tensor]:
    """What the tasks answer to a batch, on the CPU; its pieces are computed by the threads of the pool."""
    device = model.backbone.device

    def answer(part: slice) -> dict[str, Tensor]:
        with torch.no_grad():
            outputs = model(images[part].to(device), list(names))
        return {name: outputs[name].float().cpu() for name in names}

    parts = pool.map(answer, list(pieces(len(images), pool.threads)))
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def why_not_scored(task: Task, split: Split, labels: Sequence[str]) -> str | None:
    """Why a task cannot be scored on a split whose targets mean `labels`; None if it can."""
    if task.kind != split.kind:
        return f"task {task.name!r} is {task.kind}, but the images are {split.kind}: --kind {task.kind}"
    unknown = sorted(set(labels) - set(task.labels))
    if not unknown:
        return None
    shown = ", ".join(unknown[:3]) + (" …" if len(unknown) > 3 else "")
    return (
        f"task {task.name!r} answers other labels than the images have: {len(unknown)} it does not know ({shown}). "
        f"It knows {', '.join(task.labels[:5])}{' …' if len(task.labels) > 5 else ''}."
    )


def _in_order_of(task: Task, targets: Tensor, labels: Sequence[str]) -> Tensor:
    """Targets in the order of the task's labels; labels that the images do not speak of are not known."""
    places = torch.tensor([task.labels.index(label) for label in labels])
    if task.kind == "single-label":
        return places[targets]
    table = torch.full((len(targets), len(task.labels)), math.nan, dtype=targets.dtype)
    table[:, places] = targets
    return table


def image_files(sources: Iterable[Path]) -> Iterator[str]:
    """Files as given, and every image below a folder, in order; nothing is gathered."""
    for source in sources:
        if not source.is_dir():
            yield str(source)
            continue
        for parent, folders, names in os.walk(source):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                if Path(name).suffix.lower() in EXTENSIONS and not name.startswith("."):
                    yield str(Path(parent) / name)


def predict(
    model: Model,
    paths: Iterable[str],
    names: Sequence[str],
    *,
    batch: int = 64,
    workers: int = 0,
    threads: int | None = None,
) -> Iterator[Answered]:
    """Answers for any number of files, in their order and in constant memory; a bad one is answered by its reason."""
    transform = Evaluation(preprocessing_of(model, names))
    stream = iter(paths)
    while chunk := list(islice(stream, _AT_ONCE)):
        bad = BadImages()
        split = Split(ImageFiles(tuple(chunk)), torch.zeros(len(chunk), dtype=torch.int64).numpy(), (b"",) * len(chunk))
        loader = Loader(split, transform, batch, workers, "skip", bad)
        said: dict[int, dict[str, Prediction]] = {}
        with PieceThreads(model.backbone.device, threads) as pool:
            for part in loader.batches():
                for name, outputs in _outputs(model, part.images, names, pool).items():
                    for i, prediction in zip(
                        part.indices.tolist(), predictions(model.tasks[name], outputs), strict=True
                    ):
                        said.setdefault(i, {})[name] = prediction
        for i, path in enumerate(chunk):
            yield Answered(path, said.get(i, {}), None if i in said else bad.reasons.get(path, "cannot be read"))
