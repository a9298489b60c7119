"""Data sources: from the DATA argument of a command to a Dataset with train, validation and test splits.

A reader turns one layout into raw splits. What all layouts share is done here: labels become targets, and missing
splits are drawn. A new layout is one file in `readers/` and one entry in `READERS`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_memory.choices import Kind, KindOrAuto
from vit_memory.data.readers.base import DataSource, RawDataset, Reader
from vit_memory.data.readers.digits import DIGITS
from vit_memory.data.readers.folder import FOLDER
from vit_memory.data.readers.hub import HUB
from vit_memory.data.readers.idx import IDX
from vit_memory.data.readers.named import DATASETS, NAMED
from vit_memory.data.readers.npz import NPZ
from vit_memory.data.readers.parquet import PARQUET
from vit_memory.data.readers.table import TABLE
from vit_memory.data.splits import DRAWN_SHARE, Split, draw_split
from vit_memory.data.targets import read_targets
from vit_memory.errors import DataError

# The first reader that accepts a source reads it, so a special case comes before the general one.
READERS: tuple[Reader, ...] = (HUB, DIGITS, NAMED, PARQUET, IDX, NPZ, TABLE, FOLDER)


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Images with targets, in splits. Drawn splits do not overlap; official ones may."""

    source: str
    layout: str
    kind: Kind
    kind_reason: str  # how the kind was decided, for people
    labels: tuple[str, ...]
    columns: tuple[str, ...]  # the label columns of a table
    train: Split
    validation: Split
    test: Split | None  # used for final metrics only, never to select a model
    origin: Mapping[str, str]  # of each split: "official", or how it was drawn
    seed: int
    ignored: tuple[str, ...] = ()  # files without an image extension

    @property
    def splits(self) -> Mapping[str, Split]:
        """The existing splits, by name."""
        splits = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in splits.items() if split is not None}

    def record(self) -> dict[str, Any]:
        """The part of a task file that describes the training data."""
        return {
            "source": self.source,
            "layout": self.layout,
            "kind": self.kind,
            "columns": list(self.columns),
            "seed": self.seed,
            "splits": {
                name: {"images": len(split), "origin": self.origin[name], "digest": split.digest()}
                for name, split in self.splits.items()
            },
        }


def open_data(
    source: str | Path,
    *,
    data_dir: str | Path | None = None,
    download: bool = False,
    image_column: str | None = None,
    label_column: str | Sequence[str] = "label",
    kind: KindOrAuto = "auto",
    labels: Sequence[str] | None = None,
    seed: int = 0,
) -> Dataset:
    """Open a source of labelled images, with train, validation and test splits.

    `source` is a folder, a table, an .npz, .parquet, `hf:<dataset>` or the name of a dataset; `data_dir` is the folder
    of a named dataset. Official splits are kept. Without a test split, a fifth of every class is drawn by content and
    `seed`; without a validation split, a fifth of the training images is.

    `label_column` is the column of labels or values in a table, or several of them. `kind` is what they mean: one
    label, several labels (`red;round` in one cell, a list, or a column of 0 and 1 per label), or numbers; `auto`
    detects it. `labels`, if given, are the only labels allowed: those of a task that is evaluated.

    >>> open_data("digits").labels
    ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9')
    """
    columns = (label_column,) if isinstance(label_column, str) else tuple(label_column)
    if len(set(columns)) < len(columns):
        raise DataError(f"{source}: duplicate label columns: {', '.join(columns)}. Name each column once.")
    data_source = DataSource(str(source), image_column, columns, None if data_dir is None else Path(data_dir), download)
    try:
        raw = _find_reader(data_source).read(data_source)
    except OSError as error:  # no permission, a name that is too long
        raise DataError(f"{source}: cannot be read ({error}).") from error
    if not raw.filled_splits():
        raise DataError(f"{source}: no images in it. {supported_sources()}")
    return _dataset(str(source), raw, seed, kind, labels)


def supported_sources() -> str:
    """The list of supported sources, for error messages; the general ones first."""
    lines = "\n".join(reader.description for reader in reversed(READERS))
    return "Supported data sources:\n  " + lines.replace("\n", "\n  ")


def _find_reader(source: DataSource) -> Reader:
    for reader in READERS:
        if reader.accepts(source):
            return reader
    if source.path.is_file():
        files = f"{source.extension} files" if source.extension else "files without an extension"
        raise DataError(f"{source.name}: {files} are not supported. {supported_sources()}")
    close = f" Did you mean the dataset {source.name.lower()}?" if source.name.lower() in DATASETS else ""
    raise DataError(f"{source.name}: no such file or folder, and no dataset of that name.{close} {supported_sources()}")


def _dataset(source: str, raw: RawDataset, seed: int, kind: KindOrAuto, labels: Sequence[str] | None) -> Dataset:
    """Turn raw labels into targets and draw the splits that are missing."""
    if not {"train", "all"} & set(raw.filled_splits()):
        raise DataError(f"{source}: no training images; found only {', '.join(raw.splits)}.")
    targets = read_targets(source, raw.raw_labels(), raw.label_columns, raw.classes, kind, labels)
    official = {
        name: Split.of(split.images, targets.values[name], targets.kind) for name, split in raw.filled_splits().items()
    }
    splits, origin = _draw_missing(official, targets.kind, seed)
    return Dataset(
        source=source,
        layout=raw.layout,
        kind=targets.kind,
        kind_reason=targets.kind_reason,
        labels=targets.labels,
        columns=raw.label_columns,
        train=splits["train"],
        validation=splits["validation"],
        test=splits.get("test"),
        origin=origin,
        seed=seed,
        ignored=tuple(raw.ignored),
    )


def _draw_missing(official: Mapping[str, Split], kind: Kind, seed: int) -> tuple[dict[str, Split], dict[str, str]]:
    """All splits, and the origin of each."""
    splits, origin = dict(official), dict.fromkeys(official, "official")
    strata = {"single-label": "of every class", "multi-label": "of every label", "regression": "of every tenth"}
    drawn = f"{DRAWN_SHARE:.0%} {strata[kind]}, drawn by content with seed {seed}"
    if "all" in splits:
        splits["train"], splits["test"] = draw_split(splits.pop("all"), "test", seed)
        origin = {"train": "the rest", "test": drawn}
    if "validation" not in splits:
        splits["train"], splits["validation"] = draw_split(splits["train"], "validation", seed)
        origin |= {"train": "the rest", "validation": f"{drawn} from the training images"}
    return splits, origin
