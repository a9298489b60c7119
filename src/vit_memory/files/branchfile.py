"""Branch files: one branch in one safetensors file, its description in the metadata.

`vit-memory-branch/1`: the tensors of its adapter (`adapter_tensors.py`); metadata `format`, and `branch`: a JSON text,
see `describe_branch`. `vit-memory-branch/2`: the same, where a projection has a scaling for every block. Loading runs
no code. A branch called `birds` is in `birds.branch.safetensors`, so that a task of the same name fits beside it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vit_memory.branch import Branch
from vit_memory.errors import DamagedFile, TaskError
from vit_memory.files.adapter_tensors import (
    adapter_from_tensors,
    adapter_to_tensors,
    describe_adapter,
    is_adapter_tensor,
)
from vit_memory.files.container import container_bytes, parse_json, read_container, read_format, write_container
from vit_memory.files.description import (
    check_finite,
    check_format,
    describe_record,
    is_half,
    read_backbone,
    read_record,
    read_text,
    reading_description,
    record_half,
    stored_tensors,
)

FORMAT, VERSION = "vit-memory-branch", 2


def branch_file(folder: Path, name: str) -> Path:
    """Where a branch of that name is in a folder."""
    return folder / f"{name}.branch.safetensors"


def is_branch_file(path: Path) -> bool:
    """Whether the header of a file says that it holds a branch."""
    return (read_format(path) or "").startswith(f"{FORMAT}/")


def save_branch(branch: Branch, path: Path | str, *, half: bool | None = None) -> None:
    """Write a branch file, whole or not at all. Equal branches give equal bytes; `half` as in `save_task`."""
    write_container(Path(path), *_contents(branch, path, half))


def branch_bytes(branch: Branch) -> bytes:
    """The content of the file that `save_branch` writes."""
    return b"".join(container_bytes(*_contents(branch, "bytes", None)))


def _contents(branch: Branch, path: Path | str, half: bool | None) -> tuple[dict[str, str], dict[str, Tensor]]:
    tensors = adapter_to_tensors(branch.adapter, branch.start)
    half = is_half(tensors) if half is None else half
    if half:
        branch = replace(branch, record=record_half(branch.record, branch.digest))
    stored = stored_tensors(f"branch {branch.name!r}", path, tensors, half=half)
    description = describe_branch(branch)
    text = json.dumps(description, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    version = 2 if branch.adapter.scaled_by_block else 1  # the first that can hold it
    return {"format": f"{FORMAT}/{version}", "branch": text}, stored


def load_branch(path: Path | str) -> Branch:
    """Read a branch file; raises a FileError that names the fault. Tensors keep the precision of the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_branch(new_branch(backbone, "birds", blocks=2), f"{folder}/birds.branch.safetensors")
    ...     load_branch(f"{folder}/birds.branch.safetensors").blocks
    2
    """
    return _load(Path(path), None)


def branch_from_bytes(content: bytearray, name: str) -> Branch:
    """The branch in the content of a file; its tensors are views of it. Messages call the file `name`."""
    return _load(Path(name), content)


def _load(path: Path, content: bytearray | None) -> Branch:
    metadata, tensors = read_container(path, content)
    check_format(path, metadata.get("format", ""), FORMAT, VERSION)
    unknown = sorted(name for name in tensors if not is_adapter_tensor(name))
    if unknown:
        raise DamagedFile(f"{path}: unknown tensors: {unknown}.")
    check_finite(path, tensors)
    with reading_description(path, "branch"):
        return _rebuild(parse_json(metadata.get("branch", "")), tensors)


def describe_branch(branch: Branch) -> dict[str, Any]:
    """Everything about a branch except its learned parameters, as JSON values."""
    return {
        "name": branch.name,
        "start": branch.start,
        "adapter": describe_adapter(branch.adapter),
        "backbone": asdict(branch.backbone),
        **describe_record(branch.record),
    }


def _rebuild(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Branch:
    backbone, start = read_backbone(description["backbone"]), description["start"]
    if type(start) is not int or not 0 <= start < backbone.depth:
        raise TaskError(f"the branch starts at block {start!r}; {backbone.name} has {backbone.depth} blocks.")
    return Branch(
        name=read_text(description["name"], "name"),
        start=start,
        adapter=adapter_from_tensors(tensors, description["adapter"], range(start, backbone.depth)),
        backbone=backbone,
        record=read_record(description),
    )
