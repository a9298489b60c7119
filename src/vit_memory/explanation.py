"""Attention of a task's class token on one image, sorted by what was read: patches, itself, cells, ancestors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vit_memory.graph import TaskGraph
from vit_memory.reading import AttentionWeights, ReaderLayout


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """Attention of one class token on one image, per block and head; all parts together sum to one."""

    task: str
    patches: Tensor  # (L, H, rows, columns), the patches where they are in the image
    originals: Mapping[str, Tensor]  # "class", "distillation", "register 1" … -> (L, H)
    itself: Tensor  # (L, H)
    memory: Tensor  # (L, H, M), its own cells
    ancestors: Mapping[str, Tensor]  # ancestor -> (L, H), its class token
    ancestor_memory: Mapping[str, Tensor]  # ancestor -> (L, H, its M)

    def total(self) -> Tensor:
        """The sum of all parts (L, H): one, up to rounding."""
        named = [*self.originals.values(), *self.ancestors.values()]
        cells = [self.memory.sum(-1), *(part.sum(-1) for part in self.ancestor_memory.values())]
        return torch.stack([self.patches.sum((-1, -2)), self.itself, *named, *cells]).sum(0)


def explain_attention(
    graph: TaskGraph,
    task: str,
    layout: ReaderLayout,
    weights: Sequence[AttentionWeights],
    prefix: tuple[str, ...],
    grid: tuple[int, int],
) -> Explanation:
    """Sort the attention weights of one image, in the order of blocks and groups, by what was read."""
    position = layout.names.index(task)
    own = [part for part in weights if part.group.start <= position < part.group.stop]
    row = position - own[0].group.start
    originals, itself, above, cells = (
        torch.stack([getattr(block, part)[0, :, row] for block in own]).cpu()  # (L, H, …)
        for part in ("originals", "itself", "ancestors", "cells")
    )
    ancestors = [name for name in graph.ancestors(task) if name in layout.names]
    sizes = [graph[name].cells for name in ancestors]
    counts = list(cells[..., : sum(sizes) + graph[task].cells].split([*sizes, graph[task].cells], dim=-1))
    patches = originals[..., len(prefix) :].unflatten(-1, grid)
    return Explanation(
        task=task,
        patches=patches,
        originals={name: originals[..., i] for i, name in enumerate(_numbered(prefix))},
        itself=itself[..., 0],
        memory=counts.pop(),
        ancestors={name: above[..., i] for i, name in enumerate(ancestors)},
        ancestor_memory=dict(zip(ancestors, counts, strict=True)),
    )


def _numbered(names: tuple[str, ...]) -> list[str]:
    """Registers are told apart by number; what there is one of keeps its name."""
    return [name if names.count(name) == 1 else f"{name} {names[: i + 1].count(name)}" for i, name in enumerate(names)]
