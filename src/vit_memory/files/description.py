"""What the files of tasks and branches share: their format, the parts of their descriptions, and their tensors."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from vit_memory.backbone import BackboneIdentity
from vit_memory.errors import DamagedFile, NewerFormat, TaskError
from vit_memory.preprocessing import Interpolation, Preprocessing, Resampler
from vit_memory.task import TaskRecord

_LARGEST_SIDE, _MOST_CHANNELS = 16384, 16  # of images; more is no preprocessing


_FILES = {"vit-memory-task": "a task file", "vit-memory-branch": "a branch file", "vit-memory-bundle": "a bundle"}


def check_format(path: Path, text: str, name: str, version: int) -> None:
    """Raise DamagedFile unless `text` is `name/<number>`, and NewerFormat if the number is above `version`."""
    stem, _, number = text.partition("/")
    if stem != name and stem in _FILES:
        expected = f"{_FILES[name]} ({name}/{version})" if name in _FILES else f"{name}/{version}"
        raise DamagedFile(f"{path}: {_FILES[stem]} (format {text!r}), expected {expected}.")
    if stem != name or not number.isdecimal() or len(number) > 9:
        raise DamagedFile(f"{path}: format {text!r}, expected {name}/{version}.")
    if int(number) > version:
        raise NewerFormat(
            f"{path}: written in format {text}; this version reads up to {name}/{version}. pip install -U vit-memory"
        )


@contextmanager
def reading_description(path: Path, what: str) -> Iterator[None]:
    """Whatever is wrong with the description of a task or branch (`what`) is a DamagedFile that names it."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: the {what} description is not valid JSON: {error}.") from None
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedFile(f"{path}: the {what} description has a missing or mistyped field: {error}.") from None
    except TaskError as error:
        raise DamagedFile(f"{path}: {error}") from None


# ------------------------------------------------------------------------------------------------------------- tensors


def is_half(tensors: Mapping[str, Tensor]) -> bool:
    """Whether all are float16, as those of a float16 file."""
    return all(tensor.dtype == torch.float16 for tensor in tensors.values())


def record_half(record: TaskRecord, digest: str) -> TaskRecord:
    """The record of a float16 file: it keeps the digest of the full task or branch."""
    return record if record.half_of is not None else replace(record, half_of=digest)


def stored_tensors(where: str, path: Path | str, tensors: Mapping[str, Tensor], *, half: bool) -> dict[str, Tensor]:
    """Tensors as a file keeps them, by name in order; TaskError if one is not finite in that precision."""
    dtype = torch.float16 if half else torch.float32
    stored = {name: tensors[name].detach().to("cpu", dtype) for name in sorted(tensors)}
    for name, tensor in stored.items():
        if not bool(tensor.isfinite().all()):
            overflow = " in float16: save it in full" if half and bool(tensors[name].isfinite().all()) else ""
            raise TaskError(f"{where}: {name} holds NaN or infinite values{overflow}. Not saved to {path}.")
    return stored


def check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise DamagedFile if a tensor of a file holds NaN or infinite values."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise DamagedFile(f"{path}: {name} holds NaN or infinite values.")


# -------------------------------------------------------------------------------------------------------------- fields


def describe_record(record: TaskRecord) -> dict[str, Any]:
    """A record as JSON values."""
    return {
        "preprocessing": None if record.preprocessing is None else asdict(record.preprocessing),
        "recipe": dict(record.recipe),
        "metrics": dict(record.metrics),
        "created": record.created,
        "library_version": record.library_version,
        "half_of": record.half_of,
    }


def read_record(description: Mapping[str, Any]) -> TaskRecord:
    """The inverse of `describe_record`."""
    return TaskRecord(
        created=read_text(description["created"], "created"),
        library_version=read_text(description["library_version"], "library_version"),
        preprocessing=read_preprocessing(description["preprocessing"]),
        recipe=dict(description["recipe"]),
        metrics=dict(description["metrics"]),
        half_of=None if description["half_of"] is None else read_text(description["half_of"], "half_of"),
    )


def read_backbone(values: Mapping[str, Any]) -> BackboneIdentity:
    """The backbone that a task or branch was trained on."""
    name, family, fingerprint = (read_text(values[key], f"backbone {key}") for key in ("name", "family", "fingerprint"))
    width, depth, heads = (values[key] for key in ("width", "depth", "heads"))
    if not all(type(size) is int and size > 0 for size in (width, depth, heads)):
        raise TypeError(f"backbone sizes: {width!r}, {depth!r}, {heads!r}")
    return BackboneIdentity(name, family, width, depth, heads, fingerprint)


def read_text(value: Any, field: str) -> str:
    """A text, or TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{field}: {type(value).__name__}, expected a text")
    return value


def read_numbers(values: Any, field: str) -> tuple[float, ...]:
    """A list of numbers, or TypeError."""
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise TypeError(f"{field}: {type(values).__name__}, expected a list of numbers")
    return tuple(float(value) for value in values)


def read_preprocessing(values: Mapping[str, Any] | None) -> Preprocessing | None:
    """How images were prepared, if it is known."""
    if values is None:
        return None
    resize, crop = values["resize"], values["crop"]
    mean, std = (read_numbers(values[key], f"preprocessing {key}") for key in ("mean", "std"))
    if not all(map(math.isfinite, (*mean, *std))) or not all(std) or not len(mean) == len(std) <= _MOST_CHANNELS:
        raise TypeError(f"preprocessing mean and std: {mean!r}, {std!r}")
    # The first files of 0.1.0 have no resampler.
    interpolation, resampler = values["interpolation"], values.get("resampler", "torch")
    for word, words in ((interpolation, get_args(Interpolation)), (resampler, get_args(Resampler))):
        if word not in words:
            raise TypeError(f"preprocessing: {word!r} is none of {', '.join(words)}")
    return Preprocessing(
        resize=_size_pair(resize) if isinstance(resize, list) else None if resize is None else _size(resize),
        crop=None if crop is None else _size_pair(crop),
        mean=mean,
        std=std,
        interpolation=interpolation,
        resampler=resampler,
    )


def _size_pair(values: Any) -> tuple[int, int]:
    height, width = values
    return _size(height), _size(width)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 < value <= _LARGEST_SIDE:
        raise TypeError(f"preprocessing: {value!r} is no image size")
    return value
