"""A branch written as a LoRA adapter that peft loads."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vit_memory.adapter import LowRank
from vit_memory.atomic import check_empty, new_folder, write_atomic
from vit_memory.backbone import Backbone
from vit_memory.branch import Branch
from vit_memory.errors import FileError
from vit_memory.families.roles import projections_of
from vit_memory.files.peft_adapter import CONFIG, FEATURE_HEADS, PREFIX, WEIGHTS
from vit_memory.graph import has_digest
from vit_memory.model import check_trained_on
from vit_memory.task import Task


def export_adapter(branch: Branch, backbone: Backbone, folder: Path | str, task: Task | None = None) -> None:
    """Write a branch as a peft adapter of the backbone's own model into a new or empty folder, whole or not at all.

    With a `head` task that stands on it, the backbone's classifier is written too. Gains cannot be exported.
    """
    folder = Path(folder)
    check_empty(folder)
    check_trained_on(branch, backbone)
    if branch.adapter.gains is not None:
        raise FileError(f"branch {branch.name!r} has gains, which LoRA does not have; it cannot be exported to peft.")
    names = {module: name for name, module in backbone.model.named_modules()}
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for i, block in enumerate(backbone.roles.blocks[branch.start :]):
        by_module: dict[torch.nn.Module, list[tuple[int, LowRank]]] = {}
        for projection, part in projections_of(block).items():
            if projection in branch.adapter.low_rank:
                update = branch.adapter.low_rank[projection]
                by_module.setdefault(part.module, []).append((part.start, update))
        for module, parts in by_module.items():
            A, B, scaling = _joined(parts, i, module.out_features)  # type: ignore[arg-type]
            if not len(A):
                continue
            path = names[module]
            tensors[f"{PREFIX}{path}.lora_A.weight"], tensors[f"{PREFIX}{path}.lora_B.weight"] = A, B
            ranks[path], alphas[path] = len(A), scaling * len(A)
    if not ranks:
        raise FileError(f"branch {branch.name!r} holds zeros only: there is nothing to export.")
    saved: list[str] = []
    if task is not None:
        saved = _export_head(branch, backbone, task, tensors)
    _write_adapter(folder, backbone, tensors, ranks, alphas, saved)


def _joined(parts: Sequence[tuple[int, LowRank]], i: int, outputs: int) -> tuple[Tensor, Tensor, float]:
    """The updates of one module in block i as one pair, without rows that are zero: q, k and v may share a module."""
    scalings = {update.scaling_of(i) for _, update in parts}
    scaling = scalings.pop() if len(scalings) == 1 else None  # None: part of B

    def own_b(update: LowRank) -> Tensor:
        return update.B[i] if scaling is not None else update.scaled_b[i]

    if len(parts) > 1 and all(torch.equal(update.A[i], parts[0][1].A[i]) for _, update in parts):
        A, B = parts[0][1].A[i], parts[0][1].B.new_zeros(outputs, parts[0][1].rank)
        for first, update in parts:
            B[first : first + update.B.shape[1]] = own_b(update)
    else:
        A = torch.cat([update.A[i] for _, update in parts])
        B = A.new_zeros(outputs, len(A))
        column = 0
        for first, update in parts:
            own = slice(column, column + update.rank)
            B[first : first + update.B.shape[1], own] = own_b(update)
            column = own.stop
    used = (A != 0).any(1) | (B != 0).any(0)
    return A[used].float().contiguous(), B[:, used].float().contiguous(), 1.0 if scaling is None else scaling


def _export_head(branch: Branch, backbone: Backbone, task: Task, tensors: dict[str, Tensor]) -> list[str]:
    name = next((n for n in ("classifier", "head") if hasattr(backbone.model, n)), None)
    if task.regime != "head" or task.branch is None or not has_digest(branch, task.branch.digest):
        raise FileError(f"task {task.name!r} is no `head` task on branch {branch.name!r}; only such a head fits LoRA.")
    if name is None or backbone.family.name not in FEATURE_HEADS or hasattr(backbone.model, "head_dist"):
        raise FileError(f"{backbone.name} has no single classifier on its class token, where peft would put the head.")
    if task.target_scale is not None:
        raise FileError(f"task {task.name!r} answers in units of its own, which a classifier of peft does not have.")
    tensors[f"{PREFIX}{name}.weight"] = task.head_weight.float().contiguous()
    tensors[f"{PREFIX}{name}.bias"] = task.head_bias.float().contiguous()
    return [name]


def _write_adapter(
    folder: Path,
    backbone: Backbone,
    tensors: Mapping[str, Tensor],
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
    saved: Sequence[str],
) -> None:
    from safetensors.torch import save  # noqa: PLC0415 - not needed by other files

    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": backbone.name,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {path: own for path, own in ranks.items() if own != rank},
        "alpha_pattern": {path: own for path, own in alphas.items() if own != alpha},
        "target_modules": list(ranks),
        "modules_to_save": list(saved) or None,
        "bias": "none",
        "inference_mode": True,
    }
    with new_folder(folder, last=CONFIG) as partial:
        write_atomic(partial / WEIGHTS, [save(dict(tensors), {"format": "pt"})])
        write_atomic(partial / CONFIG, [json.dumps(config, indent=2).encode(), b"\n"])
