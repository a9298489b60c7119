"""Answers of the engine as JSON values: labels with probabilities, values, attention.

JSON has no NaN: where a task computed one, its numbers are null and `not_a_number` says so. numpy rather than torch,
whose calls cost more than these few numbers.
"""

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


def answer_json(name: str, answer: Answer, task_set: TaskSet, top_k: int) -> dict[str, Any]:
    """The answer for one image."""
    tasks = task_set.tasks
    values: dict[str, Any] = {
        "name": name,
        "tasks": {
            task: {"kind": tasks[task].kind, "digest": answer.digests[task], **_task_json(tasks[task], output, top_k)}
            for task, output in answer.outputs.items()
        },
        "original": _original_json(answer.original, top_k),
        "batch": answer.batch,
        "stages_ms": {stage: round(1000 * seconds, 3) for stage, seconds in answer.stages.items()},
    }
    if answer.explanations:
        values["explanations"] = {task: explanation_json(one) for task, one in answer.explanations.items()}
    return values


def _task_json(task: Task, output: Tensor, top_k: int) -> dict[str, Any]:
    logits = output.numpy().astype(np.float64)
    finite = bool(np.isfinite(logits).all())
    flag = {} if finite else {"not_a_number": True}
    if task.kind == "regression":
        return {"values": {label: _value(x) for label, x in zip(task.labels, logits, strict=True)}, **flag}
    if task.kind == "multi-label":
        thresholds = task.thresholds or (DEFAULT_THRESHOLD,) * len(task.labels)
        if not finite:
            return {"labels": [], "top": [], **flag}
        probabilities = 1 / (1 + np.exp(-np.clip(logits, -700, 700)))
        order = np.argsort(-probabilities, kind="stable")
        listed = [(task.labels[i], float(probabilities[i]), thresholds[i]) for i in order]
        return {
            "labels": [_chance(label, p) for label, p, threshold in listed if p >= threshold],
            "top": [{**_chance(label, p), "threshold": threshold} for label, p, threshold in listed[:top_k]],
        }
    if not finite:
        return {"label": None, "confidence": None, "top": [], **flag}
    top = _most_probable(logits, top_k)
    return {
        "label": task.labels[top[0][0]],
        "confidence": round(top[0][1], _DIGITS),
        "top": [_chance(task.labels[i], p) for i, p in top],
    }


def _original_json(original: OriginalAnswer, top_k: int) -> dict[str, Any]:
    """The backbone's own classes have numbers for names: libraries keep their names in different places, or nowhere."""
    top = None
    if original.logits is not None:
        logits = original.logits.numpy().astype(np.float64)
        finite = bool(np.isfinite(logits).all())
        top = [_chance(str(i), p) for i, p in _most_probable(logits, top_k)] if finite else []
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


def _most_probable(logits: "np.ndarray[Any, Any]", count: int) -> list[tuple[int, float]]:
    exponentials = np.exp(logits - logits.max())
    probabilities = exponentials / exponentials.sum()
    order = np.argsort(-logits, kind="stable")[:count]
    return [(int(i), float(probabilities[i])) for i in order]


def _chance(label: str, probability: float) -> dict[str, Any]:
    return {"label": label, "probability": round(probability, _DIGITS)}


def _share(value: float) -> float | None:
    return round(value, 5) if np.isfinite(value) else None


def _value(value: float) -> float | None:
    return float(f"{value:.7g}") if np.isfinite(value) else None
