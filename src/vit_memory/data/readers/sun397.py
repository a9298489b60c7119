"""SUN397, split by the first official partition if its lists are present."""

from collections.abc import Mapping
from pathlib import Path

from vit_memory.data.images import ImageFiles
from vit_memory.data.readers.base import RawDataset, RawSplit
from vit_memory.data.readers.paths import first_existing, listed_images, missing, text_lines

_PARTITION = {"train": "Training_01.txt", "test": "Testing_01.txt"}


def read_sun397(data_dir: Path) -> RawDataset:
    """Read SUN397/, whose class folders are up to three levels deep: /a/abbey or /a/apse/indoor."""
    folder = first_existing(data_dir, "SUN397")
    labels = {name: name.split("/", 2)[2] for name in text_lines(folder / "ClassName.txt")}  # by class folder
    candidates = (data_dir / "Partitions", data_dir, folder)
    lists = next((path for path in candidates if any((path / file).exists() for file in _PARTITION.values())), None)
    if lists is None:
        splits = {"all": _read_all(folder, labels)}
    else:
        splits = {split: _read_list(folder, lists / file, labels) for split, file in _PARTITION.items()}
    return RawDataset("named", splits, list(labels.values()))


def _read_all(folder: Path, labels: Mapping[str, str]) -> RawSplit:
    """Every image of every class in ClassName.txt."""
    images = {name: sorted((folder / name[1:]).glob("*.jpg")) for name in labels}
    empty = [folder / name[1:] for name, paths in images.items() if not paths]
    if empty:
        raise missing(f"the images of {len(empty)} of the {len(labels)} classes in ClassName.txt, the first {empty[0]}")
    paths = [str(path) for found in images.values() for path in found]
    return RawSplit(ImageFiles(tuple(paths)), [labels[name] for name, found in images.items() for _ in found])


def _read_list(folder: Path, file_list: Path, labels: Mapping[str, str]) -> RawSplit:
    """The images of a partition, which names them by their paths in `folder`, such as /a/abbey/sun_1.jpg."""
    files = text_lines(file_list)
    split_labels = [labels[file.rsplit("/", 1)[0]] for file in files]
    return RawSplit(listed_images(folder, [file.removeprefix("/") for file in files], file_list), split_labels)
