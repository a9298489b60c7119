"""Change files without training again: rename a task or a branch, or pin a task to other parents."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vit_memory.errors import BackboneMismatch, FileError, GraphError
from vit_memory.files.branchfile import branch_file, load_branch, save_branch
from vit_memory.files.container import read_container, read_format, write_container
from vit_memory.files.manifest import MANIFEST, bundle_of
from vit_memory.files.taskfile import FORMAT, backbone_file, load_task, save_task
from vit_memory.graph import has_digest, rename_tasks
from vit_memory.regimes import REGIMES
from vit_memory.task import Task, TaskRecord, check_name


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """One task file that was written."""

    path: Path
    before: Task
    after: Task


@dataclass(frozen=True, slots=True)
class Pin:
    """One parent of a task: the digest that the task was pinned to before, and the one that it is pinned to now."""

    parent: str
    before: str | None  # None if the parent was not pinned
    after: str


def rename_file(path: Path, name: str, *, out: Path | None = None, children: bool = False) -> list[Change]:
    """Rename the task of a file. Returns the files written, the task's own first.

    `<name>.safetensors` replaces the old file. Task files beside it that extend the task would no longer find it:
    `children=True` rewrites them, otherwise the rename is refused. With `out`, a renamed copy is written there, and
    everything else stays.
    """
    check_name(name)
    task = load_task(path)
    target = path.with_name(f"{name}.safetensors") if out is None else out
    same_file = target.exists() and target.samefile(path)
    keeps_old = out is not None and not same_file
    if same_file and task.name == name:
        raise FileError(f"{path}: the task is called {name!r} already.")
    if not keeps_old:
        _refuse_inside_bundle(path, f"vit-memory bundle rename {{bundle}} {task.name} {name}")
    if not same_file:
        _refuse_existing(target, *([backbone_file(target)] if REGIMES[task.regime].own_backbone else []))
    tasks = {path: task, **({} if keeps_old else dict(_tasks_beside(path)))}
    renamed = _renamed_with_children(path, name, tasks, children)
    # The new file first and the old one last: wherever this is interrupted, every child finds its parent.
    if REGIMES[task.regime].own_backbone and backbone_file(path).exists():
        metadata, weights = read_container(backbone_file(path))
        write_container(backbone_file(target), {**metadata, "task": name}, weights)
    targets = {file: target if file == path else file for file in renamed}
    for file, task_file in targets.items():
        save_task(renamed[file], task_file)
    if not keeps_old and not same_file:
        path.unlink()
        if REGIMES[task.regime].own_backbone:
            backbone_file(path).unlink(missing_ok=True)
    return [Change(task_file, tasks[file], renamed[file]) for file, task_file in targets.items()]


def _renamed_with_children(path: Path, name: str, tasks: dict[Path, Task], children: bool) -> dict[Path, Task]:
    """The renamed task of `path`, then the other tasks that change with it; refused if these may not change."""
    parents = _parents_within(tasks)
    renamed = rename_tasks(tasks, {path: name}, parents)
    changed = [file for file in tasks if file != path and renamed[file] is not tasks[file]]
    if changed and not children:
        extend = ", ".join(file.name for file in tasks if path in parents[file].values())
        raise GraphError(
            f"{path}: {extend} beside it would no longer find the parent {tasks[path].name!r}; nothing was changed. "
            f"Rewrite what extends it too: --children. Or keep {path.name} and write a renamed copy: --out FILE"
        )
    return {file: renamed[file] for file in (path, *changed)}


def repin_file(path: Path, parents: Sequence[Path], *, out: Path | None = None) -> tuple[Change, list[Pin]]:
    """Pin the task of a file to the parents in other files, in place or in `out`. Its weights stay as they are.

    A parent is found by its name, or, if it was renamed, by the digest that the task is pinned to.
    """
    task = load_task(path)
    target = path if out is None else out
    in_place = target.exists() and target.samefile(path)
    if in_place:
        _refuse_inside_bundle(
            path,
            f"vit-memory task repin … --out FILE, then vit-memory bundle remove {{bundle}} {task.name}, then "
            f"vit-memory bundle add {{bundle}} FILE",
        )
    else:
        _refuse_existing(target)
    names = {name: name for name in task.parents}
    pins: list[Pin] = []
    for parent_path in parents:
        parent = load_task(parent_path)
        name = _name_of_parent(path, task, parent_path, parent)
        if name in {pin.parent for pin in pins}:
            raise GraphError(f"{parent_path}: another file is given for {name!r} already; nothing was changed.")
        old = task.parent_digests.get(name)
        pins.append(Pin(name, old, old if old is not None and has_digest(parent, old) else parent.digest))
        names[name] = parent.name
    digests = {**task.parent_digests, **{pin.parent: pin.after for pin in pins}}
    after = replace(
        task,
        parents=tuple(names[name] for name in task.parents),
        parent_digests={names[name]: digest for name, digest in digests.items()},
        record=_repinned_record(task.record, pins),
    )
    if not in_place or after.digest != task.digest or after.parents != task.parents:
        save_task(after, target)
    return Change(target, task, after), pins


def _repinned_record(record: TaskRecord, pins: Sequence[Pin]) -> TaskRecord:
    """The record with `recipe.repinned`: per repinned parent, the digest that the task was trained with."""
    earlier = record.recipe.get("repinned")
    trained_with = dict(earlier) if isinstance(earlier, Mapping) else {}
    for pin in pins:
        if pin.before is not None and pin.after != pin.before:
            trained_with.setdefault(pin.parent, pin.before)
        if trained_with.get(pin.parent) == pin.after:
            del trained_with[pin.parent]
    recipe = {key: value for key, value in record.recipe.items() if key != "repinned"}
    # Repinned, a float16 task is no longer the full task of the record: what is pinned to that one must not accept it.
    half_of = record.half_of if all(pin.before == pin.after for pin in pins) else None
    return replace(record, half_of=half_of, recipe={**recipe, **({"repinned": trained_with} if trained_with else {})})


def pinned_beside(change: Change) -> list[Path]:
    """Task files beside a repinned one that are still pinned to its old content."""
    if change.before.digest == change.after.digest:
        return []
    return [
        file
        for file, task in _tasks_beside(change.path)
        if (pin := task.parent_digests.get(change.after.name)) is not None
        and has_digest(change.before, pin)
        and not has_digest(change.after, pin)
    ]


def _name_of_parent(path: Path, task: Task, parent_path: Path, parent: Task) -> str:
    if parent.backbone.fingerprint != task.backbone.fingerprint:
        raise BackboneMismatch(
            f"{parent_path}: task {parent.name!r} was trained on {parent.backbone.name} with fingerprint "
            f"{parent.backbone.fingerprint[:12]}…, {path} on {task.backbone.name} with "
            f"{task.backbone.fingerprint[:12]}…. A task and its parents need the same backbone."
        )
    if parent.name in task.parents:
        return parent.name
    known_as = [name for name, digest in task.parent_digests.items() if has_digest(parent, digest)]
    if not known_as:
        raise GraphError(
            f"{parent_path}: holds a task {parent.name!r}, which {task.name!r} does not extend; "
            f"it extends {', '.join(task.parents) or 'nothing'}. Nothing was changed."
        )
    return known_as[0]


def rename_branch_file(path: Path, name: str) -> Path:
    """Rename the branch of a file; returns the new file, which replaces the old one.

    Tasks find their branch by its digest, which does not depend on its name: they need no change.
    """
    check_name(name, "branch")
    branch = load_branch(path)
    target = branch_file(path.parent, name)
    if branch.name == name:
        raise FileError(f"{path}: the branch is called {name!r} already.")
    _refuse_inside_bundle(path, f"vit-memory bundle rename {{bundle}} {branch.name} {name} --branch")
    _refuse_existing(target)
    save_branch(replace(branch, name=name), target)
    path.unlink()
    return target


def _tasks_beside(path: Path) -> Iterator[tuple[Path, Task]]:
    """The other task files of a folder. Other files and damaged ones are left out."""
    for file in sorted(path.parent.glob("*.safetensors")):
        if file.resolve() != path.resolve() and (read_format(file) or "").startswith(f"{FORMAT}/"):
            try:
                task = load_task(file)
            except FileError:
                continue
            yield file, task


def _parents_within(tasks: dict[Path, Task]) -> dict[Path, dict[str, Path]]:
    """For every task of one folder, which file each name of a parent refers to."""
    parents: dict[Path, dict[str, Path]] = {file: {} for file in tasks}
    for file, task in tasks.items():
        for name in task.parents:
            pin = task.parent_digests.get(name)
            matching = [
                other for other in tasks if tasks[other].name == name and (pin is None or has_digest(tasks[other], pin))
            ]
            if matching:
                parents[file][name] = next((other for other in matching if other.stem == name), matching[0])
    return parents


def _refuse_existing(*files: Path) -> None:
    for file in files:
        if file.exists():
            raise FileError(f"{file}: exists already; nothing was changed. Move it away, or choose another name.")


def _refuse_inside_bundle(path: Path, remedy: str) -> None:
    """Refuse to change a file of a bundle; `{bundle}` in the remedy becomes the bundle's folder."""
    folder = bundle_of(path)
    if folder is not None:
        command = remedy.format(bundle=folder)
        raise FileError(f"{path}: belongs to a bundle, whose {MANIFEST} holds its checksum. Use {command}")
