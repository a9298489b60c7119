"""Readers of the layouts that labelled images come in: each turns one into named parts of images and label names."""

import csv
import gzip
import json
import math
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vit_memory.data.decoding import EXTENSIONS
from vit_memory.data.images import ImageArray, ImageFiles, ImageRows, Images
from vit_memory.data.targets import Cells
from vit_memory.errors import DataError

PARTS = {
    "train": "train", "training": "train",
    "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation",
    "test": "test", "testing": "test",
}  # fmt: skip
_LABEL_TYPES = "biufUS"  # numpy's letters for truth values, whole numbers, numbers and text
LAYOUTS = """Understood are:
  a folder of class folders:          DATA/cats/1.jpg, DATA/dogs/2.jpg
  such folders under split names:     DATA/train/cats/1.jpg, DATA/val/…, DATA/test/…
  a table, .csv or .jsonl:            columns file and label (and split, if you like); paths relative to the table;
                                      several labels in one cell (red;round), a column of 0 and 1 per label, or
                                      columns of numbers: --label-column, --kind
  an .npz pack:                       x_train, y_train, x_test, y_test, classes
  a folder of IDX files:              train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-… (.gz or not)
  .parquet, a file or a folder:       columns image and label
  hf:<dataset>[:config]               through Hugging Face datasets
  a name:                             digits, cifar10, cifar100, imagenet-1k, inaturalist-2017, inaturalist-2021,
                                      places365, sun397 (all but digits with --data-dir)"""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What a reader found under one split name."""

    images: Images
    labels: Sequence[Any]  # per image what the source says: a label, a list of labels, a number, a tuple of columns
    rows: Sequence[str] | None = None  # how messages call each row of a table


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a reader found."""

    layout: str
    parts: Mapping[str, Part]  # by "train", "validation", "test"; "all" where nothing says
    classes: Sequence[str] | None = None  # their order, where the source knows one
    ignored: Sequence[str] = ()  # files that are no images by their names
    columns: tuple[str, ...] = ("label",)  # what the labels are called

    def cells(self) -> dict[str, Cells]:
        """What every part that holds images says of them."""
        return {name: Cells(part.labels, part.rows) for name, part in self.parts.items() if len(part.labels)}


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a table hold the images and what they show."""

    image: str | None = None
    labels: tuple[str, ...] = ("label",)

    def cell(self, row: Mapping[str, Any]) -> Any:
        """What a row says of its image: one cell, or several."""
        return row.get(self.labels[0]) if len(self.labels) == 1 else tuple(row.get(name) for name in self.labels)


def read_folder(folder: Path) -> Found:
    """Class folders, or split folders of class folders."""
    children = [
        child for child in sorted(folder.iterdir()) if child.is_dir() and not child.name.startswith((".", "__"))
    ]
    parts = {child: PARTS[child.name.lower()] for child in children if child.name.lower() in PARTS}
    ignored: list[str] = []
    # All or nothing, and at least two: a single class of toy trains is a class.
    if len(parts) >= 2 and len(parts) == len(children):
        if len(set(parts.values())) < len(parts):
            raise DataError(f"{folder}: two folders for one split: {', '.join(child.name for child in parts)}.")
        return Found("folder", {name: classes_in(child, ignored) for child, name in parts.items()}, ignored=ignored)
    loose = [path.name for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS and path.is_file()]
    if not children and loose:
        raise DataError(
            f"{folder}: {len(loose)} images, but no class folders, so nothing says what they show. {LAYOUTS}"
        )
    return Found("folder", {"all": classes_in(folder, ignored)}, ignored=ignored)


def classes_in(folder: Path, ignored: list[str]) -> Part:
    """Every image below a class folder, however deep; other files' names are added to `ignored`."""
    paths, labels = [], []
    for child in sorted(folder.iterdir()):
        if not child.is_dir():
            if not child.name.startswith("."):
                ignored.append(str(child))
            continue
        if child.name.startswith((".", "__")):
            continue
        for parent, folders, names in os.walk(child):
            folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
            for name in sorted(names):
                path = Path(parent) / name
                if name.startswith(".") or name == "Thumbs.db":
                    continue
                if path.suffix.lower() in EXTENSIONS:
                    paths.append(str(path))
                    labels.append(child.name)
                else:
                    ignored.append(str(path))
    return Part(ImageFiles(tuple(paths)), labels)


