"""Tasks over many images: all tasks in one pass per batch, from labelled splits or from files as they are found."""

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
from vit_memory.data.loading import BadImages, Loader, OnBadImage
from vit_memory.data.splits import Split
from vit_memory.data.transforms import Evaluation
from vit_memory.errors import BackboneMismatch, DataError, TaskError
from vit_memory.evaluation.metrics import Scores, score
from vit_memory.families.roles import Preprocessing
from vit_memory.files.bundle import Bundle
from vit_memory.files.collect import collect_tasks
from vit_memory.files.container import read_container
from vit_memory.files.taskfile import backbone_file
from vit_memory.model import MemoryViT
from vit_memory.standalone import StandaloneModel
from vit_memory.task import COMPOSABLE, Task

_AT_ONCE = 512  # files whose names are held while a folder streams by


@dataclass(frozen=True, slots=True)
class Answer:
    """What one task says of one image."""

    label: str
    confidence: float


@dataclass(frozen=True, slots=True)
class Answered:
    """One file: what every task says, or why nothing can be said."""

    path: str
    answers: Mapping[str, Answer]
    error: str | None = None


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
    on_bad_image: OnBadImage = "fail",
    bad: BadImages | None = None,
) -> dict[str, Scores]:
    """Score tasks on a split whose label numbers mean `labels`; all of them in one pass per batch."""
    for name in names:
        own = model.tasks[name].labels
        if set(own) != set(labels):
            lacking, strange = sorted(set(labels) - set(own)), sorted(set(own) - set(labels))
            raise DataError(
                f"task {name!r} answers other labels than the images have: "
                f"{len(lacking)} it does not know ({', '.join(lacking[:3]) or 'none'}), "
                f"{len(strange)} that no image has ({', '.join(strange[:3]) or 'none'})."
            )
    bad = BadImages() if bad is None else bad
    loader = Loader(split, Evaluation(preprocessing_of(model, names)), batch, workers, on_bad_image, bad)
    logits: dict[str, list[Tensor]] = {name: [] for name in names}
    truth = []
    with torch.no_grad():
        for part in loader.batches():
            outputs = model(part.images.to(model.backbone.device), list(names))
            truth.append(part.labels)
            for name in names:
                logits[name].append(outputs[name].float().cpu())
    scores = {}
    for name in names:
        own = model.tasks[name].labels
        number = torch.tensor([own.index(label) for label in labels])
        scores[name] = score(torch.cat(logits[name]), number[torch.cat(truth)], own)
    return scores


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
) -> Iterator[Answered]:
    """Answers for any number of files, in their order and in constant memory; a bad one is answered by its reason."""
    transform = Evaluation(preprocessing_of(model, names))
    stream = iter(paths)
    while chunk := list(islice(stream, _AT_ONCE)):
        bad = BadImages()
        split = Split(ImageFiles(tuple(chunk)), torch.zeros(len(chunk), dtype=torch.int64).numpy(), (b"",) * len(chunk))
        loader = Loader(split, transform, batch, workers, "skip", bad)
        said: dict[int, dict[str, Answer]] = {}
        try:
            for part in loader.batches():
                with torch.no_grad():
                    outputs = model(part.images.to(model.backbone.device), list(names))
                for name in names:
                    confidences, places = outputs[name].float().softmax(-1).max(-1)
                    found = zip(part.indices.tolist(), confidences.tolist(), places.tolist(), strict=True)
                    for i, confidence, place in found:
                        said.setdefault(i, {})[name] = Answer(model.tasks[name].labels[place], confidence)
        except DataError:
            if len(bad) < len(chunk):  # all bad is an answer here, not an error
                raise
        for i, path in enumerate(chunk):
            yield Answered(path, said.get(i, {}), None if i in said else bad.reasons.get(path, "cannot be read"))
