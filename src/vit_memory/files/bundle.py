"""A bundle: a folder with a backbone reference, task and branch files, and the graph between them.

    my-bundle/
      bundle.json                          the manifest: format, backbone, and per file its checksum and what it needs
      tasks/pets.safetensors               one file per task
      branches/birds.branch.safetensors    one file per branch

A new bundle is written to a temporary folder and renamed, so it appears whole or not at all. A change writes new files
first, then `bundle.json`, and deletes old files last; no listed file is overwritten. So an interrupted change leaves
the old bundle or the new one, at worst with a file that the manifest does not list.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import TypeVar

from vit_memory.atomic import check_empty, new_folder, write_atomic
from vit_memory.backbone import Backbone, BackboneIdentity, load_backbone
from vit_memory.branch import Branch
from vit_memory.errors import BackboneMismatch, DamagedFile, FileError, GraphError
from vit_memory.files import hub
from vit_memory.files.branchfile import load_branch, save_branch
from vit_memory.files.manifest import (
    BRANCHES,
    MANIFEST,
    TASKS,
    BranchEntry,
    Entry,
    Manifest,
    read_manifest,
    write_manifest,
)
from vit_memory.files.taskfile import load_task, save_task
from vit_memory.graph import TaskGraph, rename_tasks
from vit_memory.model import MemoryViT
from vit_memory.task import Task, check_name

AnyEntry = TypeVar("AnyEntry", Entry, BranchEntry)


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle: the content of its manifest. A change is written to the folder and gives a new value."""

    folder: Path
    manifest: Manifest

    @property
    def backbone(self) -> BackboneIdentity:
        """The backbone that it is for."""
        return self.manifest.backbone

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its tasks, as the manifest lists them."""
        return self.manifest.entries

    @property
    def branch_entries(self) -> tuple[BranchEntry, ...]:
        """Its branches, as the manifest lists them."""
        return self.manifest.branch_entries

    @property
    def all_entries(self) -> list[Entry | BranchEntry]:
        """Branches, then tasks."""
        return [*self.branch_entries, *self.entries]

    @staticmethod
    def begin(folder: Path | str, backbone: Backbone | BackboneIdentity) -> "Bundle":
        """A bundle for a new or empty folder. Nothing is written until `add` is called."""
        folder = Path(folder)
        if (folder / MANIFEST).exists():
            raise FileError(f"{folder}: is a bundle already. Add tasks to it: vit-memory bundle add {folder} FILE")
        check_empty(folder)
        return Bundle(folder, Manifest(backbone.identity if isinstance(backbone, Backbone) else backbone, ()))

    @staticmethod
    def create(
        folder: Path | str,
        backbone: Backbone | BackboneIdentity,
        tasks: Iterable[Task] = (),
        branches: Iterable[Branch] = (),
    ) -> "Bundle":
        """Write a bundle with these tasks and branches, or with none yet, into a new or empty folder."""
        return Bundle.begin(folder, backbone).add(list(tasks), list(branches))

    @staticmethod
    def open(folder: Path | str) -> "Bundle":
        """Read the manifest of a bundle. Other files are read when they are needed."""
        return Bundle(Path(folder), read_manifest(Path(folder)))

    @staticmethod
    def download(
        repo: str, *, revision: str | None = None, endpoint: str | None = None, token: str | None = None
    ) -> "Bundle":
        """Download a bundle from the Hugging Face hub into the hub's cache, and check every file."""
        patterns = [MANIFEST, f"{TASKS}/*.safetensors", f"{BRANCHES}/*.safetensors"]
        bundle = Bundle.open(hub.download(repo, patterns, revision=revision, endpoint=endpoint, token=token))
        bundle.check()
        return bundle

    @staticmethod
    def from_pretrained(
        source: Path | str, *, revision: str | None = None, endpoint: str | None = None, token: str | None = None
    ) -> "Bundle":
        """Open a bundle from a folder, or from the hub by `user/repo`; the options are the hub's."""
        if Path(source).exists():
            return Bundle.open(source)
        return Bundle.download(str(source), revision=revision, endpoint=endpoint, token=token)

    def save_pretrained(self, folder: Path | str) -> None:
        """Copy the bundle to a new or empty folder, whole or not at all; every file is compared with its checksum."""
        copy = Bundle.begin(folder, self.backbone)
        self.check()
        with new_folder(copy.folder, last=MANIFEST) as partial:
            for entry in self.all_entries:
                path = self.path(entry)
                write_atomic(partial / path.parent.name / entry.file, [_read_listed(path, entry)])
            write_manifest(partial, self.manifest)

    def path(self, entry: Entry | BranchEntry) -> Path:
        """The file of a task or branch."""
        return self.folder / (TASKS if isinstance(entry, Entry) else BRANCHES) / entry.file

    def branches(self) -> list[Branch]:
        """Every branch, each file compared with the manifest."""
        return [self.branch(entry.name) for entry in self.branch_entries]

    def branch(self, name: str) -> Branch:
        """One branch by name."""
        entry = self._branch_entry(name)
        path = self.path(entry)
        branch = load_branch(path)
        _read_listed(path, entry)
        if branch.name != name:
            raise DamagedFile(f"{path}: holds a branch {branch.name!r}; {MANIFEST} lists {name!r}.")
        return branch

    def tasks(self) -> list[Task]:
        """Every task, each file compared with the manifest."""
        return [self.task(entry.name) for entry in self.entries]

    def task(self, name: str) -> Task:
        """One task by name."""
        entry = self._entry(name)
        path = self.path(entry)
        task = load_task(path)
        _read_listed(path, entry)
        if task.name != name or task.parents != entry.parents:
            raise DamagedFile(
                f"{path}: holds a task {task.name!r} that extends {', '.join(task.parents) or 'nothing'}; "
                f"{MANIFEST} lists {name!r}, which extends {', '.join(entry.parents) or 'nothing'}."
            )
        return task

    def add(self, tasks: Sequence[Task], branches: Sequence[Branch] = (), *, half: bool | None = None) -> "Bundle":
        """Add branches and tasks, side by side (concatenation) or as children of others (extension); all or none.

        `half` as in `save_task`: by default, float16 tasks stay float16.
        """
        graph = self._check_fit([*self.tasks(), *tasks], [*self.branches(), *branches])
        if (self.folder / MANIFEST).exists():
            return self._add(tasks, branches, graph, half)
        with new_folder(self.folder, last=MANIFEST) as partial:
            written = replace(self, folder=partial)._add(tasks, branches, graph, half)
        return replace(written, folder=self.folder)

    def put(self, tasks: Sequence[Task], branches: Sequence[Branch], graph: TaskGraph) -> "Bundle":
        """Add tasks and branches, in the place of those that have their names; all or none.

        `graph` is what the bundle holds afterwards, checked by the caller.
        """
        # All new files have names that the old ones have not, so the old bundle stays whole until the manifest changes.
        both = self
        new_entries: dict[str, Entry] = {}
        new_branch_entries: dict[str, BranchEntry] = {}
        for branch in branches:
            new_branch_entries[branch.name] = entry = both._write_branch(branch)
            both = both._with(branch_entries=(*both.branch_entries, entry))
        for task in tasks:
            new_entries[task.name] = task_entry = both._write_task(task, graph)
            both = both._with(entries=(*both.entries, task_entry))
        return self._replace_entries(
            _in_place(self.entries, new_entries), _in_place(self.branch_entries, new_branch_entries)
        )

    def _add(self, tasks: Sequence[Task], branches: Sequence[Branch], graph: TaskGraph, half: bool | None) -> "Bundle":
        bundle = self
        for branch in branches:
            entry = bundle._write_branch(branch, half=half)
            bundle = bundle._with(branch_entries=(*bundle.branch_entries, entry))
        for task in tasks:
            bundle = bundle._with(entries=(*bundle.entries, bundle._write_task(task, graph, half=half)))
        write_manifest(bundle.folder, bundle.manifest)
        return bundle

    def _with(
        self, entries: Sequence[Entry] | None = None, branch_entries: Sequence[BranchEntry] | None = None
    ) -> "Bundle":
        """This value with other entries; nothing is written."""
        return replace(
            self,
            manifest=replace(
                self.manifest,
                entries=self.entries if entries is None else tuple(entries),
                branch_entries=self.branch_entries if branch_entries is None else tuple(branch_entries),
            ),
        )

    def rename(self, old: str, new: str) -> "Bundle":
        """Give a task another name, also in the tasks that extend it; all or nothing."""
        check_name(new)
        self._entry(old)
        tasks = {task.name: task for task in self.tasks()}
        if new in tasks:
            raise GraphError(f"{self.folder}: there is a task {new!r} already; nothing was changed.")
        renamed = rename_tasks(
            tasks, {old: new}, {name: {parent: parent for parent in task.parents} for name, task in tasks.items()}
        )
        graph = self._check_fit(list(renamed.values()), self.branches())
        # New files first, under unused names; then the manifest that lists them. A file that needed another name
        # because the old version still had its own is renamed afterwards in the same way.
        old_and_new, entries = self, []
        for entry in self.entries:
            if renamed[entry.name] is not tasks[entry.name]:
                entry = old_and_new._write_task(renamed[entry.name], graph)  # noqa: PLW2901 - in its place
                old_and_new = old_and_new._with(entries=(*old_and_new.entries, entry))
            entries.append(entry)
        return self._replace_entries(entries)._with_plain_file_names()

    def rename_branch(self, old: str, new: str) -> "Bundle":
        """Give a branch another name. Tasks find it by its digest, so their files stay as they are."""
        check_name(new, "branch")
        entry = self._branch_entry(old)
        if any(other.name == new for other in self.branch_entries):
            raise GraphError(f"{self.folder}: there is a branch {new!r} already; nothing was changed.")
        renamed = self._write_branch(replace(self.branch(old), name=new))
        return self._replace_entries(
            [replace(task, branch=new) if task.branch == old else task for task in self.entries],
            [renamed if branch is entry else branch for branch in self.branch_entries],
        )

    def remove(self, names: Sequence[str], branches: Sequence[str] = ()) -> "Bundle":
        """Remove tasks and branches; refused while another task extends, or stands on, one of them."""
        for name in names:
            self._entry(name)
        for name in branches:
            self._branch_entry(name)
        if branches:
            self.check()  # who stands on them is told by the task files
        for entry in self.entries:
            if entry.branch in branches and entry.name not in names:
                raise GraphError(
                    f"{self.folder}: task {entry.name!r} stands on branch {entry.branch!r}: remove {entry.name!r} too."
                )
            needed = [parent for parent in entry.parents if parent in names]
            if needed and entry.name not in names:
                raise GraphError(
                    f"{self.folder}: task {entry.name!r} extends {', '.join(needed)}: remove {entry.name!r} too."
                )
        return self._replace_entries(
            [entry for entry in self.entries if entry.name not in names],
            [entry for entry in self.branch_entries if entry.name not in branches],
        )

    def check(self) -> TaskGraph:
        """Read every file and check that tasks and branches fit the backbone and each other."""
        graph = self._check_fit(self.tasks(), self.branches())
        self._check_branches(graph)
        return graph

    def model(self, backbone: Backbone | None = None) -> MemoryViT:
        """The backbone with everything attached. Without `backbone`, it is loaded by the name in the manifest."""
        return MemoryViT(backbone or load_backbone(self.backbone.name), self.tasks(), self.branches())

    def _branch_entry(self, name: str) -> BranchEntry:
        for entry in self.branch_entries:
            if entry.name == name:
                return entry
        known = ", ".join(entry.name for entry in self.branch_entries) or "none"
        raise FileError(f"{self.folder}: no branch {name!r} in this bundle. Branches: {known}.")

    def _entry(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        known = ", ".join(entry.name for entry in self.entries) or "none"
        raise FileError(f"{self.folder}: no task {name!r} in this bundle. Tasks: {known}.")

    def _check_branches(self, graph: TaskGraph) -> None:
        """Raise DamagedFile if the manifest lists a task on another branch than its file does."""
        for entry in self.entries:
            branch = graph.branch_of(entry.name)
            if entry.branch != (None if branch is None else branch.name):
                raise DamagedFile(
                    f"{self.folder / MANIFEST}: lists task {entry.name!r} on branch {entry.branch or 'none'}, but its "
                    f"file names {'none' if branch is None else branch.name}."
                )

    def _check_fit(self, tasks: Sequence[Task], branches: Sequence[Branch]) -> TaskGraph:
        items: list[Task | Branch] = [*tasks, *branches]
        for item in items:
            what = "task" if isinstance(item, Task) else "branch"
            if item.backbone.fingerprint != self.backbone.fingerprint:
                raise BackboneMismatch(
                    f"{self.folder}: {what} {item.name!r} was trained on {item.backbone.name} with fingerprint "
                    f"{item.backbone.fingerprint[:12]}…, this bundle is for {self.backbone.name} with "
                    f"{self.backbone.fingerprint[:12]}…. Start a bundle for {item.backbone.name}, or train the "
                    f"{what} again on {self.backbone.name}."
                )
        return TaskGraph(tasks, branches)

    def _write_task(self, task: Task, graph: TaskGraph, *, half: bool | None = None) -> Entry:
        path = _unused_file(self.folder / TASKS, task.name, "", self.entries)
        save_task(task, path, half=half)
        branch = graph.branch_of(task.name)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        return Entry(task.name, path.name, sha256, task.parents, None if branch is None else branch.name)

    def _write_branch(self, branch: Branch, *, half: bool | None = None) -> BranchEntry:
        path = _unused_file(self.folder / BRANCHES, branch.name, ".branch", self.branch_entries)
        save_branch(branch, path, half=half)
        return BranchEntry(branch.name, path.name, hashlib.sha256(path.read_bytes()).hexdigest())

    def _with_plain_file_names(self) -> "Bundle":
        """This bundle with every file called `<task>.safetensors`, unless another task has that file."""
        taken = {entry.file.casefold() for entry in self.entries}
        moved = [e for e in self.entries if f"{e.name}.safetensors".casefold() not in taken]
        if not moved:
            return self
        for entry in moved:
            content = _read_listed(self.path(entry), entry)
            write_atomic(self.folder / TASKS / f"{entry.name}.safetensors", [content])
        return self._replace_entries(
            [replace(e, file=f"{e.name}.safetensors") if e in moved else e for e in self.entries]
        )

    def _replace_entries(
        self, entries: Sequence[Entry], branch_entries: Sequence[BranchEntry] | None = None
    ) -> "Bundle":
        """Write a manifest with these entries, then delete the files that only the old one lists."""
        new = self._with(entries, branch_entries)
        write_manifest(new.folder, new.manifest)
        old_files, new_files = ({bundle.path(entry) for entry in bundle.all_entries} for bundle in (self, new))
        for path in old_files - new_files:
            path.unlink(missing_ok=True)
        return new


def _in_place(old: Sequence[AnyEntry], new: Mapping[str, AnyEntry]) -> list[AnyEntry]:
    """The old entries with the new ones of the same names in their places, then the other new ones."""
    names = {entry.name for entry in old}
    return [new.get(entry.name, entry) for entry in old] + [entry for name, entry in new.items() if name not in names]


def _unused_file(folder: Path, name: str, ending: str, entries: Sequence[Entry | BranchEntry]) -> Path:
    """A file called after a task or branch that no listed one has, on any file system."""
    taken = {entry.file.casefold() for entry in entries}
    numbers = chain([""], (f".{i}" for i in count(1)))
    names = (f"{name}{number}{ending}.safetensors" for number in numbers)
    return folder / next(file for file in names if file.casefold() not in taken)


def _read_listed(path: Path, entry: Entry | BranchEntry) -> bytes:
    """The bytes of a file, compared with its checksum in the manifest."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read, {error.strerror}.") from error
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise DamagedFile(f"{path}: is not the file that {MANIFEST} lists: replaced or changed since it was added.")
    return content
