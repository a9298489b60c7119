"""Import models of the 2023 reproduction (transformers-learnable-memory): pickled state dicts become tasks.

Such a file is the state dict of a `MemoryCapableViT` on transformers 4: the backbone, its class tokens (0 is the
original one), memory per layer and task, one classifier per class token, and the additive attention mask. Only the
mask tells concatenation from extension. Memory skips the norm in that model, so the tasks have raw memory. Its images
were resized and not normalised, so the tasks say so, whatever the backbone's own preprocessing is.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.errors import BackboneMismatch, DamagedFile, FileError, UnsafeFile
from vit_memory.preprocessing import Preprocessing
from vit_memory.task import Task, TaskRecord

_LAYER = "vit.encoder.layer.{i}."
_ATTENTION = _LAYER + "attention.attention."
# Transformers 4's names of one layer's parts, in the order of our roles; a weight and a bias each.
_PARTS = {
    "norm1": "layernorm_before",
    "q": "attention.attention.query",
    "k": "attention.attention.key",
    "v": "attention.attention.value",
    "project.0": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.0": "intermediate.dense",
    "mlp.1": "output.dense",
}


def import_reproduction(
    path: Path | str, backbone: Backbone, *, labels: Sequence[str] | None = None, name: str | None = None
) -> list[Task]:
    """The added heads of one file as tasks `name-1`, `name-2` …, or `name` if there is only one.

    The backbone inside the file must equal `backbone`, weight for weight. `labels` are the labels of every head with
    as many classes; the classes of other heads are numbered.
    """
    path = Path(path)
    state = _load(path)
    _check_backbone(path, state, backbone)
    heads = _count(state, r"classifiers\.(\d+)\.weight") - 1
    if heads < 1:
        raise DamagedFile(f"{path}: has the original classifier only; no task was added to this model.")
    stem = re.sub(r"[^0-9A-Za-z._-]+", "-", name or path.stem.removesuffix("_model"))
    parents = _parents(path, state, backbone, heads)
    tasks: list[Task] = []
    for t in range(1, heads + 1):
        task_name = stem if heads == 1 else f"{stem}-{t}"
        task = _task(state, t, task_name, backbone, [tasks[parent - 1] for parent in parents[t]], labels)
        tasks.append(replace(task, record=replace(task.record, recipe={"imported_from": path.name})))
    if labels and all(len(labels) != len(task.labels) for task in tasks):
        raise FileError(
            f"{path}: {len(labels)} labels given; heads have {[len(task.labels) for task in tasks]} classes."
        )
    return tasks


def _task(
    state: Mapping[str, Tensor],
    t: int,
    name: str,
    backbone: Backbone,
    parents: Sequence[Task],
    labels: Sequence[str] | None,
) -> Task:
    """The task of class token t."""
    weight, bias = state[f"classifiers.{t}.weight"].float(), state[f"classifiers.{t}.bias"].float()
    position = state["vit.embeddings.position_embeddings"][0, 0]
    memory = [state[_ATTENTION.format(i=i) + f"memory_tokens.{t - 1}"][0] for i in range(backbone.depth)]
    numbered = tuple(f"class {i}" for i in range(len(weight)))
    return Task(
        name=name,
        labels=tuple(labels) if labels and len(labels) == len(weight) else numbered,
        head_weight=weight,
        head_bias=bias,
        class_token=(state[f"vit.embeddings.cls_tokens.{t}"].reshape(-1) + position).float(),
        memory=torch.stack(memory).float(),
        backbone=backbone.identity,
        parents=tuple(parent.name for parent in parents),
        parent_digests={parent.name: parent.digest for parent in parents},
        raw_memory=True,
        record=TaskRecord(preprocessing=_preprocessing(state)),
    )


def _preprocessing(state: Mapping[str, Tensor]) -> Preprocessing:
    """torchvision's Resize((side, side)) and ToTensor, as that code prepares images; the side is that of the model."""
    patches = state["vit.embeddings.position_embeddings"].shape[1] - 1
    side = math.isqrt(patches) * state["vit.embeddings.patch_embeddings.projection.weight"].shape[-1]
    return Preprocessing((side, side), None, (0.0,) * 3, (1.0,) * 3, "bilinear", "pillow")


