"""The interface of a reader: it gets a DataSource and returns a RawDataset of splits with images and raw labels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_memory.data.images import Images
from vit_memory.data.targets import RawLabels

SPLIT_NAMES = {
    "train": "train", "training": "train",
    "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation",
    "test": "test", "testing": "test",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DataSource:
    """The DATA argument and the options for reading it."""

    name: str  # a path, `hf:<dataset>` or the name of a dataset
    image_column: str | None = None  # of a table; None: the layout's default
    label_columns: tuple[str, ...] = ("label",)  # of a table
    data_dir: Path | None = None  # folder of a named dataset
    download: bool = False

    @property
    def path(self) -> Path:
        """The name as a path."""
        return Path(self.name)

    @property
    def extension(self) -> str:
        """The file name's extension in lower case, such as `.csv`."""
        return self.path.suffix.lower()

    def raw_label(self, row: Mapping[str, Any]) -> Any:
        """A row's label: one cell, or a tuple of cells if there are several label columns."""
        cells = tuple(row.get(column) for column in self.label_columns)
        return cells[0] if len(cells) == 1 else cells


@dataclass(frozen=True, slots=True, eq=False)
class RawSplit:
    """The images of one split, with labels as the source stores them."""

    images: Images
    labels: Sequence[Any]  # per image: a label, a list of labels, a number, or a tuple of cells
    row_names: Sequence[str] | None = None  # names of table rows in messages, such as "line 3"


@dataclass(frozen=True, slots=True, eq=False)
class RawDataset:
    """A source as its reader returns it, before labels become numbers and missing splits are drawn."""

    layout: str
    splits: Mapping[str, RawSplit]  # by "train", "validation", "test"; "all" if the source has no splits
    classes: Sequence[str] | None = None  # in the source's order, if it defines one
    ignored: Sequence[str] = ()  # files without an image extension
    label_columns: tuple[str, ...] = ("label",)

    def filled_splits(self) -> dict[str, RawSplit]:
        """The splits that contain images."""
        return {name: split for name, split in self.splits.items() if len(split.labels)}

    def raw_labels(self) -> dict[str, RawLabels]:
        """The labels of every split that contains images."""
        return {name: RawLabels(split.labels, split.row_names) for name, split in self.filled_splits().items()}


@dataclass(frozen=True, slots=True)
class Reader:
    """One layout: which sources it accepts, and how it reads them."""

    description: str  # lines for the list of supported sources in error messages
    accepts: Callable[[DataSource], bool]
    read: Callable[[DataSource], RawDataset]


def without_lone_train(splits: Mapping[str, RawSplit]) -> Mapping[str, RawSplit]:
    """Rename the only split "train" to "all", so that a test split is drawn from it."""
    return {"all": splits["train"]} if set(splits) == {"train"} else splits
