"""ImageNet-1k, as its official archives or Kaggle's unpack. The official validation images are the test split."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from vit_memory.data.images import ImageFiles
from vit_memory.data.readers.base import RawDataset, RawSplit
from vit_memory.data.readers.folder import read_class_folders, read_train_and_test
from vit_memory.data.readers.paths import first_existing
from vit_memory.errors import DataError


def read_imagenet(folder: Path) -> RawDataset:
    """Read training images from synset folders; validation images from synset folders, or with an official label file.

    A flat folder of validation images needs LOC_val_solution.csv or ILSVRC2012_devkit_t12/.
    """
    images_folder = folder / "ILSVRC/Data/CLS-LOC" if (folder / "ILSVRC").exists() else folder
    ignored: list[str] = []
    train_folder, val_folder = first_existing(images_folder, "train"), first_existing(images_folder, "val")
    if any(child.is_dir() for child in val_folder.iterdir()):
        return RawDataset("named", read_train_and_test(train_folder, val_folder, ignored), ignored=ignored)
    train = read_class_folders(train_folder, ignored)
    test = _read_flat(val_folder, _validation_synsets(folder), folder)
    return RawDataset("named", {"train": train, "test": test}, ignored=ignored)


def _read_flat(val_folder: Path, synsets: Mapping[str, str], data_dir: Path) -> RawSplit:
    paths = sorted(str(path) for path in val_folder.iterdir() if path.suffix == ".JPEG")
    unlabelled = [path for path in paths if Path(path).stem not in synsets]
    if unlabelled:
        raise DataError(f"{unlabelled[0]}: no label for this validation image in {data_dir}.")
    return RawSplit(ImageFiles(tuple(paths)), [synsets[Path(path).stem] for path in paths])


def _validation_synsets(folder: Path) -> Mapping[str, str]:
    """The synset of every validation image, by file stem."""
    solution = folder / "LOC_val_solution.csv"
    if solution.exists():
        with solution.open(newline="") as file:
            return {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(file)}
    devkit = first_existing(folder, "ILSVRC2012_devkit_t12") / "data"
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DataError(f"{devkit}: reading meta.mat needs scipy; or add LOC_val_solution.csv to {folder}.") from error
    synsets = loadmat(io.BytesIO((devkit / "meta.mat").read_bytes()), squeeze_me=True)["synsets"]
    by_number = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    numbers = (devkit / "ILSVRC2012_validation_ground_truth.txt").read_text().split()
    return {f"ILSVRC2012_val_{i:08d}": by_number[int(number)] for i, number in enumerate(numbers, 1)}
