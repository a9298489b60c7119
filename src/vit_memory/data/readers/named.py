"""Datasets by name (cifar10, imagenet-1k, …), read from --data-dir as their official archives unpack.

The official validation images of imagenet-1k, inaturalist and places365 are the test split, because results are
reported on them; a validation split is drawn from the training images. A new dataset is one file and one entry here.
"""

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


@dataclass(frozen=True, slots=True)
class NamedDataset:
    """How a dataset is read and, through torchvision, downloaded."""

    read: Callable[[Path], RawDataset]  # from --data-dir
    expected_files: str  # in --data-dir
    torchvision: Mapping[str, Mapping[str, Any]] | None = None  # per download: class and arguments; None: not offered


DATASETS: Mapping[str, NamedDataset] = {
    "cifar10": NamedDataset(
        read_cifar10,
        "cifar-10-batches-py/ or cifar-10-batches-bin/",
        {"train": {"cls": "CIFAR10", "train": True}},
    ),
    "cifar100": NamedDataset(
        read_cifar100,
        "cifar-100-python/ or cifar-100-binary/",
        {"train": {"cls": "CIFAR100", "train": True}},
    ),
    "imagenet-1k": NamedDataset(
        read_imagenet,
        "train/n01440764/…, and val/ in such folders or flat with LOC_val_solution.csv or ILSVRC2012_devkit_t12/",
    ),
    "inaturalist-2017": NamedDataset(
        read_inaturalist_2017,
        "train_val_images/, train2017.json and val2017.json",
    ),
    "inaturalist-2021": NamedDataset(
        read_inaturalist_2021,
        "train/ (or train_mini/), val/, train.json (or train_mini.json) and val.json",
        {
            "train": {"cls": "INaturalist", "version": "2021_train"},
            "val": {"cls": "INaturalist", "version": "2021_valid"},
        },
    ),
    "places365": NamedDataset(
        read_places365,
        "places365_standard/, or data_256/ and val_256/ with places365_train_standard.txt, places365_val.txt and "
        "categories_places365.txt",
        {
            "train": {"cls": "Places365", "split": "train-standard", "small": True},
            "val": {"cls": "Places365", "split": "val", "small": True},
        },
    ),
    "sun397": NamedDataset(
        read_sun397,
        "SUN397/ and, for the official split, Partitions/Training_01.txt and Testing_01.txt",
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
        raise DataError(f"{data_dir}: no such folder. Expected in it for {name}: {dataset.expected_files}.")
    try:
        return dataset.read(data_dir)
    except FileNotFoundError as error:
        advice = "add --download, or unpack" if dataset.torchvision else "download and unpack"
        raise DataError(
            f"{data_dir}: {name} is incomplete: {error.filename or error} is missing. "
            f"Expected: {dataset.expected_files}. To get it, {advice} its official archives there."
        ) from error
    except (LookupError, ValueError, TypeError, AttributeError) as error:  # incomplete or unofficial lists
        raise DataError(
            f"{data_dir}: the files of {name} are damaged or not the official ones ({type(error).__name__}: {error}). "
            f"Unpack its official archives again. Expected: {dataset.expected_files}."
        ) from error


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
