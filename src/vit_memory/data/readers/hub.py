"""`hf:<dataset>[:config]`: whatever Hugging Face datasets opens, from the hub or from a local folder."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_memory.data.images import ImageRows
from vit_memory.data.readers.base import SPLIT_NAMES, DataSource, RawDataset, RawSplit, Reader, without_lone_train
from vit_memory.data.readers.class_names import to_class_names
from vit_memory.errors import DataError

_PREFIX = "hf:"


def read_hub(source: DataSource) -> RawDataset:
    """Load a dataset with `datasets.load_dataset` and read its splits."""
    splits: dict[str, RawSplit] = {}
    classes: Sequence[str] | None = None
    for key, table in _load(source.name).items():
        name = SPLIT_NAMES.get(str(key).split("[")[0].lower())
        if name is None:
            continue
        image_column = _image_column(table, source)
        classes = _class_names(table, source) or classes
        columns = [list(table[column]) for column in source.label_columns]
        labels = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        if all(label in (None, -1) for label in labels):  # a test split whose labels are not published
            continue
        images = ImageRows(f"{source.name} {key}", _encoded_images(table, image_column), np.arange(len(labels)))
        splits[name] = RawSplit(images, to_class_names(labels, classes, f"{source.name} {key}"))
    return RawDataset("hf", without_lone_train(splits), classes, label_columns=source.label_columns)


def _load(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{source} needs Hugging Face datasets: pip install 'vit-memory[datasets]'") from error
    name, _, config = source.removeprefix(_PREFIX).partition(":")
    try:
        return datasets.load_dataset(name, config or None)
    except Exception as error:  # the library raises many types, from missing files to refused connections
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"{source}: Hugging Face datasets cannot open it ({reason}).") from error


def _image_column(table: Any, source: DataSource) -> str:
    """The column of images; raises DataError if it or a label column is missing."""
    import datasets

    image_columns = (name for name, feature in table.features.items() if isinstance(feature, datasets.Image))
    image_column = source.image_column or next(image_columns, "image")
    missing = [column for column in (image_column, *source.label_columns) if column not in table.features]
    if missing:
        raise DataError(
            f"{source.name}: no column {', '.join(map(repr, missing))}; its columns are {', '.join(table.features)}. "
            f"Choose columns with --image-column and --label-column."
        )
    return image_column


def _class_names(table: Any, source: DataSource) -> Sequence[str] | None:
    if len(source.label_columns) > 1:
        return None
    feature = table.features[source.label_columns[0]]
    names: Sequence[str] | None = getattr(getattr(feature, "feature", feature), "names", None)
    return names


def _encoded_images(table: Any, column: str) -> Any:
    """The column as encoded files, not decoded by the library."""
    import datasets

    return table.cast_column(column, datasets.Image(decode=False))[column]


HUB = Reader(
    "hf:<dataset>[:config]:              anything that Hugging Face datasets opens",
    lambda source: source.name.startswith(_PREFIX),
    read_hub,
)
