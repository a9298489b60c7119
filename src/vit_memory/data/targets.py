"""What images show, as numbers: from the cells of a source to class numbers, tables of labels, or values.

single-label   one label per image                                        (n,) int64
multi-label    any number of labels per image; 1 present, 0 absent        (n, C) float32
regression     one or several numbers per image                           (n, C) float64

NaN in the last two means "not known": training and scores leave that cell out.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vit_memory.errors import DataError
from vit_memory.task import Kind

KindOption = Literal["auto", "single-label", "multi-label", "regression"]
SEPARATOR = ";"  # between several labels in one cell of text
_BLANK = frozenset({"", "nan", "na", "n/a", "null", "?"})
_FLAGS = {"0": 0.0, "1": 1.0, "false": 0.0, "true": 1.0, "no": 0.0, "yes": 1.0, "0.0": 0.0, "1.0": 1.0}
_LARGEST = 1e30  # values are answered in float32
_FEW_ROWS = 20  # below, many different whole numbers are still taken for class numbers


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """What one part of a source says of its images, as it stands there."""

    values: Sequence[Any]  # per image: one cell, or with several columns a tuple of them
    rows: Sequence[str] | None = None  # how messages call each row, "line 3"; None: by number

    def __len__(self) -> int:
        return len(self.values)

    def row(self, i: int) -> str:
        """For messages."""
        return f"row {i}" if self.rows is None else self.rows[i]


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """The numbers of every part."""

    kind: Kind
    reason: str  # why it is of this kind, for people
    labels: tuple[str, ...]
    values: Mapping[str, np.ndarray]  # by part


def read_targets(
    source: str,
    parts: Mapping[str, Cells],
    columns: Sequence[str],
    classes: Sequence[str] | None,
    asked: KindOption = "auto",
    labels: Sequence[str] | None = None,
) -> Targets:
    """Turn cells into numbers, as `asked` or as the cells suggest.

    `classes` is the order of the labels where the source knows one, `labels` those of a task that is to be scored,
    which are then the only ones allowed.
    """
    kind, reason = (asked, "as asked") if asked != "auto" else _suggested(parts, columns, classes)
    known = labels if labels is not None else classes
    if kind == "single-label":
        return _single_label(source, parts, columns, known, reason)
    if kind == "multi-label":
        return _multi_label(source, parts, columns, known, reason)
    return _regression(source, parts, columns, reason)


def _suggested(parts: Mapping[str, Cells], columns: Sequence[str], classes: Sequence[str] | None) -> tuple[Kind, str]:
    cells = [cell for part in parts.values() for cell in part.values]
    if len(columns) > 1:
        named = f"columns {', '.join(columns[:3])}{' …' if len(columns) > 3 else ''}"
        flat = [value for cell in cells for value in cell if not _blank(value)]
        if not flat:
            raise DataError(f"the {named} hold nothing.")
        if all(_flag(value) is not None for value in flat):
            return "multi-label", f"the {named} hold 0 and 1"
        return "regression", f"the {named} hold numbers"
    (column,) = columns
    several = next((cell for cell in cells if isinstance(cell, str) and SEPARATOR in cell), None)
    if any(isinstance(cell, list | tuple) for cell in cells):
        return "multi-label", f"the cells of {column!r} are lists"
    if classes is None and several is not None:
        return "multi-label", f"cells of {column!r} hold several labels, such as {several!r}"
    number = None if classes is not None else _looks_like_a_number(cells)
    if number is not None:
        return "regression", f"the cells of {column!r} are numbers, such as {number}"
    return "single-label", "one label per image"


def _looks_like_a_number(cells: Sequence[Any]) -> Any:
    """An example, where all cells are numbers and not class numbers: with fractions, or most of them different.

    Infinite ones count as numbers here, so that they are refused as values and not learned as labels.
    """
    filled = [cell for cell in cells if not _blank(cell)]
    numbers = [number for number in map(_parsed, filled) if number is not None]
    if not filled or len(numbers) < len(filled):
        return None
    different = len(filled) >= _FEW_ROWS and len(set(numbers)) > len(numbers) / 2
    return next((cell for cell, number in zip(filled, numbers, strict=True) if number % 1 or different), None)


def _single_label(
    source: str, parts: Mapping[str, Cells], columns: Sequence[str], classes: Sequence[str] | None, reason: str
) -> Targets:
    if len(columns) > 1:
        raise DataError(
            f"{source}: {len(columns)} label columns ({', '.join(columns[:3])} …), but a single-label task has one "
            f"label per image. Name one with --label-column, or train another kind: --kind multi-label or regression."
        )
    names: dict[str, list[str]] = {}
    faults = []
    for part, cells in parts.items():
        names[part] = [_text(cell) for cell in cells.values]
        faults += [f"{cells.row(i)}: no {columns[0]}" for i, name in enumerate(names[part]) if not name]
    _refuse(source, faults)
    if classes is None:
        learned = "train" if "train" in parts else "all"
        classes = _in_order(names.get(learned, ()))
    place = {label: i for i, label in enumerate(classes)}
    for part, given in names.items():
        strangers = sorted(set(given) - set(place))
        if strangers:
            raise DataError(_strangers(source, part, strangers))
    values = {part: np.asarray([place[name] for name in given], dtype=np.int64) for part, given in names.items()}
    return Targets("single-label", reason, tuple(classes), values)


def _multi_label(
    source: str, parts: Mapping[str, Cells], columns: Sequence[str], known: Sequence[str] | None, reason: str
) -> Targets:
    if len(columns) > 1:
        faults: list[str] = []
        tables = {part: _rows(cells, columns, _flag, "0 or 1", faults) for part, cells in parts.items()}
        _refuse(source, faults)
        flags = {part: table.astype(np.float32) for part, table in tables.items()}
        return Targets("multi-label", reason, tuple(columns), flags)
    present = {
        part: [_labels(cell, f"{source}: {cells.row(i)}") for i, cell in enumerate(cells.values)]
        for part, cells in parts.items()
    }
    learned = present["train" if "train" in present else "all"] if known is None else []
    labels = tuple(known) if known is not None else _in_order(name for row in learned if row for name in row)
    if not labels:
        raise DataError(f"{source}: not one label in column {columns[0]!r}.")
    place = {label: i for i, label in enumerate(labels)}
    values = {}
    for part, rows in present.items():
        strangers = sorted({name for row in rows if row for name in row} - set(place))
        if strangers:
            raise DataError(_strangers(source, part, strangers))
        table = np.zeros((len(rows), len(labels)), dtype=np.float32)
        for i, row in enumerate(rows):
            table[i] = math.nan if row is None else 0.0
            table[i, [place[name] for name in row or ()]] = 1.0
        values[part] = table
    return Targets("multi-label", reason, labels, values)


def _regression(source: str, parts: Mapping[str, Cells], columns: Sequence[str], reason: str) -> Targets:
    faults: list[str] = []
    values = {part: _rows(cells, columns, _number, "a number", faults) for part, cells in parts.items()}
    _refuse(source, faults)
    return Targets("regression", reason, tuple(columns), values)


def _rows(cells: Cells, columns: Sequence[str], read: Any, expected: str, faults: list[str]) -> np.ndarray:
    """(n, columns) of what `read` makes of every cell; blank ones are NaN, and those it refuses are faults."""
    table = np.full((len(cells), len(columns)), math.nan)
    for i, cell in enumerate(cells.values):
        given = cell if len(columns) > 1 else (cell,)
        for j, value in enumerate(given):
            if _blank(value):
                continue
            number = read(value)
            if number is None:
                faults.append(f"{cells.row(i)}: {columns[j]} is {value!r}; expected {expected}, or nothing")
            else:
                table[i, j] = number
    return table


def _blank(cell: Any) -> bool:
    if isinstance(cell, str):
        return cell.strip().lower() in _BLANK
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def _number(cell: Any) -> float | None:
    number = _parsed(cell)
    return number if number is not None and abs(number) <= _LARGEST else None  # not NaN, nor infinite


def _parsed(cell: Any) -> float | None:
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def _flag(cell: Any) -> float | None:
    return _FLAGS.get(str(cell).strip().lower())


def _text(cell: Any) -> str:
    return "" if cell is None or (isinstance(cell, float) and math.isnan(cell)) else str(cell).strip()


def _labels(cell: Any, where: str) -> list[str] | None:
    """The labels of one cell, none for an empty list or a lone separator; None where nothing is known."""
    if isinstance(cell, list | tuple):
        odd = next((one for one in cell if isinstance(one, float | list | tuple | dict)), None)
        if odd is not None:
            raise DataError(f"{where}: a list holds {odd!r}; expected labels. Numbers go into a column each.")
        return [name for name in map(_text, cell) if name]
    text = _text(cell)
    if not text:
        return None
    return [name for name in (part.strip() for part in text.split(SEPARATOR)) if name]


def _refuse(source: str, faults: Sequence[str]) -> None:
    if faults:
        shown = "; ".join(faults[:5]) + (" …" if len(faults) > 5 else "")
        raise DataError(f"{source}: {len(faults)} cells cannot be used. {shown}.")


def _strangers(source: str, part: str, strangers: Sequence[str]) -> str:
    shown = ", ".join(strangers[:5]) + (" …" if len(strangers) > 5 else "")
    return (
        f"{source}: the {part} images hold {len(strangers)} labels without any training image: {shown}. "
        f"Add some, or leave them out."
    )


def _in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Distinct labels, by number where all are numbers: 10 comes after 9."""
    distinct = set(labels)
    if all(label.isdecimal() for label in distinct):
        return tuple(sorted(distinct, key=lambda label: (int(label), label)))
    return tuple(sorted(distinct))
