"""Tables of image paths and labels: CSV, TSV and JSONL."""

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vit_memory.data.images import ImageFiles
from vit_memory.data.readers.base import SPLIT_NAMES, DataSource, RawDataset, RawSplit, Reader
from vit_memory.errors import DataError

_EXTENSIONS = (".csv", ".tsv", ".jsonl")
_Rows = Sequence[tuple[int, Mapping[str, Any]]]  # line number and cells by column


@dataclass(slots=True)
class _SplitRows:
    """The rows of one split, as they are read."""

    paths: list[str] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def read_table(source: DataSource) -> RawDataset:
    """Read a table with a file and a label in every row, and optionally a split."""
    path = source.path
    rows = list(_json_rows(path) if source.extension == ".jsonl" else _csv_rows(path))
    faults = _faults(rows, source)
    if faults:
        raise DataError(
            f"{path}: {len(faults)} rows cannot be used. {'; '.join(faults[:5])}{' …' if len(faults) > 5 else ''}. "
            f"The columns are {', '.join(_columns(rows)) or 'none'}. If the image and label columns have other names "
            f"than file and label, use --image-column and --label-column."
        )
    splits: dict[str, _SplitRows] = defaultdict(_SplitRows)
    for line, row in rows:
        split = splits["all" if _split_cell(row) == "all" else SPLIT_NAMES[_split_cell(row)]]
        split.paths.append(str(path.parent / _file_cell(row, source)))
        split.labels.append(source.raw_label(row))
        split.lines.append(f"line {line}")
    if "all" in splits and len(splits) > 1:
        raise DataError(
            f"{path}: {len(splits['all'].paths)} rows have no split, but other rows do. Fill in the column split in "
            f"every row, or in none."
        )
    raw_splits = {name: RawSplit(ImageFiles(tuple(s.paths)), s.labels, s.lines) for name, s in splits.items()}
    return RawDataset(source.extension.removeprefix("."), raw_splits, label_columns=source.label_columns)


def _faults(rows: _Rows, source: DataSource) -> list[str]:
    """What is wrong with the rows that cannot be used, with their line numbers."""
    columns = _columns(rows)
    missing_labels = [column for column in source.label_columns if column not in columns]
    file_column = source.image_column or "file"
    faults = []
    for line, row in rows:
        file, split = _file_cell(row, source), _split_cell(row)
        missing = ([] if file else [file_column]) + missing_labels
        if missing:
            faults.append(f"line {line}: no {' and no '.join(missing)}")
        elif "\0" in file:
            faults.append(f"line {line}: {file_column} is {file!r}, and a file name cannot contain NUL")
        elif split != "all" and split not in SPLIT_NAMES:
            faults.append(f"line {line}: split is {split!r}; expected train, val or test")
    return faults


def _columns(rows: _Rows) -> list[str]:
    return list(dict.fromkeys(str(column) for _, row in rows for column in row if column is not None))


def _file_cell(row: Mapping[str, Any], source: DataSource) -> str:
    return str(row.get(source.image_column or "file") or "").strip()


def _split_cell(row: Mapping[str, Any]) -> str:
    return str(row.get("split") or "all").strip().lower()


def _csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(_text_lines(path, file), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            duplicates = [name for name, count in Counter(reader.fieldnames or ()).items() if name and count > 1]
            if duplicates:
                raise DataError(f"{path}: line 1 has duplicate columns: {', '.join(duplicates)}. Rename one of them.")
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            raise DataError(f"{path}: cannot be parsed after line {reader.line_num} ({error}).") from error


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(_text_lines(path, file), 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: line {line} is not valid JSON ({error}).") from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}: line {line} is a {type(row).__name__}; expected an object with file and label."
                )
            yield line, row


def _text_lines(path: Path, file: Iterable[str]) -> Iterator[str]:
    """The lines of a table; raises DataError if they are not UTF-8 text."""
    try:
        for line, text in enumerate(file, 1):
            if "\0" in text:
                raise DataError(f"{path}: line {line} contains NUL bytes, so it is not UTF-8 text. Save it as UTF-8.")
            yield text
    except UnicodeDecodeError as error:
        line = _valid_lines(path.read_bytes()) + 1  # `error` has an offset in a buffer, not in the file
        raise DataError(f"{path}: line {line} is not UTF-8 text ({error.reason}). Save the file as UTF-8.") from error


def _valid_lines(content: bytes) -> int:
    """The number of complete lines before the first byte that is not UTF-8."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        content = content[: error.start]
    return content.count(b"\n")


def _accepts(source: DataSource) -> bool:
    return source.extension in _EXTENSIONS and source.path.is_file()


TABLE = Reader(
    "a table, .csv, .tsv or .jsonl:      columns file and label, optionally split; paths relative to the table;\n"
    "                                    several labels in one cell (red;round), a column of 0 and 1 per label, or\n"
    "                                    columns of numbers: --label-column, --kind",
    _accepts,
    read_table,
)
