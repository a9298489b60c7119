"""The DATA argument of every command: from a word or a path to images with labels, in three splits.

Readers (`layouts`, `named`) turn one layout each into named parts; what all share, the order of the labels and the
splits that have to be drawn, is settled once, here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_memory.data.layouts import (
    LAYOUTS,
    Columns,
    Found,
    read_digits,
    read_folder,
    read_hub,
    read_idx,
    read_npz,
    read_parquet,
    read_table,
)
from vit_memory.data.named import NAMED, open_named
from vit_memory.data.splits import SHARE, Split, draw
from vit_memory.data.targets import KindOption, read_targets
from vit_memory.errors import DataError
from vit_memory.task import Kind


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Images with what they show, in splits that do not overlap by draw. The test split chooses nothing."""

    source: str
    layout: str
    kind: Kind
    kind_reason: str  # how the kind was decided, for people
    labels: tuple[str, ...]
    columns: tuple[str, ...]  # of a table, those that say what images show
    train: Split
    validation: Split
    test: Split | None
    origin: Mapping[str, str]  # of each split: "official", or how it was drawn
    seed: int
    ignored: tuple[str, ...] = ()

    @property
    def splits(self) -> Mapping[str, Split]:
        """Those there are, by name."""
        every = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in every.items() if split is not None}

    def record(self) -> dict[str, Any]:
        """What a task remembers of the data it was trained on."""
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
    kind: KindOption = "auto",
    labels: Sequence[str] | None = None,
    seed: int = 0,
) -> Dataset:
    """Open a source of labelled images and settle its splits.

    `source` is a folder, a table, a pack, `hf:<dataset>` or a known name; `data_dir` is where named datasets lie.
    Official splits are kept. Where there is no test split, a fifth of every class is drawn by content and `seed`;
    where there is no validation split, a fifth of the training images is.

    `label_column` names the column of a table that says what an image shows, or several. `kind` says what it means:
    one label, several labels (`red;round` in one cell, a list, or a column of 0 and 1 per label), or numbers; `auto`
    decides by the cells. `labels` are those of a task that is to be scored, and the only ones allowed then.

    >>> open_data("digits").labels
    ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9')
    """
    columns = Columns(image_column, (label_column,) if isinstance(label_column, str) else tuple(label_column))
    if len(set(columns.labels)) < len(columns.labels):
        raise DataError(f"{source}: a label column is named twice: {', '.join(columns.labels)}.")
    try:
        found = _find(str(source), columns, None if data_dir is None else Path(data_dir), download)
    except OSError as error:  # a folder or table that may not be read, a name that is too long
        raise DataError(f"{source}: cannot be read ({error}).") from error
    if not any(len(part.labels) for part in found.parts.values()):
        raise DataError(f"{source}: no images in it. {LAYOUTS}")
    return _settle(str(source), found, seed, kind, labels)


def _find(source: str, columns: Columns, data_dir: Path | None, download: bool) -> Found:
    if source.startswith("hf:"):
        return read_hub(source.removeprefix("hf:"), columns)
    if source == "digits":
        return read_digits()
    path = Path(source)
    if source in NAMED and not path.exists():
        return open_named(source, data_dir, download)
    if path.is_dir():
        return _find_in_folder(path, columns)
    if not path.is_file():
        close = f" Did you mean the dataset {source.lower()}?" if source.lower() in NAMED else ""
        raise DataError(f"{source}: no such file or folder, and no dataset of that name.{close} {LAYOUTS}")
    readers: Mapping[str, Callable[[Path, Columns], Found]] = {
        ".csv": read_table, ".tsv": read_table, ".jsonl": read_table, ".npz": read_npz, ".parquet": read_parquet,
    }  # fmt: skip
    if path.suffix.lower() not in readers:
        raise DataError(f"{source}: a file of this kind is not understood. {LAYOUTS}")
    return readers[path.suffix.lower()](path, columns)


def _find_in_folder(folder: Path, columns: Columns) -> Found:
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if any(name.endswith(".parquet") for name in names):
        return read_parquet(folder, columns)
    if any("-idx3-ubyte" in name or ".idx3-ubyte" in name for name in names):
        return read_idx(folder)
    return read_folder(folder)


def _settle(source: str, found: Found, seed: int, kind: KindOption, labels: Sequence[str] | None) -> Dataset:
    """Turn what the source says into numbers, and draw what splits are missing."""
    learnt = found.parts.get("train") or found.parts.get("all")
    if learnt is None or not len(learnt.labels):
        raise DataError(f"{source}: no training images; found only {', '.join(found.parts)}.")
    targets = read_targets(source, found.cells(), found.columns, found.classes, kind, labels)
    splits = {
        name: Split.of(part.images, targets.values[name], targets.kind)
        for name, part in found.parts.items()
        if len(part.labels)
    }
    origin = dict.fromkeys(splits, "official")
    evenly = {"single-label": "of every class", "multi-label": "of every label", "regression": "of every tenth"}
    how = f"{SHARE:.0%} {evenly[targets.kind]}, drawn by content with seed {seed}"
    if "all" in splits:
        splits["train"], splits["test"] = draw(splits.pop("all"), "test", seed)
        origin = {"train": "the rest", "test": how}
    if "validation" not in splits:
        splits["train"], splits["validation"] = draw(splits["train"], "validation", seed)
        origin |= {"train": "the rest", "validation": f"{how} from the training images"}
    return Dataset(
        source=source,
        layout=found.layout,
        kind=targets.kind,
        kind_reason=targets.reason,
        labels=targets.labels,
        columns=found.columns,
        train=splits["train"],
        validation=splits["validation"],
        test=splits.get("test"),
        origin=origin,
        seed=seed,
        ignored=tuple(found.ignored),
    )
