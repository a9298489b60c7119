"""SUN397, split by the first official partition if its lists are present."""

from collections.abc import Mapping
from pathlib import Path

from vit_memory.data.images import ImageFiles
from vit_memory.data.readers.base import RawDataset, RawSplit
from vit_memory.data.readers.paths import first_existing, text_lines

_PARTITION = {"train": "Training_01.txt", "test": "Testing_01.txt"}


def read_sun397(data_dir: Path) -> RawDataset:
    """Read SUN397/, whose class folders are up to three levels deep: /a/abbey or /a/apse/indoor."""
    folder = first_existing(data_dir, "SUN397")
    labels = {name: name.split("/", 2)[2] for name in text_lines(folder / "ClassName.txt")}  # by class folder
    candidates = (data_dir / "Partitions", data_dir, folder)
    lists = next((path for path in candidates if (path / _PARTITION["train"]).exists()), None)
    if lists is None:
        files = [f"{name}/{path.name}" for name in labels for path in sorted((folder / name[1:]).glob("*.jpg"))]
        splits = {"all": _split(folder, files, labels)}
    else:
        splits = {split: _split(folder, text_lines(lists / file), labels) for split, file in _PARTITION.items()}
    return RawDataset("named", splits, list(labels.values()))


def _split(folder: Path, files: list[str], labels: Mapping[str, str]) -> RawSplit:
    """Images by their paths in `folder`, such as /a/abbey/sun_1.jpg."""
    paths = tuple(str(folder / file.removeprefix("/")) for file in files)
    return RawSplit(ImageFiles(paths), [labels[file.rsplit("/", 1)[0]] for file in files])
