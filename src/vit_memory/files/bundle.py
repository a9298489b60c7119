"""A bundle: a folder with a backbone reference, task files and the graph between them.

    my-bundle/
      bundle.json              the manifest: format, backbone, and per task its file, checksum and parents
      tasks/pets.safetensors   one file per task

A new bundle is written to a temporary folder and renamed, so it appears whole or not at all. A change writes new task
files first, then `bundle.json`, and deletes old task files last; no listed file is overwritten. So an interrupted
change leaves the old bundle or the new one, at worst with a task file that the manifest does not list.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

from vit_memory.atomic import check_empty, new_folder, write_atomic
from vit_memory.backbone import Backbone, BackboneIdentity, load_backbone
from vit_memory.errors import BackboneMismatch, DamagedFile, FileError, GraphError
from vit_memory.files import hub
from vit_memory.files.manifest import MANIFEST, TASKS, Entry, read_manifest, write_manifest
from vit_memory.files.taskfile import load_task, save_task
from vit_memory.graph import TaskGraph, rename_tasks
from vit_memory.model import MemoryViT
from vit_memory.task import Task, check_name


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle: the content of its manifest. A change is written to the folder and gives a new value."""

    folder: Path
    backbone: BackboneIdentity
    entries: tuple[Entry, ...]

    @staticmethod
    def begin(folder: Path | str, backbone: Backbone | BackboneIdentity) -> "Bundle":
        """A bundle for a new or empty folder. Nothing is written until `add` is called."""
        folder = Path(folder)
        if (folder / MANIFEST).exists():
            raise FileError(f"{folder}: is a bundle already. Add tasks to it: vit-memory bundle add {folder} FILE")
        check_empty(folder)
        return Bundle(folder, backbone.identity if isinstance(backbone, Backbone) else backbone, ())

    @staticmethod
    def create(folder: Path | str, backbone: Backbone | BackboneIdentity, tasks: Iterable[Task] = ()) -> "Bundle":
        """Write a bundle with these tasks, or with none yet, into a new or empty folder."""
        return Bundle.begin(folder, backbone).add(list(tasks))

    @staticmethod
    def open(folder: Path | str) -> "Bundle":
        """Read the manifest of a bundle. Task files are read when they are needed."""
        return Bundle(Path(folder), *read_manifest(Path(folder)))

    @staticmethod
    def download(
        repo: str, *, revision: str | None = None, endpoint: str | None = None, token: str | None = None
    ) -> "Bundle":
        """Download a bundle from the Hugging Face hub into the hub's cache, and check every file."""
        patterns = [MANIFEST, f"{TASKS}/*.safetensors"]
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
            for entry in self.entries:
                write_atomic(partial / TASKS / entry.file, [_read_listed(self.path(entry), entry)])
            write_manifest(partial, self.backbone, self.entries)

    def path(self, entry: Entry) -> Path:
        """The file of a task."""
        return self.folder / TASKS / entry.file

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

    def add(self, tasks: Sequence[Task], *, half: bool | None = None) -> "Bundle":
        """Add tasks, side by side (concatenation) or as children of others (extension); all or none.

        `half` as in `save_task`: by default, float16 tasks stay float16.
        """
        self._check_fit([*self.tasks(), *tasks])
        if (self.folder / MANIFEST).exists():
            return self._add(tasks, half)
        with new_folder(self.folder, last=MANIFEST) as partial:
            written = replace(self, folder=partial)._add(tasks, half)
        return replace(written, folder=self.folder)

    def _add(self, tasks: Sequence[Task], half: bool | None) -> "Bundle":
        bundle = self
        for task in tasks:
            bundle = replace(bundle, entries=(*bundle.entries, bundle._write_task(task, half=half)))
        write_manifest(bundle.folder, bundle.backbone, bundle.entries)
        return bundle

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
        self._check_fit(list(renamed.values()))
        # New files first, under unused names; then the manifest that lists them. A file that needed another name
        # because the old version still had its own is renamed afterwards in the same way.
        old_and_new, entries = self, []
        for entry in self.entries:
            if renamed[entry.name] is not tasks[entry.name]:
                entry = old_and_new._write_task(renamed[entry.name])  # noqa: PLW2901 - in its place
                old_and_new = replace(old_and_new, entries=(*old_and_new.entries, entry))
            entries.append(entry)
        return self._replace_entries(entries)._with_plain_file_names()

    def remove(self, names: Sequence[str]) -> "Bundle":
        """Remove tasks; refused while another task extends one of them."""
        for name in names:
            self._entry(name)
        for entry in self.entries:
            needed = [parent for parent in entry.parents if parent in names]
            if needed and entry.name not in names:
                raise GraphError(
                    f"{self.folder}: task {entry.name!r} extends {', '.join(needed)}: remove {entry.name!r} too."
                )
        return self._replace_entries([entry for entry in self.entries if entry.name not in names])

    def check(self) -> TaskGraph:
        """Read every file and check that the tasks fit the backbone and each other."""
        return self._check_fit(self.tasks())

    def model(self, backbone: Backbone | None = None) -> MemoryViT:
        """The backbone with every task attached. Without `backbone`, it is loaded by the name in the manifest."""
        return MemoryViT(backbone or load_backbone(self.backbone.name), self.tasks())

    def _entry(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        known = ", ".join(entry.name for entry in self.entries) or "none"
        raise FileError(f"{self.folder}: no task {name!r} in this bundle. Tasks: {known}.")

    def _check_fit(self, tasks: Sequence[Task]) -> TaskGraph:
        for task in tasks:
            if task.backbone.fingerprint != self.backbone.fingerprint:
                raise BackboneMismatch(
                    f"{self.folder}: task {task.name!r} was trained on {task.backbone.name} with fingerprint "
                    f"{task.backbone.fingerprint[:12]}…, this bundle is for {self.backbone.name} with "
                    f"{self.backbone.fingerprint[:12]}…. Start a bundle for {task.backbone.name}, or train the "
                    f"task again on {self.backbone.name}."
                )
        return TaskGraph(tasks)

    def _write_task(self, task: Task, *, half: bool | None = None) -> Entry:
        """Write a task file under a name that no listed file has, on any file system."""
        taken = {entry.file.casefold() for entry in self.entries}
        names = (f"{task.name}{ending}.safetensors" for ending in chain([""], (f".{i}" for i in count(1))))
        path = self.folder / TASKS / next(name for name in names if name.casefold() not in taken)
        save_task(task, path, half=half)
        return Entry(task.name, path.name, hashlib.sha256(path.read_bytes()).hexdigest(), task.parents)

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

    def _replace_entries(self, entries: Sequence[Entry]) -> "Bundle":
        """Write a manifest with these entries, then delete the files that only the old one lists."""
        write_manifest(self.folder, self.backbone, entries)
        for file in {entry.file for entry in self.entries} - {entry.file for entry in entries}:
            (self.folder / TASKS / file).unlink(missing_ok=True)
        return replace(self, entries=tuple(entries))


def _read_listed(path: Path, entry: Entry) -> bytes:
    """The bytes of a task file, compared with its checksum in the manifest."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read, {error.strerror}.") from error
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise DamagedFile(f"{path}: is not the file that {MANIFEST} lists: replaced or changed since it was added.")
    return content
