"""Predictions as a table of pyarrow: one row per image, with its path, its error, and the columns of every task.

Columns are those of `predict --format csv`, values those of `--format jsonl`: a text and a number for single-label
tasks, two lists for multi-label tasks, a number per value for regression tasks. A bad image has null in all of them.
Where a task computed NaN, its label is null and its numbers are NaN.
"""

import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from vit_memory.errors import TaskError
from vit_memory.evaluation.inference import FilePrediction
from vit_memory.predictions import LabelPrediction, LabelsPrediction, Prediction, ValuesPrediction, column_names
from vit_memory.task import Task

PATH, ERROR = "path", "error"


def schema_of(tasks: Sequence[Task]) -> Any:
    """The schema; TaskError if two columns have one name."""
    columns = [(PATH, pa.string()), (ERROR, pa.string())]
    for task in tasks:
        columns += zip(column_names(task), _types(task), strict=True)
    names = [name for name, _ in columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise TaskError(f"two columns would be called {twice[0]!r}: give a task another name, --rename FILE=NAME.")
    return pa.schema(columns)


def table_of(tasks: Sequence[Task], predictions: Sequence[FilePrediction]) -> Any:
    """The rows of these files, in order."""
    rows = [
        [_text(one.path), None if one.error is None else _text(one.error)]
        + [cell for task in tasks for cell in _cells(task, one.tasks.get(task.name))]
        for one in predictions
    ]
    schema = schema_of(tasks)
    columns = [pa.array([row[i] for row in rows], column.type) for i, column in enumerate(schema)]
    return pa.Table.from_arrays(columns, schema=schema)


def _types(task: Task) -> list[Any]:
    if task.kind == "regression":
        return [pa.float64()] * len(task.labels)
    if task.kind == "multi-label":
        return [pa.list_(pa.string()), pa.list_(pa.float64())]
    return [pa.string(), pa.float64()]


def _cells(task: Task, prediction: Prediction | None) -> list[Any]:
    if prediction is None:
        return [None] * len(column_names(task))
    values = prediction.as_json()
    if isinstance(prediction, LabelPrediction):
        return [values["label"], values["confidence"]]
    if isinstance(prediction, LabelsPrediction):
        present = values["labels"]
        return [[one["label"] for one in present], [one["probability"] for one in present]]
    if isinstance(prediction, ValuesPrediction):
        return list(values["values"].values())
    if task.kind == "regression":
        return [math.nan] * len(task.labels)
    return [None, [math.nan] if task.kind == "multi-label" else math.nan]


def _text(text: str) -> str:
    """A text that UTF-8 can hold: bytes of a file name that are none are escaped."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
