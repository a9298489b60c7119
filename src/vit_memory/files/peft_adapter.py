"""LoRA adapters of peft, imported as a branch and a `head` task; `peft_export.py` writes them.

A LoRA model computes what a branch computes whose first block is the first that the adapter changes, and its classifier
is a `head` task on that branch. So adapters that people have can be attached side by side, with the original output
kept. peft itself is not needed: an adapter is a folder with `adapter_config.json` and `adapter_model.safetensors`.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit_memory.adapter import PROJECTIONS, Adapter, LowRank
from vit_memory.backbone import Backbone
from vit_memory.branch import Branch
from vit_memory.choices import Projection
from vit_memory.errors import BackboneMismatch, DamagedFile, FileError, TaskError, UnsafeFile
from vit_memory.files.container import parse_json
from vit_memory.model import check_trained_on
from vit_memory.task import Task, check_name, new_record

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_BLOCK = re.compile(r"(.*?)(?:^|\.)(?:layers?|blocks|resblocks)\.(\d{1,6})\.(.+)$")
# What libraries call the projections of a block: transformers 5, 4, CLIP and SigLIP, timm, the bundled backbone.
_NAMES: Mapping[str, tuple[Projection, ...]] = {
    **{f"{prefix}.{name}_proj": (name,) for prefix in ("attention", "self_attn") for name in ("q", "k", "v", "o")},
    "attention.attention.query": ("q",),
    "attention.attention.key": ("k",),
    "attention.attention.value": ("v",),
    "attention.output.dense": ("o",),
    "self_attn.out_proj": ("o",),
    "intermediate.dense": ("fc1",),
    "output.dense": ("fc2",),
    "mlp.fc1": ("fc1",),
    "mlp.fc2": ("fc2",),
    "mlp.up_proj": ("fc1",),
    "mlp.down_proj": ("fc2",),
    "attn.qkv": ("q", "k", "v"),
    "attn.proj": ("o",),
    "attention.qkv": ("q", "k", "v"),
    "attention.project": ("o",),
    "mlp.0": ("fc1",),
    "mlp.2": ("fc2",),
}
# Fields of the configuration that are read here, that the tensors tell too, or that decide nothing of an answer.
_KNOWN = {
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "target_modules",
    "task_type",
    "use_rslora",
}
_PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva")  # the others change the base model's weights too
# Families whose classifier is a linear layer on the feature that `head` tasks read.
FEATURE_HEADS = ("vit", "vit-msn", "timm-vit", "bundled")


@dataclass(frozen=True, slots=True, eq=False)
class ImportedAdapter:
    """A LoRA adapter as a branch, and its classifier as a task that stands on it."""

    branch: Branch
    task: Task | None  # None: the adapter has no classifier


def base_model_of(folder: Path) -> str | None:
    """The base model that the adapter's configuration names."""
    name = _read_config(folder).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def import_adapter(
    folder: Path | str,
    backbone: Backbone,
    *,
    name: str | None = None,
    labels: Sequence[str] | None = None,
    branch_only: bool = False,
) -> ImportedAdapter:
    """The LoRA adapter in a folder as a branch, and its classifier, if it has one, as a `head` task.

    The backbone must be the adapter's base model: an adapter does not say by which weights it was trained, so only
    shapes are compared. Raises FileError or BackboneMismatch that names what is not supported.
    """
    folder = Path(folder)
    config = _read_config(folder)
    _check_config(folder, config)
    tensors = _read_weights(folder)
    name = name or re.sub(r"[^0-9A-Za-z._-]+", "-", folder.resolve().name).strip("-._") or "adapter"
    pairs, others = _pairs(folder, tensors)
    adapter, start = _adapter(folder, backbone, config, pairs)
    record = replace(new_record(backbone), recipe={"imported_from": folder.resolve().name})
    check_name(name, "branch")
    try:
        branch = Branch(name, start, adapter, backbone.identity, record)
        check_trained_on(branch, backbone)
    except TaskError as error:
        raise BackboneMismatch(f"{folder}: does not fit {backbone.name}: {error}") from None
    _check_others(folder, others)
    head = None if branch_only else _head(folder, backbone, others)
    if head is None:
        return ImportedAdapter(branch, None)
    weight, bias = head
    if labels is not None and len(labels) != len(weight):
        raise FileError(f"{folder}: {len(labels)} labels given; its classifier has {len(weight)} classes.")
    task = Task(
        name=name,
        labels=tuple(labels) if labels is not None else tuple(f"class {i}" for i in range(len(weight))),
        head_weight=weight,
        head_bias=bias,
        class_token=None,
        memory=torch.zeros(backbone.depth, 0, backbone.width),
        backbone=backbone.identity,
        regime="head",
        branch=branch.ref,
        record=record,
    )
    return ImportedAdapter(branch, task)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"{folder}: no {CONFIG} here. An adapter is what peft's save_pretrained() writes.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise DamagedFile(f"{path}: not a JSON object.")
    return config


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise FileError if the configuration asks for anything that a branch does not compute."""
    method = config.get("peft_type")
    if method != "LORA":
        raise FileError(f"{folder}: an adapter of peft's method {method}; only LORA can be imported.")
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_INITS:
        raise FileError(
            f"{folder}: init_lora_weights is {start!r}, which changes the weights of the base model too. Convert the "
            f"adapter to a plain one first, as peft's documentation of {start} says."
        )
    if config.get("bias", "none") != "none":
        raise FileError(f"{folder}: bias is {config['bias']!r}: trained biases cannot be imported, only 'none'.")
    unknown = {key: value for key, value in config.items() if key not in _KNOWN and value not in (None, False, [], {})}
    if unknown:
        options = ", ".join(f"{key} = {json.dumps(value)}" for key, value in unknown.items())
        raise FileError(f"{folder}: {CONFIG} uses options that cannot be imported: {options}.")


def _read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError  # noqa: PLC0415 - not needed by other files
    from safetensors.torch import load_file  # noqa: PLC0415

    path = folder / WEIGHTS
    if not path.exists():
        if (folder / "adapter_model.bin").exists():
            raise UnsafeFile(
                f"{folder}: adapter_model.bin is a pickled file, which could run code; not opened. Save the adapter "
                f"again with a recent peft, which writes {WEIGHTS}."
            )
        raise FileError(f"{folder}: no {WEIGHTS} here.")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedFile(f"{path}: cannot be read: {error}.") from None
    values = {key: tensor.float() for key, tensor in tensors.items()}
    for key, tensor in values.items():
        if not tensors[key].is_floating_point() or not bool(tensor.isfinite().all()):
            raise DamagedFile(f"{path}: {key} holds other values than finite numbers.")
    return {key.removeprefix(PREFIX): tensor for key, tensor in values.items()}


_Pairs = dict[str, tuple[Tensor, Tensor]]  # A and B by the path of their module


def _pairs(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[_Pairs, dict[str, Tensor]]:
    """The low-rank pairs by module, and all other tensors."""
    sides: dict[str, dict[str, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(r"(.+)\.lora_([AB])\.(?:default\.)?weight", key)
        if match:
            sides.setdefault(match[1], {})[match[2]] = tensor
        elif "lora_" in key:
            raise FileError(f"{folder}: the tensor {key} belongs to a kind of LoRA that cannot be imported.")
        else:
            others[key] = tensor
    pairs: _Pairs = {}
    for path, pair in sides.items():
        A, B = pair.get("A"), pair.get("B")
        if A is None or B is None or A.dim() != 2 or B.dim() != 2 or not len(A) or A.shape[0] != B.shape[1]:
            shapes = {side: tuple(tensor.shape) for side, tensor in pair.items()}
            raise DamagedFile(f"{folder}: {path} has low-rank tensors {shapes}; expected A (r, in) and B (out, r).")
        pairs[path] = A, B
    if not pairs:
        raise DamagedFile(f"{folder}: {WEIGHTS} holds no low-rank tensors.")
    return pairs, others


def _adapter(folder: Path, backbone: Backbone, config: Mapping[str, Any], pairs: _Pairs) -> tuple[Adapter, int]:
    """The adapter of the blocks from the first changed one on, and the number of that block."""
    updates: dict[Projection, dict[int, tuple[Tensor, Tensor, float]]] = {}
    towers: set[str] = set()  # what stands before the blocks in the paths
    for path, (A, B) in pairs.items():
        match = _BLOCK.fullmatch(path)
        projections = _NAMES.get(match[3], ()) if match else ()
        if not match or not projections or "text" in path.split(".")[0]:
            raise FileError(
                f"{folder}: it changes {path}, which is none of the projections {', '.join(PROJECTIONS)} of a block "
                f"of the vision model."
            )
        block = int(match[2])
        towers.add(match[1])
        if block >= backbone.depth:
            raise BackboneMismatch(f"{folder}: it changes block {block}; {backbone.name} has {backbone.depth} blocks.")
        scaling = _scaling(folder, config, path, len(A))
        if len(B) % len(projections):
            raise BackboneMismatch(f"{folder}: {path} has {len(B)} outputs, not a multiple of {len(projections)}.")
        for projection, part in zip(projections, B.chunk(len(projections)), strict=True):
            if block in updates.setdefault(projection, {}):
                raise FileError(f"{folder}: two modules are {projection} of block {block}; the second is {path}.")
            updates[projection][block] = (A, part, scaling)
    if len(towers) > 1:
        raise FileError(f"{folder}: it changes blocks of several models: {', '.join(sorted(towers))}.")
    start = min(block for blocks in updates.values() for block in blocks)
    low_rank = {
        projection: _stack(folder, projection, updates[projection], range(start, backbone.depth))
        for projection in PROJECTIONS
        if projection in updates
    }
    return Adapter(None, low_rank), start


def _scaling(folder: Path, config: Mapping[str, Any], path: str, rank: int) -> float:
    """What B A is multiplied by: lora_alpha over the rank, or over its root for rsLoRA."""
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise DamagedFile(f"{folder}: alpha_pattern is {patterns!r}; expected numbers by names of modules.")
    alpha = next((v for pattern, v in patterns.items() if _matches(folder, pattern, path)), config.get("lora_alpha"))
    if not isinstance(alpha, int | float) or not -1e9 < alpha < 1e9:
        raise DamagedFile(f"{folder}: lora_alpha of {path} is {str(alpha)[:20]!r}; expected a number.")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _matches(folder: Path, pattern: str, path: str) -> bool:
    """Whether a key of alpha_pattern means this module: a regular expression for the end of its path, as in peft.

    Repeated groups and many repetitions are refused: some take forever.
    """
    if path == pattern or path.endswith(f".{pattern}"):
        return True
    if len(pattern) > 500 or re.search(r"\)[*+{?]", pattern) or len(re.findall(r"[*+{]", pattern)) > 4:
        raise FileError(f"{folder}: alpha_pattern has {pattern[:60]!r}, which is too complicated to import.")
    try:
        return re.fullmatch(rf"(?:.*\.)?(?:{pattern})", path) is not None
    except re.error as error:
        raise DamagedFile(f"{folder}: alpha_pattern has {pattern!r}, no regular expression: {error}.") from None


def _stack(folder: Path, projection: str, blocks: Mapping[int, tuple[Tensor, Tensor, float]], wanted: range) -> LowRank:
    """The updates of all wanted blocks. Ranks are padded with zeros, blocks without an update have rank zero."""
    ranks = [len(A) for A, _, _ in blocks.values()]
    shapes = {(A.shape[1], len(B)) for A, B, _ in blocks.values()}
    if len(shapes) > 1:
        raise DamagedFile(f"{folder}: updates of {projection} have several sizes, (in, out): {sorted(shapes)}.")
    ((inner, outer),) = shapes
    scalings = {scaling for _, _, scaling in blocks.values()}
    by_block = tuple(blocks[block][2] if block in blocks else 1.0 for block in wanted)
    stacked_a, stacked_b = torch.zeros(len(wanted), max(ranks), inner), torch.zeros(len(wanted), outer, max(ranks))
    for block, (A, B, _) in blocks.items():
        stacked_a[block - wanted.start, : len(A)] = A
        stacked_b[block - wanted.start, :, : len(A)] = B
    return LowRank(stacked_a, stacked_b, scalings.pop() if len(scalings) == 1 else by_block)


def _check_others(folder: Path, others: Mapping[str, Tensor]) -> None:
    """Raise FileError if the adapter holds trained weights besides low-rank pairs and a classifier."""
    modules = {key.rpartition(".")[0].replace(".modules_to_save.default", "") for key in others}
    if len(modules) > 1 or not modules <= {"classifier", "head"}:
        raise FileError(
            f"{folder}: it also holds trained weights of {', '.join(sorted(modules))}, which change the features; only "
            f"low-rank pairs and a classifier can be imported."
        )


def _head(folder: Path, backbone: Backbone, others: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Weight and bias of the classifier among `modules_to_save`; None if there is none."""
    if not others:
        return None
    hint = "Import the branch alone (--branch-only) and train a head on it: vit-memory train DATA --branch FILE"
    parts = {key.rpartition(".")[2]: tensor for key, tensor in others.items()}
    weight = parts.get("weight")
    if weight is None or weight.dim() != 2:
        raise DamagedFile(f"{folder}: the classifier is no linear layer.")
    two_heads = hasattr(backbone.model, "head_dist")  # timm's distilled models answer with the mean of two
    if backbone.family.name not in FEATURE_HEADS or two_heads or weight.shape[1] != backbone.width:
        raise FileError(
            f"{folder}: its classifier has {weight.shape[1]} inputs of a {backbone.family.name} model; a head here "
            f"reads the {backbone.width} values of the final class token. {hint}"
        )
    return weight, parts.get("bias", torch.zeros(len(weight)))
