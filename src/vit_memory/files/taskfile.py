"""One task, one file: a safetensors container whose metadata say everything that is to be known about the task.

`vit-memory-task/1`: tensors `class_token` (D,) unless the regime has none, `memory` (L, M, D), `head.weight` (C, D),
`head.bias` (C,); metadata `format`, and `task`: a JSON text, see `describe`. Loading runs no code.
`vit-memory-task/2` adds `thresholds` and `target_scale` to that text; it is written only for tasks that have one of
them, so that earlier versions go on reading all others.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit_memory.backbone import BackboneIdentity
from vit_memory.errors import DamagedFile, NewerFormat, TaskError
from vit_memory.files.container import parse_json, read_container, write_container
from vit_memory.preprocessing import Preprocessing
from vit_memory.task import TargetScale, Task, TaskRecord

FORMAT, VERSION = "vit-memory-task", 2


def write_task(task: Task, path: Path | str, *, half: bool | None = None) -> None:
    """Save a task. Equal tasks give equal bytes.

    `half=True` writes float16 and records the digest of the full task, `half=False` writes float32. By default a task
    whose tensors are all float16, as one read from such a file, is written as float16, and any other as float32.
    """
    tensors = {"memory": task.memory, "head.weight": task.head_weight, "head.bias": task.head_bias}
    if task.class_token is not None:
        tensors["class_token"] = task.class_token
    if half is None:
        half = all(tensor.dtype == torch.float16 for tensor in tensors.values())
    if half and task.record.half_of is None:
        task = replace(task, record=replace(task.record, half_of=task.digest))
    dtype = torch.float16 if half else torch.float32
    kept = {name: tensors[name].detach().to("cpu", dtype) for name in sorted(tensors)}
    for name, tensor in kept.items():
        if not bool(tensor.isfinite().all()):
            why = " in float16: save it in full" if half and bool(tensors[name].isfinite().all()) else ""
            raise TaskError(f"task {task.name!r}: {name} holds NaN or infinite values{why}. Not saved to {path}.")
    text = json.dumps(describe(task), sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    version = 1 if task.thresholds is None and task.target_scale is None else 2
    write_container(Path(path), {"format": f"{FORMAT}/{version}", "task": text}, kept)


def read_task(path: Path | str) -> Task:
    """Load a task as it was saved, or say what is wrong with the file. Tensors keep the precision of the file."""
    path = Path(path)
    metadata, tensors = read_container(path)
    check_format(path, metadata.get("format", ""), FORMAT, VERSION)
    known = {"class_token", "memory", "head.weight", "head.bias"}
    missing, unknown = {"memory", "head.weight", "head.bias"} - set(tensors), set(tensors) - known
    if missing or unknown:
        raise DamagedFile(
            f"{path}: tensors missing: {sorted(missing) or 'none'}; not of a task: {sorted(unknown) or 'none'}."
        )
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise DamagedFile(f"{path}: {name} holds NaN or infinite values.")
    try:
        told = parse_json(metadata.get("task", ""))
        return _rebuild(told, tensors)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: the task's description is no JSON: {error}.") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{path}: the task's description lacks or mistypes {error}.") from None
    except TaskError as error:
        raise DamagedFile(f"{path}: {error}") from None


def backbone_file(path: Path) -> Path:
    """Where the backbone that was trained with a task of regime `full` is kept, given the task's file."""
    return path.with_name(f"{path.stem}.backbone.safetensors")


def check_format(path: Path, found: str, name: str, version: int) -> None:
    """Refuse what is none of ours, and what a later version wrote."""
    kind, _, number = found.partition("/")
    if kind != name or not number.isdecimal():
        raise DamagedFile(f"{path}: format {found!r}, expected {name}/{version}.")
    if int(number) > version:
        raise NewerFormat(
            f"{path}: written in format {found}; this version reads up to {name}/{version}. pip install -U vit-memory"
        )


def describe(task: Task) -> dict[str, Any]:
    """Everything of a task but the numbers learned, as JSON values."""
    record = task.record
    description = {
        "name": task.name,
        "labels": list(task.labels),
        "kind": task.kind,
        "regime": task.regime,
        "memory_size": task.cells,
        "raw_memory": task.raw_memory,
        "parents": [{"name": name, "digest": task.parent_digests.get(name)} for name in task.parents],
        "backbone": asdict(task.backbone),
        "preprocessing": None if record.preprocessing is None else asdict(record.preprocessing),
        "recipe": dict(record.recipe),
        "metrics": dict(record.metrics),
        "created": record.created,
        "library_version": record.library_version,
        "half_of": record.half_of,
    }
    if task.thresholds is not None:
        description["thresholds"] = list(task.thresholds)
    if task.target_scale is not None:
        description["target_scale"] = {"mean": list(task.target_scale.mean), "std": list(task.target_scale.std)}
    return description


def _rebuild(told: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Task:
    parents = told["parents"]
    if told["memory_size"] != tensors["memory"].shape[1:2].numel():
        raise TaskError(f"memory_size is {told['memory_size']}, the memory has shape {tuple(tensors['memory'].shape)}.")
    return Task(
        name=_text(told["name"], "name"),
        labels=tuple(_text(label, "labels") for label in told["labels"]),
        head_weight=tensors["head.weight"],
        head_bias=tensors["head.bias"],
        class_token=tensors.get("class_token"),
        memory=tensors["memory"],
        backbone=_backbone(told["backbone"]),
        regime=told["regime"],
        kind=told["kind"],
        parents=tuple(_text(parent["name"], "parents") for parent in parents),
        parent_digests={parent["name"]: _text(parent["digest"], "parents") for parent in parents if parent["digest"]},
        raw_memory=bool(told["raw_memory"]),
        thresholds=_numbers(told["thresholds"], "thresholds") if "thresholds" in told else None,
        target_scale=_target_scale(told["target_scale"]) if "target_scale" in told else None,
        record=TaskRecord(
            created=_text(told["created"], "created"),
            library_version=_text(told["library_version"], "library_version"),
            preprocessing=_preprocessing(told["preprocessing"]),
            recipe=dict(told["recipe"]),
            metrics=dict(told["metrics"]),
            half_of=told["half_of"],
        ),
    )


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what}: {type(value).__name__} where a text belongs")
    return value


def _numbers(values: Any, what: str) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise TypeError(f"{what}: {type(values).__name__} where a list of numbers belongs")
    return tuple(float(value) for value in values)


def _target_scale(told: Mapping[str, Any]) -> TargetScale:
    return TargetScale(_numbers(told["mean"], "target_scale mean"), _numbers(told["std"], "target_scale std"))


def _backbone(told: Mapping[str, Any]) -> BackboneIdentity:
    name, family, fingerprint = (_text(told[key], f"backbone {key}") for key in ("name", "family", "fingerprint"))
    width, depth, heads = (told[key] for key in ("width", "depth", "heads"))
    if not all(type(size) is int and size > 0 for size in (width, depth, heads)):
        raise TypeError(f"backbone sizes: {width!r}, {depth!r}, {heads!r}")
    return BackboneIdentity(name, family, width, depth, heads, fingerprint)


def _preprocessing(told: Mapping[str, Any] | None) -> Preprocessing | None:
    if told is None:
        return None
    resize, crop = told["resize"], told["crop"]
    return Preprocessing(
        resize=tuple(resize) if isinstance(resize, list) else resize,
        crop=None if crop is None else tuple(crop),
        mean=tuple(told["mean"]),
        std=tuple(told["std"]),
        interpolation=told["interpolation"],
        resampler=told.get("resampler", "torch"),  # files of 0.1.0's first days do not say
    )
