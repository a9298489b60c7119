"""iNaturalist 2017 and 2021, with COCO-style JSON lists or in torchvision's folders. The official validation images are
the test split; iNaturalist 2017 without its lists has no official split.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from vit_memory.data.decoding import EXTENSIONS
from vit_memory.data.images import ImageFiles
from vit_memory.data.readers.base import RawDataset, RawSplit
from vit_memory.data.readers.folder import read_train_and_test
from vit_memory.data.readers.paths import first_existing, listed_images


def read_inaturalist_2017(folder: Path) -> RawDataset:
    """Read the images in train2017.json and val2017.json, or every image if neither list is there.

    The images are in train_val_images/, or in 2017/ if torchvision unpacked them.
    """
    images = first_existing(folder, "train_val_images", "2017")
    lists = next((path for path in (folder, folder / "train_val2017") if any(path.glob("*2017.json"))), None)
    if lists is None:
        return _read_species_folders(images)
    # The lists name every image train_val_images/Aves/Accipiter badius/….jpg, however that folder is called here.
    return _read_lists(images, lists / "train2017.json", lists / "val2017.json", lambda name: name.split("/", 1)[1])


def read_inaturalist_2021(folder: Path) -> RawDataset:
    """Read torchvision's folders if they exist, else the images in train.json (or train_mini.json) and val.json."""
    if (folder / "2021_train").is_dir() or (folder / "2021_train_mini").is_dir():
        ignored: list[str] = []
        train = first_existing(folder, "2021_train", "2021_train_mini")
        splits = read_train_and_test(train, first_existing(folder, "2021_valid"), ignored)
        return RawDataset("named", splits, ignored=ignored)
    train_list = first_existing(folder, "train.json", "train_mini.json")
    return _read_lists(folder, train_list, folder / "val.json", lambda name: name)


def _read_species_folders(folder: Path) -> RawDataset:
    """Every image of folders such as Aves/Accipiter badius/, without a split. Classes are in the folders' order."""
    species = [child for parent in _folders_in(folder) for child in _folders_in(parent)]
    names = _distinct([(path.parent.name, path.name) for path in species])
    paths, labels = [], []
    for path, name in zip(species, names, strict=True):
        images = sorted(file for file in path.iterdir() if file.suffix.lower() in EXTENSIONS)
        paths += [str(file) for file in images]
        labels += [name] * len(images)
    return RawDataset("named", {"all": RawSplit(ImageFiles(tuple(paths)), labels)}, names)


def _folders_in(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))


def _read_lists(images: Path, train_list: Path, test_list: Path, path_of: Callable[[str], str]) -> RawDataset:
    train, names = _read_coco(images, train_list, path_of)
    test, _ = _read_coco(images, test_list, path_of)
    return RawDataset("named", {"train": train, "test": test}, [names[i] for i in sorted(names)])


def _read_coco(images: Path, listing: Path, path_of: Callable[[str], str]) -> tuple[RawSplit, dict[int, str]]:
    """The images of a JSON list, and its category names by id. `path_of`: the path in `images` of a listed name."""
    coco = json.loads(listing.read_text(encoding="utf-8"))
    categories = coco["categories"]
    distinct = _distinct([(category.get("supercategory", ""), category["name"]) for category in categories])
    names = {category["id"]: name for category, name in zip(categories, distinct, strict=True)}
    files = {image["id"]: image["file_name"] for image in coco["images"]}
    labels = [names[annotation["category_id"]] for annotation in coco["annotations"]]
    paths = [path_of(files[annotation["image_id"]]) for annotation in coco["annotations"]]
    return RawSplit(listed_images(images, paths, listing), labels), names


def _distinct(species: Sequence[tuple[str, str]]) -> list[str]:
    """Names of (supercategory, species): with the supercategory if two species have one name."""
    if max(Counter(name for _, name in species).values(), default=1) > 1:
        return [f"{parent}/{name}" for parent, name in species]
    return [name for _, name in species]
