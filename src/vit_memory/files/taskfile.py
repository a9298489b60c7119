"""Task files: one task in one safetensors file, its description in the metadata.

`vit-memory-task/1`: tensors `class_token` (D,) unless the regime has none, `memory` (L, M, D), `head.weight` (C, D),
`head.bias` (C,); metadata `format`, and `task`: a JSON text, see `describe`. Loading runs no code.
`vit-memory-task/2` adds `thresholds` and `target_scale` to that text, `vit-memory-task/3` adds `reader` and `read_out`
and the tensors of a learned reader (`reader_tensors.py`). A task is written in the first version that can hold it, so
that older versions of the library read all others.
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
from vit_memory.files.reader_tensors import (
    describe_reader,
    is_reader_tensor,
    reader_from_tensors,
    reader_to_tensors,
)
from vit_memory.learned_reader import LearnedReader, ReadOut
from vit_memory.preprocessing import Preprocessing
from vit_memory.task import TargetScale, Task, TaskRecord

FORMAT, VERSION = "vit-memory-task", 3


def save_task(task: Task, path: Path | str, *, half: bool | None = None) -> None:
    """Write a task file, whole or not at all. Equal tasks give equal bytes.

    `half=True` writes float16 and records the digest of the full task, `half=False` writes float32. By default a task
    whose tensors are all float16, such as one loaded from a float16 file, is written as float16, any other as float32.
    """
    tensors = {"memory": task.memory, "head.weight": task.head_weight, "head.bias": task.head_bias}
    if task.class_token is not None:
        tensors["class_token"] = task.class_token
    if task.reader is not None:
        tensors |= reader_to_tensors(task.reader)
    if half is None:
        half = all(tensor.dtype == torch.float16 for tensor in tensors.values())
    if half and task.record.half_of is None:
        task = replace(task, record=replace(task.record, half_of=task.digest))
    dtype = torch.float16 if half else torch.float32
    stored = {name: tensors[name].detach().to("cpu", dtype) for name in sorted(tensors)}
    for name, tensor in stored.items():
        if not bool(tensor.isfinite().all()):
            overflow = " in float16: save it in full" if half and bool(tensors[name].isfinite().all()) else ""
            raise TaskError(f"task {task.name!r}: {name} holds NaN or infinite values{overflow}. Not saved to {path}.")
    text = json.dumps(describe(task), sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_container(Path(path), {"format": f"{FORMAT}/{_version(task)}", "task": text}, stored)


def _version(task: Task) -> int:
    """The first version that can hold the task."""
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
    path = Path(path)
    metadata, tensors = read_container(path)
    check_format(path, metadata.get("format", ""), FORMAT, VERSION)
    _check_tensors(path, tensors)
    try:
        return _rebuild(parse_json(metadata.get("task", "")), tensors)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: the task description is not valid JSON: {error}.") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{path}: the task description has a missing or mistyped field: {error}.") from None
    except TaskError as error:
        raise DamagedFile(f"{path}: {error}") from None


def _check_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    required = {"memory", "head.weight", "head.bias"}
    missing = required - set(tensors)
    unknown = {name for name in set(tensors) - required - {"class_token"} if not is_reader_tensor(name)}
    if missing or unknown:
        raise DamagedFile(
            f"{path}: tensors missing: {sorted(missing) or 'none'}; unknown tensors: {sorted(unknown) or 'none'}."
        )
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise DamagedFile(f"{path}: {name} holds NaN or infinite values.")


def backbone_file(path: Path) -> Path:
    """The file beside a task file that holds the backbone trained with it (regime `full`)."""
    return path.with_name(f"{path.stem}.backbone.safetensors")


def check_format(path: Path, text: str, name: str, version: int) -> None:
    """Raise DamagedFile unless `text` is `name/<number>`, and NewerFormat if the number is above `version`."""
    stem, _, number = text.partition("/")
    if stem != name or not number.isdecimal():
        raise DamagedFile(f"{path}: format {text!r}, expected {name}/{version}.")
    if int(number) > version:
        raise NewerFormat(
            f"{path}: written in format {text}; this version reads up to {name}/{version}. pip install -U vit-memory"
        )


def describe(task: Task) -> dict[str, Any]:
    """Everything about a task except its learned parameters, as JSON values."""
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
    if task.reader is not None:
        description |= {"reader": describe_reader(task.reader), "read_out": str(task.read_out)}
    return description


def _rebuild(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Task:
    parents = description["parents"]
    if description["memory_size"] != tensors["memory"].shape[1:2].numel():
        raise TaskError(
            f"memory_size is {description['memory_size']}, the memory has shape {tuple(tensors['memory'].shape)}."
        )
    backbone = _backbone(description["backbone"])
    reader = reader_from_tensors(tensors, backbone.depth)
    empty = not any(True for _ in reader.tensors())
    if description.get("reader", describe_reader(LearnedReader())) != describe_reader(reader):
        raise TaskError(f"the description of the reader is {description.get('reader')}, its tensors are another.")
    return Task(
        name=_text(description["name"], "name"),
        labels=tuple(_text(label, "labels") for label in description["labels"]),
        head_weight=tensors["head.weight"],
        head_bias=tensors["head.bias"],
        class_token=tensors.get("class_token"),
        memory=tensors["memory"],
        backbone=backbone,
        regime=description["regime"],
        kind=description["kind"],
        parents=tuple(_text(parent["name"], "parents") for parent in parents),
        parent_digests={parent["name"]: _text(parent["digest"], "parents") for parent in parents if parent["digest"]},
        raw_memory=bool(description["raw_memory"]),
        reader=None if empty and "reader" not in description else reader,
        read_out=ReadOut.parse(_text(description.get("read_out", "final"), "read_out")),
        thresholds=_numbers(description["thresholds"], "thresholds") if "thresholds" in description else None,
        target_scale=_target_scale(description["target_scale"]) if "target_scale" in description else None,
        record=TaskRecord(
            created=_text(description["created"], "created"),
            library_version=_text(description["library_version"], "library_version"),
            preprocessing=_preprocessing(description["preprocessing"]),
            recipe=dict(description["recipe"]),
            metrics=dict(description["metrics"]),
            half_of=description["half_of"],
        ),
    )


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field}: {type(value).__name__}, expected a text")
    return value


def _numbers(values: Any, field: str) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise TypeError(f"{field}: {type(values).__name__}, expected a list of numbers")
    return tuple(float(value) for value in values)


def _target_scale(values: Mapping[str, Any]) -> TargetScale:
    return TargetScale(_numbers(values["mean"], "target_scale mean"), _numbers(values["std"], "target_scale std"))


def _backbone(values: Mapping[str, Any]) -> BackboneIdentity:
    name, family, fingerprint = (_text(values[key], f"backbone {key}") for key in ("name", "family", "fingerprint"))
    width, depth, heads = (values[key] for key in ("width", "depth", "heads"))
    if not all(type(size) is int and size > 0 for size in (width, depth, heads)):
        raise TypeError(f"backbone sizes: {width!r}, {depth!r}, {heads!r}")
    return BackboneIdentity(name, family, width, depth, heads, fingerprint)


def _preprocessing(values: Mapping[str, Any] | None) -> Preprocessing | None:
    if values is None:
        return None
    resize, crop = values["resize"], values["crop"]
    return Preprocessing(
        resize=tuple(resize) if isinstance(resize, list) else resize,
        crop=None if crop is None else tuple(crop),
        mean=tuple(values["mean"]),
        std=tuple(values["std"]),
        interpolation=values["interpolation"],
        resampler=values.get("resampler", "torch"),  # the first files of 0.1.0 have no such field
    )
