"""`bundle.json`, the manifest of a bundle: its backbone, and the file and checksum of every task and branch.

`vit-memory-bundle/1` lists `tasks` with their parents; `vit-memory-bundle/2` also `branches`, and which task stands on
which. A bundle without branches is written in version 1.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vit_memory.atomic import write_atomic
from vit_memory.backbone import BackboneIdentity
from vit_memory.errors import DamagedFile, FileError, TaskError, UnsafeFile
from vit_memory.files.container import parse_json
from vit_memory.files.description import check_format, read_backbone, read_text
from vit_memory.task import check_name

FORMAT, VERSION = "vit-memory-bundle", 2
MANIFEST, TASKS, BRANCHES = "bundle.json", "tasks", "branches"


@dataclass(frozen=True, slots=True)
class Entry:
    """One task of a bundle, as the manifest lists it."""

    name: str
    file: str  # below tasks/
    sha256: str  # of the file
    parents: tuple[str, ...]
    branch: str | None = None  # the name of the branch that it stands on

    def record(self) -> dict[str, Any]:
        """As JSON values; without `branch` where there is none, as version 1 has it."""
        values = asdict(self)
        return values if self.branch is not None else {k: v for k, v in values.items() if k != "branch"}


@dataclass(frozen=True, slots=True)
class BranchEntry:
    """One branch of a bundle, as the manifest lists it."""

    name: str
    file: str  # below branches/
    sha256: str  # of the file


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `bundle.json`."""

    backbone: BackboneIdentity
    entries: tuple[Entry, ...]
    branch_entries: tuple[BranchEntry, ...] = ()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the bundle in a folder."""
    path = folder / MANIFEST
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        check_format(path, content["format"], FORMAT, VERSION)
        entries = tuple(_entry(path, values) for values in content["tasks"])
        branches = tuple(_branch_entry(path, values) for values in content.get("branches", ()))
        return Manifest(read_backbone(content["backbone"]), entries, branches)
    except FileNotFoundError:
        raise FileError(f"{folder}: not a bundle, it has no {MANIFEST}.{_remedy(folder)}") from None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{path}: cannot be read as a bundle: {error}.") from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write or replace `bundle.json`, whole or not at all."""
    content: dict[str, Any] = {
        "format": f"{FORMAT}/{2 if manifest.branch_entries else 1}",
        "backbone": asdict(manifest.backbone),
        "tasks": [entry.record() for entry in manifest.entries],
    }
    if manifest.branch_entries:
        content["branches"] = [asdict(entry) for entry in manifest.branch_entries]
    write_atomic(folder / MANIFEST, [json.dumps(content, indent=2, ensure_ascii=False).encode(), b"\n"])


def bundle_of(path: Path) -> Path | None:
    """The folder of the bundle that a task or branch file belongs to, if any."""
    places = (TASKS, BRANCHES)
    whole = path if path.parent.name in places else path.absolute()
    folder = whole.parent.parent
    return folder if whole.parent.name in places and (folder / MANIFEST).exists() else None


def _remedy(folder: Path) -> str:
    if (folder / TASKS).is_dir():
        return (
            f" Its {TASKS}/ may be left from an interrupted command: create or pull the bundle again in another folder."
        )
    return " Create one: vit-memory bundle create"


def _entry(path: Path, values: Mapping[str, Any]) -> Entry:
    parents = tuple(read_text(parent, "parents") for parent in values["parents"])
    branch = values.get("branch")
    entry = Entry(*_texts(values), parents, None if branch is None else read_text(branch, "branch"))
    _check_entry(path, entry, "task", TASKS)
    return entry


def _branch_entry(path: Path, values: Mapping[str, Any]) -> BranchEntry:
    entry = BranchEntry(*_texts(values))
    _check_entry(path, entry, "branch", BRANCHES)
    return entry


def _texts(values: Mapping[str, Any]) -> tuple[str, str, str]:
    name, file, sha256 = (read_text(values[key], key) for key in ("name", "file", "sha256"))
    return name, file, sha256


def _check_entry(path: Path, entry: Entry | BranchEntry, what: str, folder: str) -> None:
    try:
        check_name(entry.name, what)
    except TaskError as error:
        raise UnsafeFile(f"{path}: {error}") from None
    if Path(entry.file).name != entry.file or entry.file in ("", ".", ".."):
        raise UnsafeFile(f"{path}: {what} {entry.name!r} names the file {entry.file!r}, outside {folder}/. Not opened.")
