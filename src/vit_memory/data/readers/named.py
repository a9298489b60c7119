"""Datasets by name (cifar10, imagenet-1k, …), read from --data-dir as their official archives unpack.

The official validation images of imagenet-1k, inaturalist and places365 are the test split, because results are
reported on them; a validation split is drawn from the training images. Of sun397 and inaturalist-2017 without their
official lists, the test split is drawn too. A new dataset is one file and one entry here.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_memory.data.readers.base import DataSource, RawDataset, Reader
from vit_memory.data.readers.cifar import read_cifar10, read_cifar100
from vit_memory.data.readers.imagenet import read_imagenet
from vit_memory.data.readers.inaturalist import read_inaturalist_2017, read_inaturalist_2021
from vit_memory.data.readers.places365 import read_places365
from vit_memory.data.readers.sun397 import read_sun397
from vit_memory.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamedDataset:
    """How a dataset is read and, through torchvision, downloaded."""

    read: Callable[[Path], RawDataset]  # from --data-dir
    classes: int
    archives: tuple[str, ...]  # the official files to download and unpack
    expected_files: str  # in --data-dir
    torchvision: Mapping[str, Mapping[str, Any]] | None = None  # per download: class and arguments; None: not offered


DATASETS: Mapping[str, NamedDataset] = {
    "cifar10": NamedDataset(
        read_cifar10,
        10,
        ("cifar-10-python.tar.gz",),
        "cifar-10-batches-py/ or cifar-10-batches-bin/",
        {"train": {"cls": "CIFAR10", "train": True}},
    ),
    "cifar100": NamedDataset(
        read_cifar100,
        100,
        ("cifar-100-python.tar.gz",),
        "cifar-100-python/ or cifar-100-binary/",
        {"train": {"cls": "CIFAR100", "train": True}},
    ),
    "imagenet-1k": NamedDataset(
        read_imagenet,
        1000,
        ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"),
        "train/n01440764/…, and val/ in such folders or flat with LOC_val_solution.csv or ILSVRC2012_devkit_t12/",
    ),
    "inaturalist-2017": NamedDataset(
        read_inaturalist_2017,
        5089,
        ("train_val_images.tar.gz", "train_val2017.zip"),
        "train_val_images/Aves/Accipiter badius/… (or 2017/Aves/…, as torchvision names it) and, for the official "
        "split, train2017.json and val2017.json",
        {"all": {"cls": "INaturalist", "version": "2017"}},
    ),
    "inaturalist-2021": NamedDataset(
        read_inaturalist_2021,
        10_000,
        ("train.tar.gz", "val.tar.gz", "train.json.tar.gz", "val.json.tar.gz"),
        "train/ (or train_mini/), val/, train.json (or train_mini.json) and val.json",
        {
            "train": {"cls": "INaturalist", "version": "2021_train"},
            "val": {"cls": "INaturalist", "version": "2021_valid"},
        },
    ),
    "places365": NamedDataset(
        read_places365,
        365,
        ("train_256_places365standard.tar", "val_256.tar", "filelist_places365-standard.tar"),
        "places365_standard/train/ and val/; or data_256/a/airfield/… (or data_256_standard/, as torchvision names it) "
        "and val_256/ with places365_train_standard.txt, places365_val.txt and categories_places365.txt",
        {
            "train": {"cls": "Places365", "split": "train-standard", "small": True},
            "val": {"cls": "Places365", "split": "val", "small": True},
        },
    ),
    "sun397": NamedDataset(
        read_sun397,
        397,
        ("SUN397.tar.gz", "Partitions.zip"),
        "SUN397/ClassName.txt, SUN397/a/abbey/… and, for the official split, Partitions/Training_01.txt and "
        "Testing_01.txt",
        {"all": {"cls": "SUN397"}},
    ),
}


def read_named(source: DataSource) -> RawDataset:
    """Read a named dataset from `data_dir`, after downloading it there if `download` is set."""
    name, data_dir = source.name, source.data_dir
    dataset = DATASETS[name]
    if data_dir is None:
        raise DataError(f"{name}: needs its folder, --data-dir. Expected in it: {dataset.expected_files}.")
    if source.download:
        _download(name, dataset, data_dir)
    if not data_dir.is_dir():
        raise DataError(f"{data_dir}: no such folder. {_advice(name, dataset, data_dir)}")
    try:
        raw = dataset.read(data_dir)
    except FileNotFoundError as error:
        raise DataError(
            f"{data_dir}: {name} is incomplete. Missing: {error.filename or error}. {_advice(name, dataset, data_dir)}"
        ) from error
    except (LookupError, ValueError, TypeError, AttributeError) as error:  # incomplete or unofficial lists
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise DataError(
            f"{data_dir}: the files of {name} are damaged or not the official ones ({reason}). "
            f"{_advice(name, dataset, data_dir)}"
        ) from error
    _check_classes(name, dataset, data_dir, raw)
    return raw


def _advice(name: str, dataset: NamedDataset, data_dir: Path) -> str:
    """What to download or unpack, and what the folder looks like then."""
    there = [archive for archive in dataset.archives if (data_dir / archive).is_file()]
    absent = [archive for archive in dataset.archives if archive not in there]
    steps = []
    if there:
        steps.append(f"unpack {', '.join(there)} there, completely")
    if absent:
        what = "it" if len(absent) == 1 else "them"
        steps.append(f"download {', '.join(absent)} from the official site of {name} and unpack {what} there")
    if dataset.torchvision and not there:
        steps[-1] += ", or add --download"
    return f"To get it, {'; '.join(steps)}. Expected in the folder: {dataset.expected_files}."


def _check_classes(name: str, dataset: NamedDataset, data_dir: Path, raw: RawDataset) -> None:
    """Folders without a list cannot show what is missing, but a half-unpacked archive often lacks whole classes."""
    classes = len({label for split in raw.splits.values() for label in split.labels})
    if classes != dataset.classes:
        log.warning(
            "%s: %d classes; the official %s has %d. If this is not a subset of your own, unpack its archives again.",
            data_dir,
            classes,
            name,
            dataset.classes,
        )


def _download(name: str, dataset: NamedDataset, data_dir: Path) -> None:
    if dataset.torchvision is None:
        raise DataError(
            f"{name}: torchvision cannot download it. Download it from its official site, which may ask you to "
            f"register, and unpack it into {data_dir}."
        )
    try:
        from torchvision import datasets
    except ImportError as error:
        raise DataError(f"{name}: downloading needs torchvision: pip install torchvision") from error
    data_dir.mkdir(parents=True, exist_ok=True)
    for split, options in dataset.torchvision.items():
        arguments = {key: value for key, value in options.items() if key != "cls"}
        try:
            getattr(datasets, options["cls"])(str(data_dir), download=True, **arguments)
        except (OSError, RuntimeError) as error:
            # torchvision raises this if the extracted folder is already there
            if "already exists" not in str(error):
                raise DataError(f"{name}: downloading its {split} images failed ({error}).") from error


NAMED = Reader(
    "the name of a dataset:              " + ", ".join(list(DATASETS)[:4]) + ",\n"
    "                                    " + ", ".join(list(DATASETS)[4:]) + "; needs --data-dir",
    lambda source: source.name in DATASETS and not source.path.exists(),
    read_named,
)
