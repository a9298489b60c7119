"""Answers of the engine as JSON values: labels with probabilities, values, attention.

JSON has no NaN: where a task computed one, its numbers are null and `not_a_number` says so. numpy rather than torch,
whose calls cost more than these few numbers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit_memory.explanation import Explanation
from vit_memory.predictions import DEFAULT_THRESHOLD
from vit_memory.serving.answers import Answer, OriginalAnswer
from vit_memory.serving.task_set import TaskSet
from vit_memory.task import Task

_DIGITS = 6
_PER_IMAGE, _PER_TASK = 100, 20  # about 0.2 ms and 0.04 ms, at 2 µs for a number
_FLAG = {"not_a_number": True}
Array = np.ndarray[Any, Any]


def answer_json(name: str, answer: Answer, task_set: TaskSet, top_k: int) -> dict[str, Any]:
    """The answer for one image."""
    tasks, outputs = task_set.tasks, answer.outputs
    by_kind = {"single-label": _single_labels, "multi-label": _multi_labels, "regression": _values}
    answers: dict[str, dict[str, Any]] = {}
    # Tasks of one kind and size are computed together: a call of numpy costs more than the few numbers of a task.
    for (kind, _), names in _groups(tasks, outputs).items():
        logits = np.stack([outputs[task].numpy() for task in names]).astype(np.float64)  # (T, C)
        finite = np.asarray(np.isfinite(logits).all(-1, keepdims=True))  # (T, 1)
        of_kind = by_kind[kind]([tasks[task] for task in names], np.where(finite, logits, 0.0), top_k)
        for task, values, (number,) in zip(names, of_kind, finite.tolist(), strict=True):
            answers[task] = values if number else _not_a_number(tasks[task], outputs[task])
    digests = answer.digests
    result: dict[str, Any] = {
        "name": name,
        "tasks": {task: {"kind": tasks[task].kind, "digest": digests[task], **answers[task]} for task in outputs},
        "original": _original_json(answer.original, top_k),
        "batch": answer.batch,
        "stages_ms": {stage: round(1000 * seconds, 3) for stage, seconds in answer.stages.items()},
    }
    if answer.explanations:
        result["explanations"] = {task: explanation_json(one) for task, one in answer.explanations.items()}
    return result


def answer_size(answer: Answer) -> int:
    """How much work its JSON is, counted in numbers to write; a task and an image cost as much as some numbers."""
    outputs = sum(_PER_TASK + output.numel() for output in answer.outputs.values())
    attention = sum(one.patches[:, 0].numel() for one in answer.explanations.values())
    return _PER_IMAGE + outputs + attention


def _groups(tasks: Mapping[str, Task], outputs: Mapping[str, Tensor]) -> dict[tuple[str, int], list[str]]:
    groups: dict[tuple[str, int], list[str]] = {}
    for name in outputs:
        task = tasks[name]
        groups.setdefault((task.kind, len(task.labels)), []).append(name)
    return groups


def _single_labels(tasks: Sequence[Task], logits: Array, top_k: int) -> list[dict[str, Any]]:
    answers = []
    for task, top in zip(tasks, _most_probable(logits, top_k), strict=True):
        listed = [{"label": task.labels[i], "probability": p} for i, p in top]
        answers.append({"label": listed[0]["label"], "confidence": listed[0]["probability"], "top": listed})
    return answers


def _multi_labels(tasks: Sequence[Task], logits: Array, top_k: int) -> list[dict[str, Any]]:
    probabilities = 1 / (1 + np.exp(-np.clip(logits, -700, 700)))
    orders = np.argsort(-probabilities, axis=-1, kind="stable").tolist()
    answers = []
    for task, row, order in zip(tasks, probabilities.tolist(), orders, strict=True):
        thresholds = task.thresholds or (DEFAULT_THRESHOLD,) * len(task.labels)
        listed = [{"label": task.labels[i], "probability": round(row[i], _DIGITS)} for i in order]
        answers.append(
            {
                "labels": [one for one, i in zip(listed, order, strict=True) if row[i] >= thresholds[i]],
                "top": [{**one, "threshold": thresholds[i]} for one, i in zip(listed[:top_k], order, strict=False)],
            }
        )
    return answers


def _values(tasks: Sequence[Task], values: Array, top_k: int) -> list[dict[str, Any]]:
    return [
        {"values": {label: float(f"{value:.7g}") for label, value in zip(task.labels, row, strict=True)}}
        for task, row in zip(tasks, values.tolist(), strict=True)
    ]


def _not_a_number(task: Task, output: Tensor) -> dict[str, Any]:
    """What is left of an answer with NaN or infinite numbers in it."""
    if task.kind == "regression":
        pairs = zip(task.labels, output.tolist(), strict=True)
        return {"values": {label: value if math.isfinite(value) else None for label, value in pairs}, **_FLAG}
    if task.kind == "multi-label":
        return {"labels": [], "top": [], **_FLAG}
    return {"label": None, "confidence": None, "top": [], **_FLAG}


def _original_json(original: OriginalAnswer, top_k: int) -> dict[str, Any]:
    """The backbone's own classes have numbers for names: libraries keep their names in different places, or nowhere."""
    top = None
    if original.logits is not None:
        logits = original.logits.numpy().astype(np.float64)
        listed = _most_probable(logits[None], top_k)[0] if np.isfinite(logits).all() else []
        top = [{"label": str(i), "probability": p} for i, p in listed]
    return {"feature_size": len(original.feature), "top": top, "identical": original.identical}


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    """Attention per block, means over heads."""
    patches = explanation.patches.mean(1)  # (L, rows, columns)
    itself = explanation.itself.mean(1)  # (L,)
    originals = torch.zeros_like(itself)
    for part in explanation.originals.values():
        originals = originals + part.mean(1)
    memory = explanation.memory.mean(1).sum(-1)  # (L,)
    ancestors = {name: part.mean(1) for name, part in explanation.ancestors.items()}
    cells = {name: part.mean(1).sum(-1) for name, part in explanation.ancestor_memory.items()}
    return {
        "grid": list(patches.shape[1:]),
        "blocks": [
            {
                "patches": [_share(x) for x in patches[block].flatten().tolist()],
                "memory": _share(float(memory[block])),
                "itself": _share(float(itself[block])),
                "originals": _share(float(originals[block])),
                "ancestors": {name: _share(float(part[block])) for name, part in ancestors.items()},
                "ancestor_memory": {name: _share(float(part[block])) for name, part in cells.items()},
            }
            for block in range(len(patches))
        ],
    }


def _most_probable(logits: Array, count: int) -> list[list[tuple[int, float]]]:
    """Per row of logits (T, C), the most probable classes, best first."""
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities = (exponentials / exponentials.sum(-1, keepdims=True)).round(_DIGITS)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    rows = np.arange(len(logits))[:, None]
    chances = probabilities[rows, order].tolist()
    return [list(zip(indices, row, strict=True)) for indices, row in zip(order.tolist(), chances, strict=True)]


def _share(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None