def _load(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FileError(f"{path}: no such file.") from None
    except Exception as error:  # torch raises many types; no code of the file has run
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "weights_only" in str(error).lower() or "weights only" in str(error).lower():
            raise UnsafeFile(
                f"{path}: refused: it holds more than tensors, which could run code when opened. "
                f"Save its state dict instead: torch.save(model.state_dict(), …)"
            ) from None
        raise DamagedFile(f"{path}: not a PyTorch file, or cut off: {first}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise DamagedFile(f"{path}: not a state dict of tensors.")
    needed = ("vit.embeddings.cls_tokens.0", "vit.embeddings.position_embeddings", "classifiers.0.weight")
    missing = [key for key in needed if key not in state]
    if missing:
        raise DamagedFile(f"{path}: not a model of the 2023 reproduction: {', '.join(missing)} missing.")
    return state


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    return 1 + max((int(match[1]) for key in state if (match := re.fullmatch(pattern, key))), default=-1)


def _weights(state: Mapping[str, Tensor], depth: int) -> Iterator[tuple[str, Tensor | None]]:
    """The weights of the backbone inside, by role."""
    embeddings = "vit.embeddings."
    yield "patches.0", state.get(embeddings + "patch_embeddings.projection.weight")
    yield "patches.1", state.get(embeddings + "patch_embeddings.projection.bias")
    yield "class", state.get(embeddings + "cls_tokens.0")
    yield "positions", state.get(embeddings + "position_embeddings")
    for i in range(depth):
        for role, part in _PARTS.items():
            for j, parameter in enumerate(("weight", "bias")):
                yield f"{i}.{role}.{j}", state.get(_LAYER.format(i=i) + f"{part}.{parameter}")
    for j, parameter in enumerate(("weight", "bias")):
        yield f"final_norm.{j}", state.get(f"vit.layernorm.{parameter}")


def _check_backbone(path: Path, state: Mapping[str, Tensor], backbone: Backbone) -> None:
    depth = _count(state, r"vit\.encoder\.layer\.(\d+)\.layernorm_before\.weight")
    if depth != backbone.depth:
        raise BackboneMismatch(f"{path}: holds a ViT of {depth} blocks; {backbone.name} has {backbone.depth}.")
    inside = dict(_weights(state, depth))
    for role, weight in backbone.roles.weights():
        imported = inside.get(role)
        if imported is None or imported.numel() != weight.numel():
            size = "nothing" if imported is None else f"{imported.numel()} values"
            raise BackboneMismatch(f"{path}: {role} has {size}, {backbone.name} has {weight.numel()}: another model.")
        ours = weight.detach().cpu().reshape(-1)
        if not torch.equal(imported.reshape(-1).to(ours.dtype), ours):
            raise BackboneMismatch(
                f"{path}: the backbone inside is not {backbone.name}: {role} differs. Use the one it was trained on "
                f"(the reproduction used google/vit-base-patch32-224-in21k)."
            )


def _parents(path: Path, state: Mapping[str, Tensor], backbone: Backbone, heads: int) -> dict[int, list[int]]:
    """For each added class token, the earlier ones that it reads according to the attention mask."""
    masks = [state.get(_ATTENTION.format(i=i) + "attention_mask") for i in range(backbone.depth)]
    first = masks[0]
    patches = state["vit.embeddings.position_embeddings"].shape[1] - 1
    cells = [state[_ATTENTION.format(i=0) + f"memory_tokens.{t}"].shape[1] for t in range(heads)]
    expected = (1, patches + 1 + heads, patches + 1 + heads + sum(cells))
    if first is None or tuple(first.shape) != expected:
        shape = None if first is None else tuple(first.shape)
        raise DamagedFile(f"{path}: the attention mask is {shape}, expected {expected}.")
    if any(mask is None or not torch.equal(mask, first) for mask in masks):
        raise DamagedFile(f"{path}: the attention masks of the blocks differ: not a model of the reproduction.")
    allowed = first[0] == 0
    ends = [patches + 1 + heads + sum(cells[: t + 1]) for t in range(heads)]
    reads: dict[int, list[int]] = {}
    for t in range(1, heads + 1):
        row = allowed[patches + t]
        reads[t] = [other for other in range(1, heads + 1) if other != t and bool(row[patches + other])]
        seen = torch.zeros_like(row)
        seen[: patches + 1] = True
        for other in (*reads[t], t):
            seen[patches + other] = True
            seen[ends[other - 1] - cells[other - 1] : ends[other - 1]] = True
        if not torch.equal(seen, row) or any(other > t for other in reads[t]):
            raise DamagedFile(f"{path}: class token {t} reads what neither concatenation nor extension allows.")
    return reads
