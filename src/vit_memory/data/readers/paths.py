"""Paths inside the unpacked archives of named datasets."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from vit_memory.data.images import ImageFiles


def first_existing(folder: Path, *candidates: str) -> Path:
    """The first candidate that exists in `folder`; raises FileNotFoundError with the first one if none does."""
    for candidate in candidates:
        if (folder / candidate).exists():
            return folder / candidate
    raise missing(folder / candidates[0])


def missing(what: Path | str) -> FileNotFoundError:
    """The error for a part of an archive that is not there."""
    return FileNotFoundError(2, "missing", str(what))


def text_lines(path: Path) -> list[str]:
    """The lines of a text file, stripped, without empty ones."""
    return [line.strip() for line in path.read_text().splitlines() if line.strip()]


def listed_images(folder: Path, names: Sequence[str], file_list: Path) -> ImageFiles:
    """The images that an official list names, such as a/abbey/1.jpg; raises FileNotFoundError if some are not there.

    Each folder is read once, which takes seconds for the 1.8 million images of Places365.
    """
    paths = [f"{folder}/{name}" for name in names]
    parents = {path.rpartition("/")[0] for path in paths}
    there = {parent: {child.name for child in _children(Path(parent))} for parent in parents}
    absent = [path for path in paths if path.rpartition("/")[2] not in there[path.rpartition("/")[0]]]
    if absent:
        raise missing(f"{len(absent)} of the {len(paths)} images in {file_list.name}, the first {absent[0]}")
    return ImageFiles(tuple(paths))


def _children(folder: Path) -> Iterator["os.DirEntry[str]"]:
    if folder.is_dir():
        with os.scandir(folder) as entries:
            yield from entries
