"""Tasks and branches from several files and bundles: finds what they need, and lets a name mean one thing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vit_memory.branch import Branch
from vit_memory.errors import FileError, GraphError
from vit_memory.files.branchfile import branch_file, is_branch_file, load_branch
from vit_memory.files.bundle import Bundle
from vit_memory.files.manifest import BRANCHES, bundle_of
from vit_memory.files.taskfile import describe, load_task
from vit_memory.graph import has_digest, rename_tasks
from vit_memory.task import BranchRef, Task, check_name


@dataclass(frozen=True, slots=True, eq=False)
class TaskFile:
    """A task, and the file that it was read from."""

    path: Path
    task: Task


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """Tasks with everything that they need."""

    files: list[TaskFile]
    branches: list[Branch]

    @property
    def tasks(self) -> list[Task]:
        """The tasks of the files."""
        return [file.task for file in self.files]


def collect(
    paths: Sequence[Path],
    bundles: Sequence[Bundle] = (),
    *,
    rename: Mapping[Path, str] | None = None,
    option: str | None = None,
    hint: str = "",
) -> Collected:
    """The tasks and branches of bundles and files, the parents that they extend, the branches that they stand on.

    A parent or branch that is not among them is read from the folder of the task that needs it. `rename` gives the
    tasks of some files, files inside the bundles included, other names; tasks that extend them use the new names. The
    same task given twice counts once; two different tasks of one name are refused. `option` is the command-line option
    for `rename`, for messages; `hint` ends the message about a missing parent.
    """
    branch_paths = [path for path in paths if is_branch_file(path)]
    files = _read_files([path for path in paths if path not in branch_paths], bundles)
    parents = files.read_parents(hint)
    names = _new_names(files.by_path, rename or {})
    tasks = {path: file.task for path, file in files.by_path.items()}
    _first_of_each_name(files.by_path, names, tasks, option)  # a clash is refused before anything is renamed
    if names:
        tasks = rename_tasks(tasks, names, parents)
    first = _first_of_each_name(files.by_path, names, tasks, option)
    collected = [TaskFile(files.by_path[path].path, tasks[path]) for path in first]
    return Collected(collected, collect_branches(collected, branch_paths, bundles))


def add_files(
    bundle: Bundle, paths: Sequence[Path], *, half: bool | None = None, rename: Mapping[Path, str] | None = None
) -> Bundle:
    """Add task and branch files to a bundle, under the names in `rename`. What it already holds counts once.

    A parent or branch that is in neither is read from the folder of its task; GraphError if it is not there.
    """
    own = {bundle.path(entry).resolve(): entry for entry in bundle.entries}
    for path in rename or {}:
        if path.resolve() in own:
            old = own[path.resolve()].name
            raise FileError(
                f"{path}: is in the bundle already. Rename it there: vit-memory bundle rename {bundle.folder} {old} NEW"
            )
    hint = " Give the file of the parent too."
    collected = collect(paths, [bundle], rename=rename, option="--rename", hint=hint)
    held = {entry.name for entry in bundle.branch_entries}
    return bundle.add(
        [file.task for file in collected.files if file.path.resolve() not in own],
        [branch for branch in collected.branches if branch.name not in held],
        half=half,
    )


def collect_branches(files: Sequence[TaskFile], paths: Sequence[Path], bundles: Sequence[Bundle]) -> list[Branch]:
    """The branches of bundles and branch files, and those that tasks stand on, from the folders of their task files.

    The same branch given twice counts once; two different ones of one name are refused.
    """
    by_name: dict[str, tuple[str, Branch]] = {}  # with where it is from

    def add(where: str, branch: Branch) -> None:
        other = by_name.setdefault(branch.name, (where, branch))
        if not has_digest(other[1], branch.digest) and not has_digest(branch, other[1].digest):
            raise GraphError(
                f"{other[0]} and {where} hold two branches called {branch.name!r}. Give one of them, or rename one: "
                f"vit-memory branch rename {where} NEW"
            )

    for bundle in bundles:
        for entry in bundle.branch_entries:
            add(str(bundle.path(entry)), bundle.branch(entry.name))
    for path in paths:
        add(str(path), load_branch(path))
    for file in files:
        ref = file.task.branch
        # Where another branch has the name, the graph says so.
        if ref is None or ref.name in by_name or _is_among(ref, [branch for _, branch in by_name.values()]):
            continue
        beside = next((one for other in (file, *files) if (one := _branch_beside(other, ref))), None)
        if beside is None:
            raise GraphError(
                f"{file.path}: task {file.task.name!r} stands on branch {ref.name!r} (digest {ref.digest[:12]}…), "
                f"which is neither given nor beside it as {ref.name}.branch.safetensors. Give its file too."
            )
        add(str(beside[0]), beside[1])
    return [branch for _, branch in by_name.values()]


def _is_among(ref: BranchRef, branches: Sequence[Branch]) -> bool:
    return any(has_digest(branch, ref.digest) for branch in branches)


def _branch_beside(file: TaskFile, ref: BranchRef) -> tuple[Path, Branch] | None:
    """A branch from the folder of a task file, or of its bundle; files that cannot be read are left out."""
    bundle = bundle_of(file.path)
    folder = file.path.absolute().parent if bundle is None else bundle / BRANCHES
    first = branch_file(folder, ref.name)
    for path in sorted(folder.glob("*.branch.safetensors"), key=lambda path: path != first):
        if not is_branch_file(path):
            continue
        try:
            branch = load_branch(path)
        except FileError:
            continue
        if has_digest(branch, ref.digest):
            return path, branch
    return None


def _read_files(paths: Sequence[Path], bundles: Sequence[Bundle]) -> "_TaskFiles":
    files = _TaskFiles()
    for bundle in bundles:
        for entry in bundle.entries:
            files.add(TaskFile(bundle.path(entry), bundle.task(entry.name)))
    for path in paths:
        if path.resolve() not in files.by_path:
            files.add(TaskFile(path, load_task(path)))
    return files


class _TaskFiles:
    """The files read so far, by resolved path, and their tasks by name."""

    def __init__(self) -> None:
        self.by_path: dict[Path, TaskFile] = {}
        self._by_name: dict[str, list[TaskFile]] = {}

    def add(self, file: TaskFile) -> bool:
        """Add a file; False if it was added before."""
        if file.path.resolve() in self.by_path:
            return False
        self.by_path[file.path.resolve()] = file
        self._by_name.setdefault(file.task.name, []).append(file)
        return True

    def read_parents(self, hint: str) -> dict[Path, dict[str, Path]]:
        """Add all ancestors. Returns, for every file, which file each name of a parent refers to."""
        parents: dict[Path, dict[str, Path]] = {}
        waiting = list(self.by_path)
        while waiting:
            path = waiting.pop(0)
            child = self.by_path[path]
            parents[path] = {}
            for name in child.task.parents:
                parent = self.parent(child, name, hint)
                parents[path][name] = parent.path.resolve()
                if self.add(parent):
                    waiting.append(parent.path.resolve())
        return parents

    def parent(self, child: TaskFile, name: str, hint: str) -> TaskFile:
        """The file that the name of a parent refers to.

        For a pinned parent, a file with the pinned content, in any folder; otherwise the file in the child's folder.
        If there is neither, another file with a task of that name.
        """
        pin, folder = child.task.parent_digests.get(name), child.path.resolve().parent
        named = self._by_name.get(name, [])
        matching = [file for file in named if pin is None or has_digest(file.task, pin)]
        neighbours = [file for file in matching if file.path.resolve().parent == folder]
        if neighbours:
            return neighbours[0]
        if pin is None or not matching:
            beside = self._beside(child, name)
            if beside is not None and (pin is None or has_digest(beside.task, pin) or not named):
                return beside
        candidates = matching or named  # the graph refuses a parent of other content, and names the remedy
        if not candidates:
            if pin is not None:
                hint += f" If the parent was renamed since: vit-memory task repin {child.path} PARENT"
            raise GraphError(
                f"{child.path}: task {child.task.name!r} extends {name!r}, which is neither given nor beside it as "
                f"{name}.safetensors.{hint}"
            )
        if pin is None and len({file.task.digest for file in candidates}) > 1:
            raise GraphError(
                f"{child.path}: task {child.task.name!r} extends {name!r}, which could be any of "
                f"{', '.join(str(file.path) for file in candidates)}. Choose one: "
                f"vit-memory task repin {child.path} {candidates[0].path}"
            )
        return candidates[0]

    def _beside(self, child: TaskFile, name: str) -> TaskFile | None:
        path = child.path.with_name(f"{name}.safetensors")
        if path.resolve() in self.by_path or not path.exists():
            return None
        task = load_task(path)
        return TaskFile(path, task) if task.name == name else None


def _new_names(files: Mapping[Path, TaskFile], rename: Mapping[Path, str]) -> dict[Path, str]:
    """The new names, by resolved path."""
    names: dict[Path, str] = {}
    for path, name in rename.items():
        check_name(name)
        if path.resolve() not in files:
            raise FileError(
                f"{path}: to be renamed, but not among the files read: "
                f"{', '.join(str(file.path) for file in files.values())}."
            )
        names[path.resolve()] = name
    return names


def _first_of_each_name(
    files: Mapping[Path, TaskFile], names: Mapping[Path, str], tasks: Mapping[Path, Task], option: str | None
) -> list[Path]:
    """The first file of each name; refused if another file holds a different task of that name."""
    first: dict[str, Path] = {}
    for path, task in tasks.items():
        name = names.get(path, task.name)
        other = first.setdefault(name, path)
        if other == path or _same_task(tasks[other], task):
            continue
        file = files[path]
        bundle = bundle_of(file.path)
        command = f"vit-memory task rename {file.path} NEW"
        if bundle is not None:
            command = f"vit-memory bundle rename {bundle} {file.task.name} NEW"
        if option is not None:
            command = f"for this command with {option} {file.path}=NEW, or in the file with {command}"
        raise GraphError(
            f"{files[other].path} and {file.path} hold two tasks called {name!r}. "
            f"Give one of them, or rename one: {command}"
        )
    return list(first.values())


def _same_task(a: Task, b: Task) -> bool:
    """Whether two files hold the same task: equal weights and an equal record. Two equal runs are two tasks."""
    return a.digest == b.digest and describe(a) == describe(b)
