"""`bundle.json`, the manifest of a bundle: its backbone, and the file, checksum and parents of every task."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vit_memory.backbone import BackboneIdentity
from vit_memory.errors import DamagedFile, FileError, TaskError, UnsafeFile
from vit_memory.files.atomic import write_atomic
from vit_memory.files.container import parse_json
from vit_memory.files.taskfile import check_format
from vit_memory.task import check_name

FORMAT, VERSION = "vit-memory-bundle", 1
MANIFEST, TASKS = "bundle.json", "tasks"


@dataclass(frozen=True, slots=True)
class Entry:
    """One task of a bundle, as the manifest lists it."""

    name: str
    file: str  # below tasks/
    sha256: str  # of the file
    parents: tuple[str, ...]


def read_manifest(folder: Path) -> tuple[BackboneIdentity, tuple[Entry, ...]]:
    """The backbone and the tasks of the bundle in a folder."""
    path = folder / MANIFEST
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        check_format(path, content["format"], FORMAT, VERSION)
        entries = tuple(_entry(path, values) for values in content["tasks"])
        return BackboneIdentity(**content["backbone"]), entries
    except FileNotFoundError:
        raise FileError(f"{folder}: not a bundle, it has no {MANIFEST}.{_remedy(folder)}") from None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{path}: cannot be read as a bundle: {error}.") from None


def write_manifest(folder: Path, backbone: BackboneIdentity, entries: Sequence[Entry]) -> None:
    """Write or replace `bundle.json`, whole or not at all."""
    content = {
        "format": f"{FORMAT}/{VERSION}",
        "backbone": asdict(backbone),
        "tasks": [asdict(entry) for entry in entries],
    }
    write_atomic(folder / MANIFEST, [json.dumps(content, indent=2, ensure_ascii=False).encode(), b"\n"])


def bundle_of(path: Path) -> Path | None:
    """The folder of the bundle that a task file belongs to, if any."""
    whole = path if path.parent.name == TASKS else path.absolute()
    folder = whole.parent.parent
    return folder if whole.parent.name == TASKS and (folder / MANIFEST).exists() else None


def _remedy(folder: Path) -> str:
    if (folder / TASKS).is_dir():
        return (
            f" Its {TASKS}/ may be left from an interrupted command: create or pull the bundle again in another folder."
        )
    return " Create one: vit-memory bundle create"


def _entry(path: Path, values: Mapping[str, Any]) -> Entry:
    entry = Entry(values["name"], values["file"], values["sha256"], tuple(values["parents"]))
    try:
        check_name(entry.name)
    except TaskError as error:
        raise UnsafeFile(f"{path}: {error}") from None
    if not isinstance(entry.file, str) or Path(entry.file).name != entry.file or entry.file in ("", ".", ".."):
        raise UnsafeFile(f"{path}: task {entry.name!r} names the file {entry.file!r}, outside {TASKS}/. Not opened.")
    return entry
