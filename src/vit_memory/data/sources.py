"""The DATA argument of every command: from a word or a path to images with labels, in three splits.

Readers (`layouts`, `named`) turn one layout each into named parts; what all share, the order of the labels and the
splits that have to be drawn, is settled once, here.
"""

from collections.abc import Callable, Iterable, Mapping
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
from vit_memory.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Images with labels, in splits that do not overlap by draw. The test split chooses nothing."""

    source: str
    kind: str
    labels: tuple[str, ...]
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
            "kind": self.kind,
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
    label_column: str = "label",
    seed: int = 0,
) -> Dataset:
    """Open a source of labelled images and settle its splits.

    `source` is a folder, a table, a pack, `hf:<dataset>` or a known name; `data_dir` is where named datasets lie.
    Official splits are kept. Where there is no test split, a fifth of every class is drawn by content and `seed`;
    where there is no validation split, a fifth of the training images is.

    >>> open_data("digits").labels
    ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9')
    """
    columns = Columns(image_column, label_column)
    try:
        found = _find(str(source), columns, None if data_dir is None else Path(data_dir), download)
    except OSError as error:  # a folder or table that may not be read, a name that is too long
        raise DataError(f"{source}: cannot be read ({error}).") from error
    if not any(len(part.labels) for part in found.parts.values()):
        raise DataError(f"{source}: no images in it. {LAYOUTS}")
    return _settle(str(source), found, seed)


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


def _settle(source: str, found: Found, seed: int) -> Dataset:
    """Number the labels and draw what splits are missing."""
    learnt = found.parts.get("train") or found.parts.get("all")
    if learnt is None or not len(learnt.labels):
        raise DataError(f"{source}: no training images; found only {', '.join(found.parts)}.")
    classes = tuple(found.classes) if found.classes is not None else _in_order(learnt.labels)
    place = {label: i for i, label in enumerate(classes)}
    for name, part in found.parts.items():
        strangers = sorted(set(part.labels) - set(place))
        if strangers:
            raise DataError(
                f"{source}: the {name} images hold {len(strangers)} labels without any training image: "
                f"{', '.join(strangers[:5])}{' …' if len(strangers) > 5 else ''}. Add some, or leave them out."
            )
    splits = {
        name: Split.of(part.images, [place[label] for label in part.labels])
        for name, part in found.parts.items()
        if len(part.labels)
    }
    origin = dict.fromkeys(splits, "official")
    how = f"{SHARE:.0%} of every class, drawn by content with seed {seed}"
    if "all" in splits:
        splits["train"], splits["test"] = draw(splits.pop("all"), "test", seed)
        origin = {"train": "the rest", "test": how}
    if "validation" not in splits:
        splits["train"], splits["validation"] = draw(splits["train"], "validation", seed)
        origin |= {"train": "the rest", "validation": f"{how} from the training images"}
    return Dataset(
        source=source,
        kind=found.kind,
        labels=classes,
        train=splits["train"],
        validation=splits["validation"],
        test=splits.get("test"),
        origin=origin,
        seed=seed,
        ignored=tuple(found.ignored),
    )


def _in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Distinct labels, by number where all are numbers: 10 comes after 9."""
    distinct = set(labels)
    if all(label.isdecimal() for label in distinct):
        return tuple(sorted(distinct, key=lambda label: (int(label), label)))
    return tuple(sorted(distinct))
