"""Open a model from task files and bundles, on the backbone that its tasks name."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from vit_memory.backbone import Backbone, load_backbone
from vit_memory.errors import TaskError
from vit_memory.files.backbonefile import load_tuned_backbone
from vit_memory.files.bundle import Bundle
from vit_memory.files.collect import Collected, TaskFile, collect
from vit_memory.files.taskfile import backbone_file
from vit_memory.model import MemoryViT
from vit_memory.preprocessing import Preprocessing
from vit_memory.regimes import COMPOSABLE, REGIMES
from vit_memory.standalone import StandaloneModel

Model = MemoryViT | StandaloneModel


def open_model(
    sources: Sequence[Path],
    backbone: str | None = None,
    device: str = "cpu",
    rename: Mapping[Path, str] | None = None,
) -> Model:
    """A model with the tasks of bundles and files, on `backbone` or the backbone that the tasks name.

    `rename` gives the tasks of some files other names. A task that does not compose must be the only one; the backbone
    of regime `full` is read from the file beside the task file.
    """
    collected = _collect(sources, rename)
    files = collected.files
    loaded = load_backbone(backbone or files[0].task.backbone.name, device=device)
    standalone = [file for file in files if file.task.regime not in COMPOSABLE]
    if not standalone:
        return MemoryViT(loaded, collected.tasks, collected.branches)
    file, task = standalone[0], standalone[0].task
    if len(files) > 1:
        raise TaskError(f"task {task.name!r} is of regime {task.regime!r} and cannot be combined; open it alone.")
    return StandaloneModel(_tuned_backbone(loaded, file) if REGIMES[task.regime].own_backbone else loaded, task)


def open_composable(
    sources: Sequence[Path],
    backbone: str | None = None,
    device: str = "cpu",
    rename: Mapping[Path, str] | None = None,
) -> tuple[MemoryViT, Collected]:
    """As `open_model`, with the files of the tasks; TaskError if one of them does not compose."""
    collected = collect_composable(sources, rename)
    loaded = load_backbone(backbone or collected.tasks[0].backbone.name, device=device)
    return MemoryViT(loaded, collected.tasks, collected.branches), collected


def collect_composable(sources: Sequence[Path], rename: Mapping[Path, str] | None = None) -> Collected:
    """The tasks of bundles and files, with everything that they need; TaskError if one of them does not compose."""
    collected = _collect(sources, rename)
    for file in collected.files:
        conflict = REGIMES[file.task.regime].conflict
        if conflict is not None:
            raise TaskError(
                f"{file.path}: task {file.task.name!r} is of regime {file.task.regime!r}: {conflict}. Leave it out; "
                f"tasks of these regimes leave others as they are: {', '.join(sorted(COMPOSABLE))}."
            )
    return collected


def _collect(sources: Sequence[Path], rename: Mapping[Path, str] | None) -> Collected:
    for path in sources:
        if not path.exists():
            raise TaskError(f"{path}: no such task file or bundle.")
    bundles = [Bundle.open(path) for path in sources if path.is_dir()]
    paths = [path for path in sources if not path.is_dir()]
    collected = collect(paths, bundles, rename=rename, option="--rename")
    if not collected.files:
        raise TaskError(f"{', '.join(map(str, sources)) or 'no files given'}: no tasks in it.")
    return collected


def preprocessing_of(model: Model, names: Iterable[str]) -> Preprocessing:
    """The preprocessing that these tasks share; TaskError if they differ, since one pass has one preprocessing."""
    by_task = {name: model.tasks[name].record.preprocessing or model.backbone.preprocessing for name in names}
    if len(set(by_task.values())) > 1:
        listed = "; ".join(f"{name}: {preprocessing}" for name, preprocessing in by_task.items())
        raise TaskError(f"these tasks were trained with different preprocessing; run them separately. {listed}")
    (preprocessing,) = set(by_task.values())
    if preprocessing is None:
        raise TaskError(f"neither the tasks nor {model.backbone.name} define how images are preprocessed.")
    return preprocessing


def _tuned_backbone(backbone: Backbone, file: TaskFile) -> Backbone:
    """The backbone that was trained with a task of regime `full`, from the file beside the task file."""
    path = backbone_file(file.path)
    if not path.exists():
        raise TaskError(f"{file.path}: a task of regime 'full' needs its own backbone; {path} is missing.")
    return load_tuned_backbone(backbone, path, file.task.backbone.fingerprint)
