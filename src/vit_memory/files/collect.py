"""Tasks of several files and bundles given together: their parents found, and every name given to one task only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vit_memory.errors import FileError, GraphError
from vit_memory.files.bundle import Bundle, bundle_of
from vit_memory.files.taskfile import describe, load_task
from vit_memory.graph import has_digest, rename_tasks
from vit_memory.task import Task, check_name


@dataclass(frozen=True, slots=True, eq=False)
class TaskFile:
    """A task, and the file that it was read from."""

    path: Path
    task: Task


def collect_tasks(
    files: Sequence[Path],
    bundles: Sequence[Bundle] = (),
    *,
    rename: Mapping[Path, str] | None = None,
    option: str | None = None,
    hint: str = "",
) -> list[TaskFile]:
    """The tasks of bundles and task files, with the parents that the latter extend.

    Parents that are not given are taken from the files beside their children. `rename` gives the tasks of some files,
    files inside the bundles included, other names; tasks that extend them name them so. The same task given twice
    counts once; two different tasks of one name are refused. `option` is how a command spells `rename`, for messages;
    `hint` ends the message about a missing parent.
    """
    found = _Found()
    for bundle in bundles:
        for entry in bundle.entries:
            found.put(TaskFile(bundle.path(entry), bundle.task(entry.name)))
    for path in files:
        if path.resolve() not in found.files:
            found.put(TaskFile(path, load_task(path)))
    parents: dict[Path, dict[str, Path]] = {}
    waiting = list(found.files)
    while waiting:
        key = waiting.pop(0)
        child = found.files[key]
        parents[key] = {}
        for name in child.task.parents:
            parent = found.parent(child, name, hint)
            parents[key][name] = parent.path.resolve()
            if found.put(parent):
                waiting.append(parent.path.resolve())
    names = _names(found.files, rename or {})
    tasks = {key: file.task for key, file in found.files.items()}
    _once(found.files, names, tasks, option)
    if names:
        tasks = rename_tasks(tasks, names, parents)
    return [TaskFile(found.files[key].path, tasks[key]) for key in _once(found.files, names, tasks, option)]


def add_files(
    bundle: Bundle, paths: Sequence[Path], *, half: bool | None = None, rename: Mapping[Path, str] | None = None
) -> Bundle:
    """Add task files, under other names where `rename` says so. What the bundle holds already counts once.

    Parents that are missing are taken from the files beside them, or named.
    """
    own = {bundle.path(entry).resolve(): entry for entry in bundle.entries}
    for path in rename or {}:
        if path.resolve() in own:
            old = own[path.resolve()].name
            raise FileError(
                f"{path}: is in the bundle already. Rename it there: vit-memory bundle rename {bundle.folder} {old} NEW"
            )
    hint = f" Add both: vit-memory bundle add {bundle.folder} PARENT TASK"
    collected = collect_tasks(paths, [bundle], rename=rename, option="--rename", hint=hint)
    return bundle.add([file.task for file in collected if file.path.resolve() not in own], half=half)


class _Found:
    """The files read so far, by resolved path, and their tasks by name."""

    def __init__(self) -> None:
        self.files: dict[Path, TaskFile] = {}
        self._by_name: dict[str, list[TaskFile]] = {}

    def put(self, file: TaskFile) -> bool:
        """Remember a file; False if it is known already."""
        if file.path.resolve() in self.files:
            return False
        self.files[file.path.resolve()] = file
        self._by_name.setdefault(file.task.name, []).append(file)
        return True

    def parent(self, child: TaskFile, name: str, hint: str) -> TaskFile:
        """The file that a task means by the name of a parent.

        If the parent is pinned, a file of that content, wherever it is; if not, the file in the same folder. Only where
        there is none of these, another file of that name.
        """
        pin, folder = child.task.parent_digests.get(name), child.path.resolve().parent
        named = self._by_name.get(name, [])
        fitting = [file for file in named if pin is None or has_digest(file.task, pin)]
        neighbours = [file for file in fitting if file.path.resolve().parent == folder]
        if neighbours:
            return neighbours[0]
        if pin is None or not fitting:
            beside = self._beside(child, name)
            if beside is not None and (pin is None or has_digest(beside.task, pin) or not named):
                return beside
        candidates = fitting or named  # a parent of other content is refused by the graph, which says what to do
        if not candidates:
            if pin is not None:
                hint += f" If it was renamed since: vit-memory task repin {child.path} PARENT"
            raise GraphError(
                f"{child.path}: task {child.task.name!r} extends {name!r}, which is neither given nor beside it as "
                f"{name}.safetensors.{hint}"
            )
        if pin is None and len({file.task.digest for file in candidates}) > 1:
            raise GraphError(
                f"{child.path}: task {child.task.name!r} extends {name!r} without saying which of "
                f"{', '.join(str(file.path) for file in candidates)}. Say it: "
                f"vit-memory task repin {child.path} {candidates[0].path}"
            )
        return candidates[0]

    def _beside(self, child: TaskFile, name: str) -> TaskFile | None:
        path = child.path.with_name(f"{name}.safetensors")
        if path.resolve() in self.files or not path.exists():
            return None
        task = load_task(path)
        return TaskFile(path, task) if task.name == name else None


def _names(files: Mapping[Path, TaskFile], rename: Mapping[Path, str]) -> dict[Path, str]:
    """The new names by resolved path."""
    names: dict[Path, str] = {}
    for path, name in rename.items():
        check_name(name)
        if path.resolve() not in files:
            raise FileError(
                f"{path}: is to be renamed, but is none of the files read here: "
                f"{', '.join(str(file.path) for file in files.values())}."
            )
        names[path.resolve()] = name
    return names


def _once(
    files: Mapping[Path, TaskFile], names: Mapping[Path, str], tasks: Mapping[Path, Task], option: str | None
) -> list[Path]:
    """The first file of every name; refused where another file holds a different task of that name."""
    first: dict[str, Path] = {}
    for key, task in tasks.items():
        name = names.get(key, task.name)
        other = first.setdefault(name, key)
        if other == key or _same(tasks[other], task):
            continue
        path = files[key].path
        bundle = bundle_of(path)
        command = f"vit-memory task rename {path} NEW"
        if bundle is not None:
            command = f"vit-memory bundle rename {bundle} {files[key].task.name} NEW"
        if option is not None:
            command = f"for this command with {option} {path}=NEW, or for good with {command}"
        raise GraphError(
            f"{files[other].path} and {path} hold two tasks called {name!r}. Give one of them, or rename one: {command}"
        )
    return list(first.values())


def _same(a: Task, b: Task) -> bool:
    """Whether two files hold one task: equal weights and one origin. Two runs that agree to the bit are two tasks."""
    return a.digest == b.digest and describe(a) == describe(b)