def read_table(path: Path, columns: Columns) -> Found:
    """A CSV, TSV or JSONL with a file and a label in every row, and perhaps a split."""
    rows = list(_json_rows(path) if path.suffix.lower() == ".jsonl" else _csv_rows(path))
    file_column = columns.image or "file"
    faults: list[str] = []
    gathered: dict[str, tuple[list[str], list[Any], list[str]]] = {}
    has = dict.fromkeys(str(name) for _, row in rows for name in row if name is not None)
    absent = [name for name in columns.labels if name not in has]
    for line, row in rows:
        file = str(row.get(file_column) or "").strip()
        told = str(row.get("split") or "all").strip().lower()
        part = "all" if told == "all" else PARTS.get(told)
        missing = ([] if file else [file_column]) + absent
        if missing:
            faults.append(f"line {line}: no {' and no '.join(missing)}")
        elif "\0" in file:
            faults.append(f"line {line}: {file_column} is {file!r}, and no file name holds a NUL")
        elif part is None:
            faults.append(f"line {line}: split is {told!r}; expected train, val or test")
        else:
            paths, labels, lines = gathered.setdefault(part, ([], [], []))
            paths.append(str(path.parent / file))
            labels.append(columns.cell(row))
            lines.append(f"line {line}")
    if faults:
        raise DataError(
            f"{path}: {len(faults)} rows cannot be used. {'; '.join(faults[:5])}{' …' if len(faults) > 5 else ''}. "
            f"The columns are {', '.join(has) or 'none'}; others than file and label are named by --image-column and "
            f"--label-column."
        )
    if "all" in gathered and len(gathered) > 1:
        raise DataError(f"{path}: {len(gathered['all'][0])} rows name no split and others do. Name one for every row.")
    parts = {name: Part(ImageFiles(tuple(paths)), *rest) for name, (paths, *rest) in gathered.items()}
    return Found(path.suffix.lower().removeprefix("."), parts, columns=columns.labels)


