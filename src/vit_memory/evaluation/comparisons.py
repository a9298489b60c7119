"""Comparisons behind promises 1 to 3: with the library's own forward, with a task alone, with the dense reference.

`verify` makes them with random tasks, `certify` with the tasks and images that it is given.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.model import MemoryViT
from vit_memory.outputs import Original

# The largest differences that rounding causes in logits of unit scale. Half precision has 8 or 11 significant bits.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 0.25, torch.float16: 0.05}


@torch.no_grad()
def library_output(backbone: Backbone, images: Tensor) -> Mapping[str, Tensor]:
    """What the library's own forward gives, by the fields of `Original` that it has."""
    return backbone.family.library_forward(backbone.model, images)


def changed_fields(original: Original, expected: Mapping[str, Tensor]) -> list[str]:
    """The fields of an original output that differ from the library's own in a bit."""
    return [field for field, value in expected.items() if not torch.equal(getattr(original, field), value)]


def model_of_one(model: MemoryViT, name: str) -> MemoryViT:
    """A model with one task, its ancestors, and the branches that these stand on, and nothing else."""
    graph = model.tasks
    needed = graph.with_ancestors((name,))
    branches = {branch.name: branch for task in needed if (branch := graph.branch_of(task)) is not None}
    return MemoryViT(model.backbone, [graph[task] for task in needed], branches.values())


def difference(a: Tensor, b: Tensor) -> Tensor:
    """The largest absolute difference of two outputs (B, C) over the images, in float64: (C,). NaN is the largest."""
    return (a.double() - b.double()).abs().amax(dim=0)
