"""Variants of masked memory for the ablations: cells after the norm, or in one half of the blocks only.

They are trained and tested with a sweep of their own; there is no file for such tasks and no pass beside others.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.data.loading import Loader
from vit_memory.data.splits import Split
from vit_memory.data.transforms import EvalTransform
from vit_memory.evaluation.reproduce.methods import Variant
from vit_memory.graph import TaskGraph
from vit_memory.preprocessing import Preprocessing
from vit_memory.reading import Memory, project_cells
from vit_memory.training.recipe import Recipe
from vit_memory.training.sweep import Setting
from vit_memory.training.trunk_sweep import TrunkSweep


class VariantSweep(TrunkSweep):
    """Memory settings of one variant."""

    def __init__(self, variant: Variant, backbone: Backbone, settings: Sequence[Setting], recipe: Recipe) -> None:
        self.variant = variant
        super().__init__(backbone, settings, TaskGraph(), recipe)

    def project_own_cells(self, i: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Normed like every token of the block, unless they enter after the norm."""
        roles = self.backbone.roles
        return project_cells(roles, roles.blocks[i], cells, raw=self.variant == "after the norm")

    def place_in_block(self, i: int, memory: tuple[Memory, ...]) -> tuple[Memory, ...]:
        """No cells in the other half of the blocks."""
        second = 2 * i >= self.backbone.depth
        left_out = {"first half of the blocks": second, "second half of the blocks": not second}
        if not left_out.get(self.variant, False):
            return memory
        return tuple(Memory(group.keys[..., :0], group.values[..., :0, :]) for group in memory)


@torch.no_grad()
def right_answers(sweep: VariantSweep, split: Split, preprocessing: Preprocessing) -> list[Tensor]:
    """(n,) bool for every setting: which images are right."""
    loader = Loader(split, EvalTransform(preprocessing), 64)
    parts = []
    for batch in loader.batches():
        encoding = sweep.encode(sweep.backbone.check_images(batch.images.to(sweep.backbone.device)))
        parts.append(sweep.logits(encoding).argmax(-1).cpu() == batch.targets)  # (T, B)
    return list(torch.cat(parts, dim=1))
