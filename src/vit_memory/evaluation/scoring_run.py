"""A folder of predictions that is filled part by part, and goes on where it was stopped.

    images.jsonl         the name of every image, one JSON text per line, as listed at the first start
    run.json             the settings that decide the answers; once it is there, the run has begun
    part-00007.parquet   the predictions of one part of the list, in its order

A part appears whole or not at all, so the parts that are there are complete. Other settings are refused by name. Images
that come or go later change nothing in the list: the parts stay what they were.
"""

import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from vit_memory.data.stored_files import StoredFolder
from vit_memory.errors import DamagedFile, DataError, FileError

FORMAT = "vit-memory-predictions/1"
RUN, IMAGES = "run.json", "images.jsonl"
_PART = re.compile(r"part-(\d{5,})\.parquet")


@dataclass(frozen=True, slots=True, eq=False)
class ScoringRun:
    """A run, begun in its folder."""

    folder: StoredFolder
    images: tuple[str, ...]  # of all parts
    part_size: int

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return -(-len(self.images) // self.part_size)

    def names(self, part: int) -> tuple[str, ...]:
        """The images of a part."""
        return self.images[part * self.part_size : (part + 1) * self.part_size]

    def complete(self) -> set[int]:
        """The parts that are there."""
        matches = (_PART.fullmatch(name) for name in self.folder.names())
        return {int(match[1]) for match in matches if match is not None}


def begin_run(place: str, settings: Mapping[str, Any], images: Sequence[str], part_size: int) -> ScoringRun:
    """Begin a run over these images, or go on with the one that the folder holds, over the images listed there.

    FileError if the folder holds anything else, or a run with other settings.
    """
    folder = StoredFolder(place)
    settings = json.loads(json.dumps({**settings, "part size": part_size}))  # as they are read again
    names = folder.names()
    if RUN in names:
        return _continued(folder, settings, part_size)
    if others := sorted(name for name in names if not name.startswith(".") and name != IMAGES):
        raise FileError(f"{place}: holds {others[0]}, which is no part of a run: give a new or an empty folder.")
    if not images:
        raise DataError("no images to predict.")
    listed = "".join(f"{json.dumps(name)}\n" for name in images).encode()
    folder.write(IMAGES, listed)
    record = {"format": FORMAT, "settings": settings, "images": len(images), "images sha256": _digest(listed)}
    folder.write(RUN, json.dumps(record, indent=2).encode() + b"\n")
    return ScoringRun(folder, tuple(images), part_size)


def write_part(place: str, part: int, table: Any) -> None:
    """Write the predictions of one part."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    StoredFolder(place).write(f"part-{part:05d}.parquet", buffer.getvalue())


def _continued(folder: StoredFolder, settings: Mapping[str, Any], part_size: int) -> ScoringRun:
    where = f"{folder.place}/{RUN}"
    try:
        record = json.loads(folder.read(RUN))
        format_name, before, digest = record["format"], dict(record["settings"]), record["images sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFile(f"{where}: cannot be read ({error}). Give another folder.") from None
    if format_name != FORMAT:
        raise FileError(f"{where}: its format is {format_name!r}; expected {FORMAT!r}. Give another folder.")
    differing = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
    if differing:
        differences = "; ".join(
            f"{key}: {_short(before.get(key))} there, {_short(settings.get(key))} here" for key in differing
        )
        raise FileError(f"{folder.place}: holds predictions with other settings ({differences}). Give another folder.")
    listed = folder.read(IMAGES)
    if _digest(listed) != digest:
        raise DamagedFile(f"{folder.place}/{IMAGES}: is not the list that the run began with. Give another folder.")
    return ScoringRun(folder, tuple(json.loads(line) for line in listed.splitlines()), part_size)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"
