"""A bundle: a folder with a backbone reference, task files and the graph between them.

    my-bundle/
      bundle.json              what is in it: format, backbone, and per task its file, checksum and parents
      tasks/pets.safetensors   one file per task

`bundle.json` is written last when something is added and first when something is removed, each time whole or not at
all; a file that it mentions is never overwritten. So at any moment the folder holds a valid bundle, at worst with a
task file that nobody mentions.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from vit_memory.backbone import Backbone, BackboneIdentity, load_backbone
from vit_memory.errors import BackboneMismatch, DamagedFile, FileError, GraphError, TaskError, UnsafeFile
from vit_memory.files.atomic import write_atomic
from vit_memory.files.container import parse_json
from vit_memory.files.taskfile import check_format, load_task, save_task
from vit_memory.graph import TaskGraph, rename_tasks
from vit_memory.model import MemoryViT
from vit_memory.task import Task, check_name

FORMAT, VERSION = "vit-memory-bundle", 1
MANIFEST, TASKS = "bundle.json", "tasks"


@dataclass(frozen=True, slots=True)
class Entry:
    """One task of a bundle, as the manifest has it."""

    name: str
    file: str  # below tasks/
    sha256: str  # of the file
    parents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle: the manifest's content. Changes go to the folder and give a new value."""

    folder: Path
    backbone: BackboneIdentity
    entries: tuple[Entry, ...]

    @staticmethod
    def begin(folder: Path | str, backbone: Backbone | BackboneIdentity) -> "Bundle":
        """A bundle for a new or empty folder. Nothing is written before something is added."""
        folder = Path(folder)
        if (folder / MANIFEST).exists():
            raise FileError(f"{folder}: holds a bundle already. vit-memory bundle add {folder} … adds to it.")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileError(f"{folder}: is not an empty folder; give another name.")
        return Bundle(folder, backbone.identity if isinstance(backbone, Backbone) else backbone, ())

    @staticmethod
    def create(folder: Path | str, backbone: Backbone | BackboneIdentity, tasks: Iterable[Task] = ()) -> "Bundle":
        """Write a bundle with these tasks, or with none yet, into a new or empty folder."""
        return Bundle.begin(folder, backbone).add(list(tasks))

    @staticmethod
    def open(folder: Path | str) -> "Bundle":
        """Read the manifest of a bundle; task files are read when they are asked for."""
        folder = Path(folder)
        manifest = folder / MANIFEST
        try:
            told = parse_json(manifest.read_text(encoding="utf-8"))
            check_format(manifest, told["format"], FORMAT, VERSION)
            entries = tuple(_entry(manifest, entry) for entry in told["tasks"])
            return Bundle(folder, BackboneIdentity(**told["backbone"]), entries)
        except FileNotFoundError:
            raise FileError(f"{folder}: no bundle here (no {MANIFEST}). vit-memory bundle create makes one.") from None
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFile(f"{manifest}: cannot be read as a bundle: {error}.") from None

    def path(self, entry: Entry) -> Path:
        """Where the file of a task is."""
        return self.folder / TASKS / entry.file

    def tasks(self) -> list[Task]:
        """Every task, each file checked against the manifest."""
        return [self.task(entry.name) for entry in self.entries]

    def task(self, name: str) -> Task:
        """One task by name."""
        entry = next((entry for entry in self.entries if entry.name == name), None)
        if entry is None:
            known = ", ".join(entry.name for entry in self.entries) or "none"
            raise FileError(f"{self.folder}: no task {name!r} in this bundle. Tasks: {known}.")
        path = self.path(entry)
        task = load_task(path)
        _content(path, entry)
        if task.name != name or task.parents != entry.parents:
            raise DamagedFile(
                f"{path}: holds a task {task.name!r} that extends {', '.join(task.parents) or 'nothing'}; "
                f"{MANIFEST} says {name!r}, which extends {', '.join(entry.parents) or 'nothing'}."
            )
        return task

    def add(self, tasks: Sequence[Task], *, half: bool | None = None) -> "Bundle":
        """Put tasks trained apart side by side (concatenation), or on top of one another (extension); all or none.

        `half` as in `save_task`: by default, float16 tasks stay float16.
        """
        self._checked([*self.tasks(), *tasks])
        bundle = self
        for task in tasks:
            bundle = replace(bundle, entries=(*bundle.entries, bundle._write_task(task, half=half)))
        bundle._write()
        return bundle

    def rename(self, old: str, new: str) -> "Bundle":
        """Give a task another name, in the tasks that extend it too; all or nothing."""
        check_name(new)
        tasks = {task.name: task for task in self.tasks()}
        if old not in tasks:
            self.task(old)  # says which there are
        if new in tasks:
            raise GraphError(f"{self.folder}: there is a task {new!r} already; nothing was changed.")
        renamed = rename_tasks(
            tasks, {old: new}, {name: {parent: parent for parent in task.parents} for name, task in tasks.items()}
        )
        self._checked(list(renamed.values()))
        # New files first, under names that nothing has; then the manifest that mentions them. What had to take another
        # name, since the old version had its own, gets it afterwards in the same way.
        old_and_new, entries = self, []
        for entry in self.entries:
            if renamed[entry.name] is not tasks[entry.name]:
                entry = old_and_new._write_task(renamed[entry.name])  # noqa: PLW2901 - in its place
                old_and_new = replace(old_and_new, entries=(*old_and_new.entries, entry))
            entries.append(entry)
        bundle = replace(self, entries=tuple(entries))
        bundle._write()
        self._unlink_unused(bundle)
        return bundle._with_plain_file_names()

    def remove(self, names: Sequence[str]) -> "Bundle":
        """Take tasks out; refused while another task extends one of them."""
        for name in names:
            if all(entry.name != name for entry in self.entries):
                self.task(name)  # says which there are
        for entry in self.entries:
            needed = [parent for parent in entry.parents if parent in names]
            if needed and entry.name not in names:
                raise GraphError(
                    f"{self.folder}: task {entry.name!r} extends {', '.join(needed)}: remove {entry.name!r} too."
                )
        bundle = replace(self, entries=tuple(entry for entry in self.entries if entry.name not in names))
        bundle._write()
        self._unlink_unused(bundle)
        return bundle

    def check(self) -> TaskGraph:
        """Read everything and make sure that it goes together."""
        return self._checked(self.tasks())

    def model(self, backbone: Backbone | None = None) -> MemoryViT:
        """The backbone with every task attached. Without one given, the backbone is loaded from where it was named."""
        return MemoryViT(backbone or load_backbone(self.backbone.name), self.tasks())

    def save_pretrained(self, folder: Path | str) -> None:
        """Copy the bundle to a new or empty folder: the same files, each compared with its checksum on the way."""
        copied = replace(Bundle.begin(folder, self.backbone), entries=self.entries)
        self.check()
        for entry in self.entries:
            content = _content(self.path(entry), entry)
            write_atomic(copied.path(entry), [content])
        copied._write()

    @staticmethod
    def from_pretrained(source: Path | str, **hub_options: Any) -> "Bundle":
        """Open a bundle from a folder, or from the hub by `user/repo`."""
        if Path(source).exists():
            return Bundle.open(source)
        from vit_memory.files.hub import pull  # noqa: PLC0415 - the hub's library is an extra

        return pull(str(source), **hub_options)

    def _checked(self, tasks: Sequence[Task]) -> TaskGraph:
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
        """Write a task file under a name that no file of this bundle has, on any file system."""
        taken = {entry.file.casefold() for entry in self.entries}
        names = (f"{task.name}{ending}.safetensors" for ending in chain([""], (f".{i}" for i in count(1))))
        file = next(file for file in names if file.casefold() not in taken)
        path = self.folder / TASKS / file
        save_task(task, path, half=half)
        return Entry(task.name, file, _sha256(path), task.parents)

    def _with_plain_file_names(self) -> "Bundle":
        """This bundle with every file called `<task>.safetensors`, where no other task has that file."""
        taken = {entry.file.casefold() for entry in self.entries}
        moved = [e for e in self.entries if f"{e.name}.safetensors".casefold() not in taken]
        if not moved:
            return self
        for entry in moved:
            content = _content(self.path(entry), entry)
            write_atomic(self.folder / TASKS / f"{entry.name}.safetensors", [content])
        entries = (replace(e, file=f"{e.name}.safetensors") if e in moved else e for e in self.entries)
        bundle = replace(self, entries=tuple(entries))
        bundle._write()
        self._unlink_unused(bundle)
        return bundle

    def _unlink_unused(self, after: "Bundle") -> None:
        """Delete the files of this bundle that the manifest after a change no longer mentions."""
        for file in {entry.file for entry in self.entries} - {entry.file for entry in after.entries}:
            (self.folder / TASKS / file).unlink(missing_ok=True)

    def _write(self) -> None:
        told = {
            "format": f"{FORMAT}/{VERSION}",
            "backbone": asdict(self.backbone),
            "tasks": [asdict(entry) for entry in self.entries],
        }
        write_atomic(self.folder / MANIFEST, [json.dumps(told, indent=2, ensure_ascii=False).encode(), b"\n"])


def bundle_of(path: Path) -> Path | None:
    """The folder of the bundle that a task file belongs to, if any."""
    whole = path if path.parent.name == TASKS else path.absolute()
    folder = whole.parent.parent
    return folder if whole.parent.name == TASKS and (folder / MANIFEST).exists() else None


def _entry(manifest: Path, told: Mapping[str, Any]) -> Entry:
    entry = Entry(told["name"], told["file"], told["sha256"], tuple(told["parents"]))
    try:
        check_name(entry.name)
    except TaskError as error:
        raise UnsafeFile(f"{manifest}: {error}") from None
    if not isinstance(entry.file, str) or Path(entry.file).name != entry.file or entry.file in ("", ".", ".."):
        raise UnsafeFile(
            f"{manifest}: task {entry.name!r} names the file {entry.file!r}, outside {TASKS}/. Not opened."
        )
    return entry


def _content(path: Path, entry: Entry) -> bytes:
    """The bytes of a task file, compared with the manifest."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read, {error.strerror}.") from error
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise DamagedFile(f"{path}: is not the file that {MANIFEST} speaks of: replaced or changed since it was added.")
    return content


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
