"""NumPy .npz files: x_train, y_train, and optionally x_val, y_val, x_test, y_test, classes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_memory.data.images import ImageArray
from vit_memory.data.readers.base import DataSource, RawDataset, RawSplit, Reader, without_lone_train
from vit_memory.data.readers.class_names import to_class_names
from vit_memory.errors import DataError

_LABEL_DTYPES = "biufUS"  # numpy's letters for bool, int, unsigned int, float and text
_SPLITS = {"train": "train", "val": "validation", "test": "test"}  # by the end of the arrays' names


def read_npz(path: Path) -> RawDataset:
    """Read the arrays of an .npz file."""
    arrays = _arrays(path)
    if "x_train" not in arrays:
        raise DataError(
            f"{path}: contains {', '.join(arrays) or 'nothing'}; expected x_train and y_train, and optionally x_val, "
            f"y_val, x_test, y_test, classes."
        )
    names = [str(name) for name in arrays["classes"].reshape(-1).tolist()] if "classes" in arrays else None
    labels = {suffix: _label_array(path, arrays, suffix) for suffix in _SPLITS if f"x_{suffix}" in arrays}
    columns = _label_columns(path, labels, names)
    splits = {}
    for suffix, y in labels.items():
        images = ImageArray.whole(f"{path}:x_{suffix}", arrays[f"x_{suffix}"])
        splits[_SPLITS[suffix]] = RawSplit(images, _raw_labels(y, names, f"{path}: y_{suffix}"))
    has_classes = len(columns) == 1 and not any(
        isinstance(label, float) for split in splits.values() for label in split.labels
    )
    return RawDataset("npz", without_lone_train(splits), names if has_classes else None, label_columns=columns)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays. Object arrays are refused: numpy unpickles them, which can run code."""
    try:
        with path.open("rb") as file:  # opened here because numpy does not close a damaged file
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise DataError(f"{path}: a single array (.npy format); expected an .npz with x_train, y_train.")
            return {name: archive[name] for name in archive.files}
    except DataError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise many types for damaged bytes
        raise DataError(f"{path}: not a readable .npz of plain arrays ({error}).") from error


def _label_array(path: Path, arrays: Mapping[str, np.ndarray], suffix: str) -> np.ndarray:
    """The y array of a split: one label, or one row of labels or values, per image."""
    x, y = arrays[f"x_{suffix}"], arrays.get(f"y_{suffix}")
    if y is None or not x.ndim or y.shape[:1] != x.shape[:1] or y.ndim > 2 or y.dtype.kind not in _LABEL_DTYPES:
        labels = "missing" if y is None else f"{y.shape} {y.dtype}"
        raise DataError(
            f"{path}: x_{suffix} is {x.shape}, y_{suffix} is {labels}; expected a label, or a row of labels or "
            f"values, per image."
        )
    return y


def _label_columns(path: Path, labels: Mapping[str, np.ndarray], names: Sequence[str] | None) -> tuple[str, ...]:
    widths = {1 if y.ndim == 1 else y.shape[1] for y in labels.values()}
    if len(widths) > 1:
        raise DataError(f"{path}: the y arrays have {sorted(widths)} columns; expected the same number in each.")
    width = widths.pop()
    columns = ("label",) if width == 1 else tuple(names or map(str, range(width)))
    if len(columns) != width:
        raise DataError(f"{path}: y_train has {width} columns, but classes has {len(columns)} names.")
    return columns


def _raw_labels(y: np.ndarray, names: Sequence[str] | None, where: str) -> list[Any]:
    if y.size != len(y):
        return [tuple(row) for row in y.tolist()]
    flat: list[Any] = y.reshape(-1).tolist()
    return flat if y.dtype.kind == "f" else to_class_names(flat, names, where)


def _accepts(source: DataSource) -> bool:
    return source.extension == ".npz" and source.path.is_file()


NPZ = Reader(
    "an .npz file:                       x_train, y_train, x_test, y_test, classes",
    _accepts,
    lambda source: read_npz(source.path),
)