def _csv_rows(path: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(_text_lines(path, file), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            twice = [name for name, count in Counter(reader.fieldnames or ()).items() if name and count > 1]
            if twice:
                raise DataError(f"{path}: line 1 names a column twice: {', '.join(twice)}. Rename one of them.")
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            raise DataError(f"{path}: not a table after line {reader.line_num} ({error}).") from error


def _json_rows(path: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(_text_lines(path, file), 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: line {line} is no JSON ({error}).") from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}: line {line} is a {type(row).__name__}; expected an object with file and label."
                )
            yield line, row


def _text_lines(path: Path, file: Iterable[str]) -> Iterable[str]:
    """The lines of a table; raises DataError where they are not UTF-8 text."""
    try:
        for line, text in enumerate(file, 1):
            if "\0" in text:
                raise DataError(f"{path}: line {line} holds NUL bytes, so it is not UTF-8 text. Save it as UTF-8.")
            yield text
    except UnicodeDecodeError as error:
        line = _lines_of_utf8(path.read_bytes()) + 1  # `error` counts its bytes from somewhere in the file
        raise DataError(f"{path}: line {line} is not UTF-8 text ({error.reason}). Save the file as UTF-8.") from error


def _lines_of_utf8(content: bytes) -> int:
    """How many whole lines there are before the first byte that is not UTF-8."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        content = content[: error.start]
    return content.count(b"\n")


def read_npz(path: Path, columns: Columns) -> Found:
    """A numpy pack of arrays. Object arrays are refused, for reading them would run code."""
    try:
        with path.open("rb") as file:  # ours to close: numpy leaves it open where it is damaged
            pack = np.load(file, allow_pickle=False)
            if isinstance(pack, np.ndarray):
                raise DataError(f"{path}: one array, an .npy by its content; expected an .npz with x_train, y_train.")
            arrays = {name: pack[name] for name in pack.files}
    except DataError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise whatever damaged bytes lead them to
        raise DataError(f"{path}: not a readable .npz of plain arrays ({error}).") from error
    if "x_train" not in arrays:
        held = ", ".join(arrays) or "nothing"
        raise DataError(f"{path}: holds {held}; expected x_train, y_train, and if you like x_test, y_test, classes.")
    parts = {}
    widths: set[int] = set()
    names = None if "classes" not in arrays else [str(name) for name in arrays["classes"].reshape(-1).tolist()]
    for suffix, name in (("train", "train"), ("val", "validation"), ("test", "test")):
        if f"x_{suffix}" in arrays:
            x, y = arrays[f"x_{suffix}"], arrays.get(f"y_{suffix}")
            if y is None or not x.ndim or y.shape[:1] != x.shape[:1] or y.ndim > 2 or y.dtype.kind not in _LABEL_TYPES:
                kept = "missing" if y is None else f"{y.shape} of {y.dtype}"
                shapes = f"x_{suffix} is {x.shape}, y_{suffix} is {kept}"
                raise DataError(f"{path}: {shapes}; expected a label, or a row of labels or values, per image.")
            widths.add(1 if y.ndim == 1 else y.shape[1])
            where, told = f"{path}:x_{suffix}", f"{path}: y_{suffix}"
            flat = y.reshape(-1) if y.size == len(x) else None
            if flat is None:
                labels: list[Any] = [tuple(row) for row in y.tolist()]
            else:
                labels = flat.tolist() if flat.dtype.kind == "f" else _named(flat, names, told)
            parts[name] = Part(ImageArray.whole(where, x), labels)
    if len(widths) > 1:
        raise DataError(f"{path}: the y arrays have {sorted(widths)} columns; expected as many in each.")
    width = widths.pop() if widths else 1
    columns_of_y = ("label",) if width == 1 else tuple(names or map(str, range(width)))
    if len(columns_of_y) != width:
        raise DataError(f"{path}: y_train has {width} columns, but classes names {len(columns_of_y)}.")
    if set(parts) == {"train"}:
        parts = {"all": parts["train"]}
    return Found("npz", parts, names if width == 1 and parts and not _floats(parts) else None, columns=columns_of_y)


def _floats(parts: Mapping[str, Part]) -> bool:
    return any(isinstance(label, float) for part in parts.values() for label in part.labels)


def read_idx(folder: Path) -> Found:
    """MNIST's format; the labels of EMNIST's and Fashion-MNIST's files are numbers too."""
    parts: dict[str, Part] = {}
    for path in sorted(folder.iterdir()):
        stem = path.name.removesuffix(".gz")
        if not stem.endswith("idx3-ubyte"):
            continue
        beside = stem.replace("images", "labels").replace("idx3", "idx1")
        labels = next((p for p in (path.with_name(beside), path.with_name(beside + ".gz")) if p.exists()), None)
        if labels is None:
            raise DataError(f"{path}: its labels are not beside it; expected {beside} or {beside}.gz.")
        images, numbers = _idx(path, 3), _idx(labels, 1)
        if len(images) != len(numbers):
            raise DataError(f"{path}: {len(images)} images, but {labels.name} holds {len(numbers)} labels.")
        name = "train" if "train" in stem else "test"
        if name in parts:
            raise DataError(f"{path}: a second file of {name} images. Keep one, as .gz or not.")
        parts[name] = Part(ImageArray.whole(str(path), images), [str(n) for n in numbers.tolist()])
    return Found("idx", {"all": parts["train"]} if set(parts) == {"train"} else parts)


def _idx(path: Path, dimensions: int) -> np.ndarray:
    """Two zero bytes, the type (8: uint8), the number of dimensions, each size as a big-endian uint32, the values."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error
    begins = struct.pack(">HBB", 0, 8, dimensions)
    if raw[:4] != begins:
        raise DataError(f"{path}: begins with {raw[:4].hex(' ')}, an IDX file of such values with {begins.hex(' ')}.")
    sizes = struct.unpack_from(f">{dimensions}I", raw, 4) if len(raw) >= 4 + 4 * dimensions else (0,)
    count = math.prod(sizes)
    start = 4 + 4 * dimensions
    if len(raw) - start != count:
        raise DataError(f"{path}: {len(raw) - start} bytes of values where its header promises {count}: it is cut off.")
    return np.frombuffer(raw, np.uint8, count, start).reshape(sizes)


def read_parquet(path: Path, columns: Columns) -> Found:
    """Parquet in Hugging Face's style; a folder's files are told apart by their names (train…, test…)."""
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"{path}: parquet needs pyarrow: pip install 'vit-memory[datasets]'") from error
    gathered: dict[str, list[Path]] = {}
    for file in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
        told = file.stem.lower().replace("_", "-").split("-")[0]
        gathered.setdefault(PARTS.get(told, "all"), []).append(file)
    if "all" in gathered and len(gathered) > 1:
        raise DataError(
            f"{path}: {gathered['all'][0].name} names no split, others do. Begin file names with train, test."
        )
    if set(gathered) == {"train"}:
        gathered = {"all": gathered["train"]}
    parts: dict[str, Part] = {}
    classes: Sequence[str] | None = None
    for name, files in gathered.items():
        try:
            table = pq.read_table(files, memory_map=True)
        except Exception as error:  # pyarrow has its own tree of errors
            raise DataError(f"{path}: {', '.join(f.name for f in files)} cannot be read ({error}).") from error
        image = columns.image or "image"
        for column in (image, *columns.labels):
            if column not in table.column_names:
                raise DataError(
                    f"{files[0]}: no column {column!r} among {', '.join(table.column_names)}. "
                    f"Name the right ones with --image-column and --label-column."
                )
        try:
            told = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
            features = told.get("info", {}).get("features", {})
            if len(columns.labels) == 1:
                feature = features.get(columns.labels[0], {})
                # A list of classes is written as [feature] or as {"feature": feature, "_type": "Sequence" or "List"}.
                inner = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
                classes = list(inner.get("names") or ()) or classes
        except (ValueError, AttributeError, TypeError) as error:
            raise DataError(f"{files[0]}: its Hugging Face metadata cannot be read ({error}).") from error
        source = str(path if len(files) > 1 else files[0])
        values = table.select(list(columns.labels)).to_pylist()
        pixels = ImageRows(
            source, table.column(image), np.arange(table.num_rows), path if path.is_dir() else path.parent
        )
        labels = [columns.cell(row) for row in values]
        parts[name] = Part(pixels, _named(labels, classes, f"{source}: {', '.join(columns.labels)}"))
    return Found("parquet", parts, classes, columns=columns.labels)


def read_hub(asked: str, columns: Columns) -> Found:
    """Whatever Hugging Face datasets can open: an id with a config, a local folder, a builder's name."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"hf:{asked} needs Hugging Face datasets: pip install 'vit-memory[datasets]'") from error
    name, _, config = asked.partition(":")
    try:
        loaded = datasets.load_dataset(name, config or None)
    except Exception as error:  # the library raises of every kind, from missing files to refused connections
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"hf:{asked}: datasets cannot open it ({first}).") from error
    parts: dict[str, Part] = {}
    classes: Sequence[str] | None = None
    for key, table in loaded.items():
        part = PARTS.get(str(key).split("[")[0].lower())
        if part is None:
            continue
        image = columns.image or next((n for n, f in table.features.items() if isinstance(f, datasets.Image)), "image")
        absent = [name for name in (image, *columns.labels) if name not in table.features]
        if absent:
            raise DataError(
                f"hf:{asked}: no column {', '.join(map(repr, absent))} among {', '.join(table.features)}. "
                f"Name the right ones with --image-column and --label-column."
            )
        if len(columns.labels) == 1:
            feature = table.features[columns.labels[0]]
            classes = getattr(getattr(feature, "feature", feature), "names", None) or classes
            values = list(table[columns.labels[0]])
        else:
            values = list(zip(*(table[name] for name in columns.labels), strict=True))
        if all(value in (None, -1) for value in values):  # a test split whose labels are kept secret
            continue
        labels = _named(values, classes, f"hf:{asked} {key}")
        column = table.cast_column(image, datasets.Image(decode=False))[image]
        parts[part] = Part(ImageRows(f"hf:{asked} {key}", column, np.arange(len(labels))), labels)
    if set(parts) == {"train"}:
        parts = {"all": parts["train"]}
    return Found("hf", parts, classes, columns=columns.labels)


def read_digits() -> Found:
    """1797 handwritten digits, 8 × 8 pixels, that come with scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("digits come with scikit-learn, which is missing: pip install scikit-learn") from error
    digits = load_digits()
    pixels = np.clip(digits.images * (255 / 16) + 0.5, 0, 255).astype(np.uint8)
    return Found("digits", {"all": Part(ImageArray.whole("digits", pixels), [str(n) for n in digits.target])})


def _named(values: Any, classes: Sequence[str] | None, where: str) -> list[Any]:
    """Numbers looked up in the class list, where there is one; also those inside lists."""
    given: list[Any] = values.tolist() if isinstance(values, np.ndarray) else list(values)
    if classes is None:
        return given

    def named(value: Any) -> Any:
        return [named(one) for one in value] if isinstance(value, list) else _class_name(value, classes, where)

    return [named(value) for value in given]


def _class_name(value: Any, classes: Sequence[str], where: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, int) and 0 <= value < len(classes):
        return classes[value]
    if value not in classes:
        raise DataError(f"{where}: label {value!r} is none of the {len(classes)} classes.")
    return str(value)
