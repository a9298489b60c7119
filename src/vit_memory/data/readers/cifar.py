"""CIFAR-10 and CIFAR-100, from the Python (pickle) or the binary archives."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vit_memory.data.images import ImageArray
from vit_memory.data.readers.base import RawDataset, RawSplit
from vit_memory.data.readers.paths import first_existing

_PIXELS = 3 * 32 * 32
_ALLOWED_GLOBALS = {  # what the official batches refer to
    ("numpy.core.multiarray", "_reconstruct"),  # numpy has moved this module since 2009 and forwards the old name
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


@dataclass(frozen=True, slots=True)
class _Version:
    """The file names and keys of CIFAR-10 or of CIFAR-100."""

    pickle_folder: str
    binary_folder: str
    train_files: tuple[str, ...]
    test_file: str
    label_key: bytes
    pickle_names: tuple[str, bytes]  # file and key of the class names
    binary_names: str  # file of the class names
    label_bytes: int  # per row of a binary file; the last one is the fine label


_CIFAR10 = _Version(
    pickle_folder="cifar-10-batches-py",
    binary_folder="cifar-10-batches-bin",
    train_files=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test_file="test_batch",
    label_key=b"labels",
    pickle_names=("batches.meta", b"label_names"),
    binary_names="batches.meta.txt",
    label_bytes=1,
)
_CIFAR100 = _Version(
    pickle_folder="cifar-100-python",
    binary_folder="cifar-100-binary",
    train_files=("train",),
    test_file="test",
    label_key=b"fine_labels",
    pickle_names=("meta", b"fine_label_names"),
    binary_names="fine_label_names.txt",
    label_bytes=2,
)


def read_cifar10(folder: Path) -> RawDataset:
    """Read cifar-10-batches-py/ or cifar-10-batches-bin/."""
    return _read(folder, _CIFAR10)


def read_cifar100(folder: Path) -> RawDataset:
    """Read cifar-100-python/ or cifar-100-binary/, with the fine labels."""
    return _read(folder, _CIFAR100)


def _read(data_dir: Path, version: _Version) -> RawDataset:
    folder = first_existing(data_dir, version.pickle_folder, version.binary_folder)
    read_file: Callable[[Path, _Version], tuple[np.ndarray, Sequence[int]]]
    if folder.name == version.binary_folder:
        classes = (folder / version.binary_names).read_text().split()
        read_file, extension = _read_binary, ".bin"
    else:
        file, key = version.pickle_names
        classes = [name.decode() for name in _unpickle(folder / file)[key]]
        read_file, extension = _read_pickle, ""
    splits = {}
    for split, names in (("train", version.train_files), ("test", (version.test_file,))):
        batches = [read_file(first_existing(folder, name + extension), version) for name in names]
        pixels = np.concatenate([rows for rows, _ in batches]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        labels = [classes[number] for _, numbers in batches for number in numbers]
        splits[split] = RawSplit(ImageArray.whole(f"{folder}:{split}", np.ascontiguousarray(pixels)), labels)
    return RawDataset("named", splits, classes)


def _read_pickle(path: Path, version: _Version) -> tuple[np.ndarray, Sequence[int]]:
    batch = _unpickle(path)
    rows, labels = batch[b"data"], batch[version.label_key]
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape != (len(labels), _PIXELS):
        raise ValueError(f"{path}: not a CIFAR batch (expected {len(labels)} rows of {_PIXELS} bytes)")
    return rows, labels


def _read_binary(path: Path, version: _Version) -> tuple[np.ndarray, Sequence[int]]:
    raw, row_bytes = np.fromfile(path, np.uint8), version.label_bytes + _PIXELS
    if len(raw) % row_bytes:
        raise ValueError(f"{path}: {len(raw)} bytes, not a multiple of {row_bytes}; the file is cut off")
    rows = raw.reshape(-1, row_bytes)
    return rows[:, version.label_bytes :], rows[:, version.label_bytes - 1].tolist()


class _RestrictedUnpickler(pickle.Unpickler):
    """Reads pickles of dicts, lists and arrays, and refuses any other class: unpickling those could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED_GLOBALS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"refused: it refers to {module}.{name}, which no official batch does")


def _unpickle(path: Path) -> Mapping[bytes, Any]:
    with path.open("rb") as file:
        try:
            batch: Mapping[bytes, Any] = _RestrictedUnpickler(file, encoding="bytes").load()
        except (pickle.UnpicklingError, EOFError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: not a CIFAR batch ({error})") from error
    return batch
