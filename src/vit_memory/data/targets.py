"""Targets: the labels of a source as arrays of numbers.

single-label   one label per image                                        (n,) int64 class numbers
multi-label    any number of labels per image; 1 present, 0 absent        (n, C) float32
regression     one or several numbers per image                           (n, C) float64

NaN in the last two means "not known"; the loss and the metrics ignore it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vit_memory.choices import Kind, KindOrAuto
from vit_memory.data.label_parsing import (
    SEPARATOR,
    is_blank,
    parse_flag,
    parse_float,
    parse_number,
    split_labels,
    to_text,
)
from vit_memory.errors import DataError

_FEW_ROWS = 20  # with fewer rows, distinct whole numbers are read as class numbers


@dataclass(frozen=True, slots=True, eq=False)
class RawLabels:
    """The labels of one split as the source stores them."""

    values: Sequence[Any]  # per image: one cell, or a tuple of cells if there are several label columns
    row_names: Sequence[str] | None = None  # for messages, such as "line 3"; None: by number

    def __len__(self) -> int:
        return len(self.values)

    def row_name(self, i: int) -> str:
        """The name of row i in messages."""
        return f"row {i}" if self.row_names is None else self.row_names[i]


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """The targets of every split."""

    kind: Kind
    kind_reason: str  # how the kind was decided, for people
    labels: tuple[str, ...]
    values: Mapping[str, np.ndarray]  # by split


def read_targets(
    source: str,
    splits: Mapping[str, RawLabels],
    columns: Sequence[str],
    classes: Sequence[str] | None,
    kind: KindOrAuto = "auto",
    labels: Sequence[str] | None = None,
) -> Targets:
    """Turn raw labels into targets of the given kind; `auto` detects the kind from the labels.

    `classes` are the label names in the source's order, if it defines one. `labels`, if given, are the only labels
    allowed: those of a task that is evaluated.
    """
    reason = "set explicitly"
    if kind == "auto":
        kind, reason = _detect_kind(source, splits, columns, classes)
    known_labels = classes if labels is None else labels
    if kind == "single-label":
        return _single_label(source, splits, columns, known_labels, reason)
    if kind == "regression":
        return _regression(source, splits, columns, reason)
    if len(columns) > 1:
        return _multi_label_columns(source, splits, columns, reason)
    return _multi_label_lists(source, splits, columns[0], known_labels, reason)


def _detect_kind(
    source: str, splits: Mapping[str, RawLabels], columns: Sequence[str], classes: Sequence[str] | None
) -> tuple[Kind, str]:
    """The kind that the labels suggest, and the reason."""
    cells = [cell for split in splits.values() for cell in split.values]
    if len(columns) > 1:
        return _detect_kind_of_columns(source, cells, columns)
    (column,) = columns
    if any(isinstance(cell, list | tuple) for cell in cells):
        return "multi-label", f"the cells of {column!r} are lists"
    if classes is None:
        several = next((cell for cell in cells if isinstance(cell, str) and SEPARATOR in cell), None)
        if several is not None:
            return "multi-label", f"cells of {column!r} contain several labels, such as {several!r}"
        number = _example_number(cells)
        if number is not None:
            return "regression", f"the cells of {column!r} are numbers, such as {number}"
    return "single-label", "one label per image"


def _detect_kind_of_columns(source: str, rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> tuple[Kind, str]:
    cells = [cell for row in rows for cell in row if not is_blank(cell)]
    names = f"columns {_shown(columns, 3)}"
    if not cells:
        raise DataError(f"{source}: the {names} are empty.")
    if all(parse_flag(cell) is not None for cell in cells):
        return "multi-label", f"the {names} contain 0 and 1"
    return "regression", f"the {names} contain numbers"


def _example_number(cells: Sequence[Any]) -> Any:
    """One of the cells if all are numbers but not class numbers: with fractions, or most of them distinct.

    Infinite numbers count too, so that they are refused as values instead of becoming labels.
    """
    filled = [cell for cell in cells if not is_blank(cell)]
    numbers = [number for number in map(parse_float, filled) if number is not None]
    if not filled or len(numbers) < len(filled):
        return None
    mostly_distinct = len(filled) >= _FEW_ROWS and len(set(numbers)) > len(numbers) / 2
    return next((cell for cell, number in zip(filled, numbers, strict=True) if number % 1 or mostly_distinct), None)


def _single_label(
    source: str, splits: Mapping[str, RawLabels], columns: Sequence[str], classes: Sequence[str] | None, reason: str
) -> Targets:
    if len(columns) > 1:
        raise DataError(
            f"{source}: {len(columns)} label columns ({_shown(columns, 3)}), but a single-label task has one label per "
            f"image. Choose one with --label-column, or another kind: --kind multi-label or regression."
        )
    names: dict[str, list[str]] = {}
    faults = []
    for split, raw in splits.items():
        names[split] = [to_text(cell) for cell in raw.values]
        faults += [f"{raw.row_name(i)}: no {columns[0]}" for i, name in enumerate(names[split]) if not name]
    _refuse(source, faults)
    if classes is None:
        classes = _sorted_labels(names.get("train" if "train" in splits else "all", ()))
    numbers = {label: i for i, label in enumerate(classes)}
    for split, labels in names.items():
        _refuse_unknown(source, split, set(labels) - set(numbers))
    values = {split: np.asarray([numbers[name] for name in row], dtype=np.int64) for split, row in names.items()}
    return Targets("single-label", reason, tuple(classes), values)


def _multi_label_columns(source: str, splits: Mapping[str, RawLabels], columns: Sequence[str], reason: str) -> Targets:
    """One column of 0 and 1 per label."""
    faults: list[str] = []
    values = {split: _parse_cells(raw, columns, parse_flag, "0 or 1", faults) for split, raw in splits.items()}
    _refuse(source, faults)
    return Targets("multi-label", reason, tuple(columns), {name: v.astype(np.float32) for name, v in values.items()})


def _multi_label_lists(
    source: str, splits: Mapping[str, RawLabels], column: str, known_labels: Sequence[str] | None, reason: str
) -> Targets:
    """One column with a list of labels per image."""
    lists = {
        split: [split_labels(cell, f"{source}: {raw.row_name(i)}") for i, cell in enumerate(raw.values)]
        for split, raw in splits.items()
    }
    if known_labels is None:
        training_lists = lists["train" if "train" in lists else "all"]
        known_labels = _sorted_labels(label for row in training_lists for label in row or ())
    labels = tuple(known_labels)
    if not labels:
        raise DataError(f"{source}: no label in column {column!r}.")
    for split, rows in lists.items():
        _refuse_unknown(source, split, {label for row in rows for label in row or ()} - set(labels))
    values = {split: _one_hot(rows, labels) for split, rows in lists.items()}
    return Targets("multi-label", reason, labels, values)


def _one_hot(rows: Sequence[Sequence[str] | None], labels: Sequence[str]) -> np.ndarray:
    """(n, C) float32: 1 present, 0 absent; a row of NaN where the labels are not known."""
    columns = {label: j for j, label in enumerate(labels)}
    values = np.zeros((len(rows), len(labels)), dtype=np.float32)
    for i, row in enumerate(rows):
        values[i] = math.nan if row is None else 0.0
        values[i, [columns[label] for label in row or ()]] = 1.0
    return values


def _regression(source: str, splits: Mapping[str, RawLabels], columns: Sequence[str], reason: str) -> Targets:
    faults: list[str] = []
    values = {split: _parse_cells(raw, columns, parse_number, "a number", faults) for split, raw in splits.items()}
    _refuse(source, faults)
    return Targets("regression", reason, tuple(columns), values)


def _parse_cells(
    raw: RawLabels, columns: Sequence[str], parse: Callable[[Any], float | None], expected: str, faults: list[str]
) -> np.ndarray:
    """(n, columns) float64 of parsed cells; NaN for blank ones. Cells that `parse` refuses are appended to `faults`."""
    values = np.full((len(raw), len(columns)), math.nan)
    for i, row in enumerate(raw.values):
        for j, cell in enumerate(row if len(columns) > 1 else (row,)):
            if is_blank(cell):
                continue
            number = parse(cell)
            if number is None:
                faults.append(f"{raw.row_name(i)}: {columns[j]} is {cell!r}; expected {expected}, or an empty cell")
            else:
                values[i, j] = number
    return values


def _refuse(source: str, faults: Sequence[str]) -> None:
    if faults:
        shown = "; ".join(faults[:5]) + (" …" if len(faults) > 5 else "")
        raise DataError(f"{source}: {len(faults)} label cells cannot be used. {shown}.")


def _refuse_unknown(source: str, split: str, unknown: Iterable[str]) -> None:
    labels = sorted(unknown)
    if labels:
        raise DataError(
            f"{source}: the {split} images have {len(labels)} labels without any training image: "
            f"{_shown(labels, 5)}. Add training images with these labels, or remove the {split} images."
        )


def _shown(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:count]) + (" …" if len(names) > count else "")


def _sorted_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Distinct labels, by number if all are numbers: 10 comes after 9."""
    distinct = set(labels)
    if all(label.isdecimal() for label in distinct):
        return tuple(sorted(distinct, key=lambda label: (int(label), label)))
    return tuple(sorted(distinct))
