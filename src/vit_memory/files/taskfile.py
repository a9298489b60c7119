"""Task files: one task in one safetensors file, its description in the metadata.

`vit-memory-task/1`: tensors `class_token` (D,) unless the regime has none, `memory` (L, M, D), `head.weight` (C, D),
`head.bias` (C,); metadata `format`, and `task`: a JSON text, see `describe`. Loading runs no code.
`vit-memory-task/2` adds `thresholds` and `target_scale` to that text, `vit-memory-task/3` adds `reader` and `read_out`
and the tensors of a learned reader (`adapter_tensors.py`), `vit-memory-task/4` the `branch` that a task stands on. A
task is written in the first version that can hold it, so that older versions of the library read all others.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vit_memory.errors import DamagedFile, TaskError
from vit_memory.files.adapter_tensors import (
    adapter_from_tensors,
    adapter_to_tensors,
    describe_adapter,
    is_adapter_tensor,
)
from vit_memory.files.container import container_bytes, parse_json, read_container, write_container
from vit_memory.files.description import (
    check_finite,
    check_format,
    describe_record,
    is_half,
    read_backbone,
    read_numbers,
    read_record,
    read_text,
    reading_description,
    record_half,
    stored_tensors,
)
from vit_memory.read_out import ReadOut
from vit_memory.task import BranchRef, TargetScale, Task

FORMAT, VERSION = "vit-memory-task", 4


def save_task(task: Task, path: Path | str, *, half: bool | None = None) -> None:
    """Write a task file, whole or not at all. Equal tasks give equal bytes.

    `half=True` writes float16 and records the digest of the full task, `half=False` writes float32. By default a task
    whose tensors are all float16, such as one loaded from a float16 file, is written as float16, any other as float32.
    """
    write_container(Path(path), *_contents(task, path, half))


def task_bytes(task: Task) -> bytes:
    """The content of the file that `save_task` writes."""
    return b"".join(container_bytes(*_contents(task, "bytes", None)))


def _contents(task: Task, path: Path | str, half: bool | None) -> tuple[dict[str, str], dict[str, Tensor]]:
    tensors = {"memory": task.memory, "head.weight": task.head_weight, "head.bias": task.head_bias}
    if task.class_token is not None:
        tensors["class_token"] = task.class_token
    if task.reader is not None:
        tensors |= adapter_to_tensors(task.reader)
    half = is_half(tensors) if half is None else half
    if half:
        task = replace(task, record=record_half(task.record, task.digest))
    stored = stored_tensors(f"task {task.name!r}", path, tensors, half=half)
    text = json.dumps(describe(task), sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return {"format": f"{FORMAT}/{_version(task)}", "task": text}, stored


def _version(task: Task) -> int:
    """The first version that can hold the task."""
    if task.branch is not None or (task.reader is not None and task.reader.scalings):
        return 4
    if task.reader is not None:
        return 3
    return 1 if task.thresholds is None and task.target_scale is None else 2


def load_task(path: Path | str) -> Task:
    """Read a task file; raises a FileError that names the fault. Tensors keep the precision of the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_task(new_task(backbone, "pets", ["cat", "dog"]), f"{folder}/pets.safetensors")
    ...     load_task(f"{folder}/pets.safetensors").labels
    ('cat', 'dog')
    """
    return _load(Path(path), None)


def task_from_bytes(content: bytearray, name: str) -> Task:
    """The task in the content of a file; its tensors are views of it. Messages call the file `name`."""
    return _load(Path(name), content)


def _load(path: Path, content: bytearray | None) -> Task:
    metadata, tensors = read_container(path, content)
    check_format(path, metadata.get("format", ""), FORMAT, VERSION)
    _check_tensors(path, tensors)
    with reading_description(path, "task"):
        return _rebuild(parse_json(metadata.get("task", "")), tensors)


def _check_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    required = {"memory", "head.weight", "head.bias"}
    missing = required - set(tensors)
    unknown = {name for name in set(tensors) - required - {"class_token"} if not is_adapter_tensor(name)}
    if missing or unknown:
        raise DamagedFile(
            f"{path}: tensors missing: {sorted(missing) or 'none'}; unknown tensors: {sorted(unknown) or 'none'}."
        )
    check_finite(path, tensors)


def backbone_file(path: Path) -> Path:
    """The file beside a task file that holds the backbone trained with it (regime `full`)."""
    return path.with_name(f"{path.stem}.backbone.safetensors")


def describe(task: Task) -> dict[str, Any]:
    """Everything about a task except its learned parameters, as JSON values."""
    description = {
        "name": task.name,
        "labels": list(task.labels),
        "kind": task.kind,
        "regime": task.regime,
        "memory_size": task.cells,
        "raw_memory": task.raw_memory,
        "parents": [{"name": name, "digest": task.parent_digests.get(name)} for name in task.parents],
        "backbone": asdict(task.backbone),
        **describe_record(task.record),
    }
    if task.thresholds is not None:
        description["thresholds"] = list(task.thresholds)
    if task.target_scale is not None:
        description["target_scale"] = {"mean": list(task.target_scale.mean), "std": list(task.target_scale.std)}
    if task.reader is not None:
        description |= {"reader": describe_adapter(task.reader), "read_out": str(task.read_out)}
    if task.branch is not None:
        description["branch"] = asdict(task.branch)
    return description


def _rebuild(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Task:
    parents = description["parents"]
    if description["memory_size"] != tensors["memory"].shape[1:2].numel():
        raise TaskError(
            f"memory_size is {description['memory_size']}, the memory has shape {tuple(tensors['memory'].shape)}."
        )
    backbone = read_backbone(description["backbone"])
    reader = adapter_from_tensors(tensors, description.get("reader"), range(backbone.depth))
    return Task(
        name=read_text(description["name"], "name"),
        labels=tuple(read_text(label, "labels") for label in description["labels"]),
        head_weight=tensors["head.weight"],
        head_bias=tensors["head.bias"],
        class_token=tensors.get("class_token"),
        memory=tensors["memory"],
        backbone=backbone,
        regime=description["regime"],
        kind=description["kind"],
        parents=tuple(read_text(parent["name"], "parents") for parent in parents),
        parent_digests={
            parent["name"]: read_text(parent["digest"], "parents") for parent in parents if parent["digest"]
        },
        raw_memory=bool(description["raw_memory"]),
        reader=reader if "reader" in description else None,
        read_out=ReadOut.parse(read_text(description.get("read_out", "final"), "read_out")),
        branch=_branch(description["branch"]) if "branch" in description else None,
        thresholds=read_numbers(description["thresholds"], "thresholds") if "thresholds" in description else None,
        target_scale=_target_scale(description["target_scale"]) if "target_scale" in description else None,
        record=read_record(description),
    )


def _branch(values: Mapping[str, Any]) -> BranchRef:
    return BranchRef(read_text(values["name"], "branch name"), read_text(values["digest"], "branch digest"))


def _target_scale(values: Mapping[str, Any]) -> TargetScale:
    return TargetScale(
        read_numbers(values["mean"], "target_scale mean"), read_numbers(values["std"], "target_scale std")
    )
