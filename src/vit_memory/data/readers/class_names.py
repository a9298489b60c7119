"""Class names for class numbers, for layouts that store labels as numbers and a list of names."""

from collections.abc import Sequence
from typing import Any

from vit_memory.errors import DataError


def to_class_names(labels: Sequence[Any], classes: Sequence[str] | None, where: str) -> list[Any]:
    """Replace class numbers by names, also inside lists. Labels stay as they are if `classes` is None.

    `where` names the labels in the error for a label that is not in `classes`.
    """
    if classes is None:
        return list(labels)
    return [_class_name(label, classes, where) for label in labels]


def _class_name(label: Any, classes: Sequence[str], where: str) -> Any:
    if label is None:
        return None
    if isinstance(label, list):
        return [_class_name(element, classes, where) for element in label]
    if isinstance(label, int) and 0 <= label < len(classes):
        return classes[label]
    if label not in classes:
        raise DataError(f"{where}: label {label!r} is none of the {len(classes)} classes.")
    return str(label)
