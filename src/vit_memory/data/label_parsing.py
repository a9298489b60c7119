"""Parsing of label cells: text, lists of labels, flags (0 and 1) and numbers, as tables store them."""

import math
from typing import Any

from vit_memory.errors import DataError

SEPARATOR = ";"  # between several labels in one cell of text
_BLANK = frozenset({"", "nan", "na", "n/a", "null", "?"})
_FLAGS = {"0": 0.0, "1": 1.0, "false": 0.0, "true": 1.0, "no": 0.0, "yes": 1.0, "0.0": 0.0, "1.0": 1.0}
_LARGEST = 1e30  # predictions are float32


def is_blank(cell: Any) -> bool:
    """Whether a cell is empty, NaN, or a placeholder such as `n/a`."""
    if isinstance(cell, str):
        return cell.strip().lower() in _BLANK
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def parse_number(cell: Any) -> float | None:
    """A finite number that float32 can represent, or None."""
    number = parse_float(cell)
    return number if number is not None and abs(number) <= _LARGEST else None  # neither NaN nor infinite


def parse_float(cell: Any) -> float | None:
    """Any number, or None."""
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def parse_flag(cell: Any) -> float | None:
    """0 or 1, or None."""
    return _FLAGS.get(str(cell).strip().lower())


def to_text(cell: Any) -> str:
    """The cell as stripped text; empty for None and NaN."""
    return "" if cell is None or (isinstance(cell, float) and math.isnan(cell)) else str(cell).strip()


def split_labels(cell: Any, where: str) -> list[str] | None:
    """The labels of one cell: an empty list for an empty list or a lone separator; None if they are not known."""
    if isinstance(cell, list | tuple):
        wrong = next((element for element in cell if isinstance(element, float | list | tuple | dict)), None)
        if wrong is not None:
            raise DataError(
                f"{where}: a list contains {wrong!r}; expected labels. Put numbers into one column per value."
            )
        return [name for name in map(to_text, cell) if name]
    text = to_text(cell)
    if not text:
        return None
    return [name for name in (element.strip() for element in text.split(SEPARATOR)) if name]
