"""Parquet files with images in a column, as Hugging Face datasets writes them."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from vit_memory.data.images import ImageRows
from vit_memory.data.readers.base import SPLIT_NAMES, DataSource, RawDataset, RawSplit, Reader
from vit_memory.data.readers.class_names import to_class_names
from vit_memory.errors import DataError


def read_parquet(source: DataSource) -> RawDataset:
    """Read one file, or a folder of files whose names begin with their split (train…, test…)."""
    pq = _pyarrow_parquet(source.path)
    splits: dict[str, RawSplit] = {}
    classes: Sequence[str] | None = None
    for name, files in _files_by_split(source.path).items():
        table = _read_table(pq, source, files)
        classes = _class_names(table, source, files[0]) or classes
        splits[name] = _read_split(table, source, files, classes)
    return RawDataset("parquet", splits, classes, label_columns=source.label_columns)


def _pyarrow_parquet(path: Path) -> ModuleType:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"{path}: parquet needs pyarrow: pip install 'vit-memory[datasets]'") from error
    module: ModuleType = pq
    return module


def _files_by_split(path: Path) -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for file in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
        prefix = file.stem.lower().replace("_", "-").split("-")[0]
        files.setdefault(SPLIT_NAMES.get(prefix, "all"), []).append(file)
    if "all" in files and len(files) > 1:
        raise DataError(
            f"{path}: the name of {files['all'][0].name} does not begin with a split, but other names do. Begin every "
            f"file name with train, val or test."
        )
    return {"all": files["train"]} if set(files) == {"train"} else files


def _read_table(pq: Any, source: DataSource, files: Sequence[Path]) -> Any:
    try:
        table = pq.read_table(files, memory_map=True)
    except Exception as error:  # pyarrow has its own tree of errors
        raise DataError(f"{source.path}: {', '.join(f.name for f in files)} cannot be read ({error}).") from error
    for column in (source.image_column or "image", *source.label_columns):
        if column not in table.column_names:
            raise DataError(
                f"{files[0]}: no column {column!r}; its columns are {', '.join(table.column_names)}. "
                f"Choose columns with --image-column and --label-column."
            )
    return table


def _class_names(table: Any, source: DataSource, file: Path) -> list[str] | None:
    """The names of a ClassLabel column, from the metadata that Hugging Face datasets writes."""
    try:
        metadata = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features", {})
        if len(source.label_columns) > 1:
            return None
        feature = features.get(source.label_columns[0], {})
        # A list of classes is written as [feature] or as {"feature": feature, "_type": "Sequence" or "List"}.
        class_label = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
        return list(class_label.get("names") or ()) or None
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{file}: its Hugging Face metadata cannot be read ({error}).") from error


def _read_split(table: Any, source: DataSource, files: Sequence[Path], classes: Sequence[str] | None) -> RawSplit:
    path = source.path
    name = str(path if len(files) > 1 else files[0])
    images = ImageRows(
        name,
        table.column(source.image_column or "image"),
        np.arange(table.num_rows),
        path if path.is_dir() else path.parent,
    )
    labels = [source.raw_label(row) for row in table.select(list(source.label_columns)).to_pylist()]
    return RawSplit(images, to_class_names(labels, classes, f"{name}: {', '.join(source.label_columns)}"))


def _accepts(source: DataSource) -> bool:
    path = source.path
    if path.is_dir():
        return any(entry.name.endswith(".parquet") and not entry.name.startswith(".") for entry in path.iterdir())
    return source.extension == ".parquet" and path.is_file()


PARQUET = Reader(
    ".parquet files, one or a folder:     columns image and label",
    _accepts,
    read_parquet,
)
