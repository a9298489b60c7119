"""iNaturalist 2017 and 2021, with COCO-style JSON lists or in torchvision's folders. The official validation images are
the test split.
"""

import json
from pathlib import Path

from vit_memory.data.images import ImageFiles
from vit_memory.data.readers.base import RawDataset, RawSplit
from vit_memory.data.readers.folder import read_class_folders
from vit_memory.data.readers.paths import first_existing


def read_inaturalist_2017(folder: Path) -> RawDataset:
    """Read the images that train2017.json and val2017.json list."""
    return _read_lists(folder, folder / "train2017.json", folder / "val2017.json")


def read_inaturalist_2021(folder: Path) -> RawDataset:
    """Read torchvision's folders if they exist, else the images in train.json (or train_mini.json) and val.json."""
    if (folder / "2021_train").is_dir() or (folder / "2021_train_mini").is_dir():
        ignored: list[str] = []
        train = read_class_folders(first_existing(folder, "2021_train", "2021_train_mini"), ignored)
        test = read_class_folders(first_existing(folder, "2021_valid"), ignored)
        return RawDataset("named", {"train": train, "test": test}, ignored=ignored)
    return _read_lists(folder, first_existing(folder, "train.json", "train_mini.json"), folder / "val.json")


def _read_lists(folder: Path, train_list: Path, test_list: Path) -> RawDataset:
    train, names = _read_coco(folder, train_list)
    test, _ = _read_coco(folder, test_list)
    return RawDataset("named", {"train": train, "test": test}, [names[i] for i in sorted(names)])


def _read_coco(folder: Path, listing: Path) -> tuple[RawSplit, dict[int, str]]:
    """The images of a JSON list, and its category names by id."""
    coco = json.loads(listing.read_text(encoding="utf-8"))
    names = {category["id"]: category["name"] for category in coco["categories"]}
    if len(set(names.values())) < len(names):  # one name in several supercategories
        names = {category["id"]: f"{category['supercategory']}/{category['name']}" for category in coco["categories"]}
    files = {image["id"]: image["file_name"] for image in coco["images"]}
    paths = tuple(str(folder / files[annotation["image_id"]]) for annotation in coco["annotations"])
    labels = [names[annotation["category_id"]] for annotation in coco["annotations"]]
    return RawSplit(ImageFiles(paths), labels), names
