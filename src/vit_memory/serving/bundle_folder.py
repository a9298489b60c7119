"""The bundle folder behind a server: read again when it changes, and changed whole or not at all.

`bundle.json` names every file with its checksum, so reading a changed folder costs the files that are new in it. What
did not change keeps its identity, which is how the engine knows what it has prepared already. Nothing here knows of
requests or events; all of it may wait for the disk and belongs in a thread.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vit_memory.branch import Branch
from vit_memory.errors import FileError
from vit_memory.files.bundle import Bundle
from vit_memory.files.manifest import MANIFEST, BranchEntry, Entry
from vit_memory.graph import TaskGraph
from vit_memory.task import Task

_ATTEMPTS = 5  # to read a folder that others change meanwhile
Stamp = tuple[int, int, int]


class BundleFolder:
    """A bundle on the disk, with what was read of it last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bundle = Bundle.open(folder)
        self._items: dict[Entry | BranchEntry, Any] = {}  # Task of an Entry, Branch of a BranchEntry
        self.stamp_read: Stamp | None = None  # the stamp of what was read last

    @property
    def backbone(self) -> str:
        """The name of the backbone that it is for."""
        return self._bundle.backbone.name

    def stamp(self) -> Stamp | None:
        """Changes whenever the manifest is replaced; None while there is none."""
        try:
            status = (self.folder / MANIFEST).stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size

    def read(self) -> TaskGraph:
        """What the folder holds now; only files that are new are read. FileError or GraphError if it is damaged."""
        for attempt in range(_ATTEMPTS):
            stamp = self.stamp()  # before reading: a change meanwhile is seen next time
            bundle = Bundle.open(self.folder)
            try:
                items = {entry: self._item(bundle, entry) for entry in bundle.all_entries}
            except FileError:
                # A file that was replaced after the manifest was read; if the manifest is the same, it is damaged.
                if attempt == _ATTEMPTS - 1 or Bundle.open(self.folder).manifest == bundle.manifest:
                    raise
                continue
            self._bundle, self._items, self.stamp_read = bundle, items, stamp
            break
        return TaskGraph(*_sorted(self._items.values()))

    def put(self, item: Task | Branch, graph: TaskGraph) -> None:
        """Write a task or branch; `graph` is what the folder holds afterwards. Hold its lock."""
        tasks, branches = _sorted([item])
        self._remember(self._bundle.put(tasks, branches, graph), graph)

    def remove(self, tasks: Sequence[str], branches: Sequence[str], graph: TaskGraph) -> None:
        """Remove tasks and branches; `graph` is what the folder holds afterwards. Hold its lock."""
        self._remember(self._bundle.remove(tasks, branches), graph)

    def _item(self, bundle: Bundle, entry: Entry | BranchEntry) -> Task | Branch:
        if entry in self._items:
            item: Task | Branch = self._items[entry]
            return item
        return bundle.task(entry.name) if isinstance(entry, Entry) else bundle.branch(entry.name)

    def _remember(self, bundle: Bundle, graph: TaskGraph) -> None:
        self._bundle, self.stamp_read = bundle, self.stamp()
        self._items = {
            entry: graph[entry.name] if isinstance(entry, Entry) else graph.branches[entry.name]
            for entry in bundle.all_entries
        }


def _sorted(items: Iterable[Task | Branch]) -> tuple[list[Task], list[Branch]]:
    tasks: list[Task] = []
    branches: list[Branch] = []
    for item in items:
        if isinstance(item, Task):
            tasks.append(item)
        else:
            branches.append(item)
    return tasks, branches
