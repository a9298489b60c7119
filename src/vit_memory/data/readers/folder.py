"""Folders of class folders, optionally inside split folders: DATA/cats/1.jpg or DATA/train/cats/1.jpg."""

import os
from collections.abc import Iterator
from pathlib import Path

from vit_memory.data.decoding import EXTENSIONS
from vit_memory.data.images import ImageFiles
from vit_memory.data.readers.base import SPLIT_NAMES, DataSource, RawDataset, RawSplit, Reader
from vit_memory.data.readers.paths import missing
from vit_memory.errors import DataError


def read_folder(folder: Path) -> RawDataset:
    """Read class folders, or split folders of class folders."""
    children = [child for child in sorted(folder.iterdir()) if child.is_dir() and not _is_hidden(child.name)]
    split_folders = {child: SPLIT_NAMES[child.name.lower()] for child in children if child.name.lower() in SPLIT_NAMES}
    ignored: list[str] = []
    # At least two split folders and nothing else: a single folder named "train" is a class.
    if len(split_folders) >= 2 and len(split_folders) == len(children):
        if len(set(split_folders.values())) < len(split_folders):
            names = ", ".join(child.name for child in split_folders)
            raise DataError(f"{folder}: two folders for one split: {names}. Merge them into one.")
        splits = {name: read_class_folders(child, ignored) for child, name in split_folders.items()}
        return RawDataset("folder", splits, ignored=ignored)
    images = [path.name for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS and path.is_file()]
    if not children and images:
        raise DataError(
            f"{folder}: {len(images)} images, but no class folders, so the images have no labels. Move the images of "
            f"each class into a folder (DATA/cats/1.jpg, DATA/dogs/2.jpg), or list them in a table with the columns "
            f"file and label."
        )
    return RawDataset("folder", {"all": read_class_folders(folder, ignored)}, ignored=ignored)


def read_class_folders(folder: Path, ignored: list[str]) -> RawSplit:
    """Read the images below every class folder, at any depth; paths of other files are appended to `ignored`."""
    paths, labels = [], []
    for child in sorted(folder.iterdir()):
        if not child.is_dir():
            if not child.name.startswith("."):
                ignored.append(str(child))
        elif not _is_hidden(child.name):
            for path in _files_below(child):
                if path.suffix.lower() in EXTENSIONS:
                    paths.append(str(path))
                    labels.append(child.name)
                else:
                    ignored.append(str(path))
    return RawSplit(ImageFiles(tuple(paths)), labels)


def read_train_and_test(train: Path, test: Path, ignored: list[str]) -> dict[str, RawSplit]:
    """Read two folders of the same classes; raises FileNotFoundError for a class that only one of them has."""
    splits = {"train": read_class_folders(train, ignored), "test": read_class_folders(test, ignored)}
    classes = {name: set(split.labels) for name, split in splits.items()}
    for folder, absent in ((train, classes["test"] - classes["train"]), (test, classes["train"] - classes["test"])):
        if absent:
            raise missing(f"images in {len(absent)} class folders of {folder}, the first {min(absent)}")
    return splits


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        for name in sorted(names):
            if not name.startswith(".") and name != "Thumbs.db":
                yield Path(parent) / name


def _is_hidden(folder_name: str) -> bool:
    return folder_name.startswith((".", "__"))


def _accepts(source: DataSource) -> bool:
    return source.path.is_dir()


FOLDER = Reader(
    "a folder of class folders:          DATA/cats/1.jpg, DATA/dogs/2.jpg\n"
    "class folders inside split folders: DATA/train/cats/1.jpg, DATA/val/…, DATA/test/…",
    _accepts,
    lambda source: read_folder(source.path),
)
