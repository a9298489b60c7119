"""A task as a model of the Open Inference Protocol v2: its inputs and outputs, described and filled."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from vit_memory.data.transforms import view_size
from vit_memory.errors import DataError
from vit_memory.serving.inference_tensors import IMAGE, PIXELS, InferRequest, OutputTensor, RequestedOutput
from vit_memory.serving.problems import ProblemError
from vit_memory.serving.task_set import TaskSet
from vit_memory.task import Task

LABEL = "label"  # the output with the name of the best class


def values_name(task: Task) -> str:
    """The output with a task's numbers."""
    return "values" if task.kind == "regression" else "logits"


def pixel_size(task: Task, task_set: TaskSet) -> tuple[int, int] | None:
    """(height, width) of a task's normalised images; None if they have no fixed size."""
    preprocessing = task_set.preprocessing[task.name]
    try:
        return None if preprocessing is None else view_size(preprocessing)
    except DataError:  # images keep their proportions
        return None


def metadata_of(task: Task, task_set: TaskSet) -> dict[str, Any]:
    """The metadata of a task, as the protocol has them."""
    size = pixel_size(task, task_set) or (-1, -1)
    outputs = [{"name": values_name(task), "datatype": "FP32", "shape": [-1, len(task.labels)]}]
    if task.kind == "single-label":
        outputs.append({"name": LABEL, "datatype": "BYTES", "shape": [-1]})
    return {
        "name": task.name,
        "versions": [task_set.digests[task.name]],
        "platform": "vit-memory",
        "inputs": [
            {"name": IMAGE, "datatype": "BYTES", "shape": [-1]},
            {"name": PIXELS, "datatype": "FP32", "shape": [-1, 3, *size]},
        ],
        "outputs": outputs,
    }


def config_of(task: Task, task_set: TaskSet) -> dict[str, Any]:
    """The configuration of a task in Triton's words, which some of its clients ask for; with kind and labels."""
    metadata = metadata_of(task, task_set)
    types = {"BYTES": "TYPE_STRING", "FP32": "TYPE_FP32"}
    config = {
        direction: [
            {"name": tensor["name"], "data_type": types[tensor["datatype"]], "dims": tensor["shape"], **optional}
            for tensor in metadata[f"{direction}s"]
        ]
        for direction, optional in (("input", {"optional": True}), ("output", {}))
    }
    facts = {"kind": task.kind, "labels": json.dumps(task.labels)}
    return {
        "name": task.name,
        "platform": "vit-memory",
        "backend": "vit-memory",
        "max_batch_size": 0,  # in Triton's words: the dimensions include the batch
        **config,
        "parameters": {key: {"string_value": value} for key, value in facts.items()},
    }


def requested_outputs(request: InferRequest, task: Task) -> Sequence[RequestedOutput]:
    """The outputs that a request wants of a task: those it lists, or all."""
    known = [values_name(task), *([LABEL] if task.kind == "single-label" else [])]
    if request.outputs is None:
        return [RequestedOutput(name, request.binary) for name in known]
    for output in request.outputs:
        if output.name not in known:
            raise ProblemError(
                400, f"task {task.name!r} has no output {output.name[:100]!r}; it has: {', '.join(known)}."
            )
        if output.classes and output.name == LABEL:
            raise ProblemError(400, f"output {LABEL!r} cannot be classified; ask for {known[0]!r}.")
    return request.outputs


def output_tensor(task: Task, rows: Tensor, output: RequestedOutput) -> OutputTensor:
    """One output, from a task's numbers (n, C).

    A label is empty where the numbers are not finite. Classes are texts as Triton writes them: `value:index:label`.
    """
    values: np.ndarray = rows.numpy()
    n = len(values)
    if output.name == LABEL:
        labels = [task.labels[i] for i in values.argmax(1)]
        texts = [label if np.isfinite(row).all() else "" for label, row in zip(labels, values, strict=True)]
        return OutputTensor(LABEL, texts, (n,), output.binary)
    if output.classes:
        best = np.argsort(-values, axis=1, kind="stable")[:, : output.classes]
        texts = [f"{row[i]:f}:{i}:{task.labels[i]}" for row, order in zip(values, best, strict=True) for i in order]
        return OutputTensor(output.name, texts, best.shape, output.binary)
    return OutputTensor(output.name, values, values.shape, output.binary)


# For the description of the server's interface (OpenAPI).
_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "What is wrong, in one sentence.", "content": {"application/json": {"schema": _ERROR}}}
}
_TENSOR = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "properties": {
        "name": {"type": "string", "enum": [IMAGE, PIXELS]},
        "datatype": {"type": "string", "enum": ["BYTES", "FP32"]},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}},
        "parameters": {"type": "object"},
        "data": {"type": "array", "items": {}},
    },
}
INFER_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["inputs"],
                    "properties": {
                        "id": {"type": "string", "maxLength": 256},
                        "inputs": {"type": "array", "items": _TENSOR, "minItems": 1, "maxItems": 1},
                        "outputs": {"type": "array", "items": {"type": "object", "required": ["name"]}},
                        "parameters": {"type": "object"},
                    },
                }
            },
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}
INFERRED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The outputs, as JSON or, where the request asks for it, with binary data after the JSON.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}
OPTIONS_BODY: dict[str, Any] = {
    "requestBody": {"required": False, "content": {"application/json": {"schema": {"type": "object"}}}}
}
