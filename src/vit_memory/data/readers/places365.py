"""Places365, as class folders or as the challenge's archives with file lists. The official validation images are the
test split.
"""

from pathlib import Path

from vit_memory.data.readers.base import RawDataset, RawSplit
from vit_memory.data.readers.folder import read_train_and_test
from vit_memory.data.readers.paths import first_existing, listed_images, text_lines

_LISTS = (  # split, file list, folders the images may be in
    ("train", "places365_train_standard.txt", ("data_256_standard", "data_256", "data_large_standard", "data_large")),
    ("test", "places365_val.txt", ("val_256", "val_large")),
)


def read_places365(folder: Path) -> RawDataset:
    """Read places365_standard/ or train/ and val/ with class folders, else the official file lists."""
    standard = folder / "places365_standard"
    if standard.exists() or (folder / "train").is_dir():
        home = standard if standard.exists() else folder
        ignored: list[str] = []
        splits = read_train_and_test(first_existing(home, "train"), first_existing(home, "val"), ignored)
        return RawDataset("named", splits, ignored=ignored)
    return _read_lists(folder)


def _read_lists(folder: Path) -> RawDataset:
    rows = [line.split() for line in text_lines(folder / "categories_places365.txt")]
    classes = [name.removeprefix("/").split("/", 1)[1] for name, _ in sorted(rows, key=lambda row: int(row[1]))]
    splits = {}
    for split, file_list, image_folders in _LISTS:
        image_folder = first_existing(folder, *image_folders)
        pairs = [line.rsplit(maxsplit=1) for line in text_lines(folder / file_list)]
        labels = [classes[int(number)] for _, number in pairs]
        names = [name.removeprefix("/") for name, _ in pairs]
        splits[split] = RawSplit(listed_images(image_folder, names, folder / file_list), labels)
    return RawDataset("named", splits, classes)
