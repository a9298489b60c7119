"""Which images each training step uses, and in which view: decided by the recipe's seed alone."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from vit_memory.training.ranks import Ranks
from vit_memory.training.recipe import Recipe


class PlannedBatch(NamedTuple):
    """One batch before it is loaded."""

    view: int
    indices: list[int]  # in the split


def plan_batches(images: int, recipe: Recipe, start: int, ranks: Ranks) -> Iterator[PlannedBatch]:
    """The batches from step `start` to the last step; of each, the images of this process.

    Every epoch has its own order and its own view: the epoch's number, modulo the number of fixed views if there are.
    """
    size, per_epoch = min(recipe.batch, images), steps_per_epoch(images, recipe)
    for step in range(start, recipe.steps):
        epoch, batch = divmod(step, per_epoch)
        if step == start or batch == 0:
            generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + epoch)
            order = torch.randperm(images, generator=generator).tolist()
        view = epoch if recipe.fixed_views is None else epoch % recipe.fixed_views
        indices = order[batch * size : (batch + 1) * size]
        yield PlannedBatch(view, [i for i in indices if i % ranks.world_size == ranks.rank])


def steps_per_epoch(images: int, recipe: Recipe) -> int:
    """How many steps use every image once; the last one of them may have fewer images."""
    return math.ceil(images / min(recipe.batch, images))


def epochs(images: int, recipe: Recipe) -> int:
    """How many epochs a training begins."""
    return math.ceil(recipe.steps / steps_per_epoch(images, recipe))
