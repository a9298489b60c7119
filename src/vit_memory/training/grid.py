"""A grid of tasks to train at once; each is combined with every learning rate and weight decay of the recipe."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from vit_memory.backbone import Backbone
from vit_memory.choices import Kind, Regime, Start
from vit_memory.regimes import REGIMES
from vit_memory.task import Task, new_task


@dataclass(frozen=True, slots=True)
class Grid:
    """Every combination of these is one task."""

    regimes: tuple[Regime, ...] = ("memory",)
    cells: tuple[int, ...] = (5,)  # of the regimes with memory; `memory` with 0 cells is `class`
    starts: tuple[Start, ...] = ("original",)
    seeds: tuple[int, ...] = (0,)

    def tasks(
        self,
        backbone: Backbone,
        name: str,
        labels: Sequence[str],
        parents: Sequence[Task],
        kind: Kind = "single-label",
    ) -> list[Task]:
        """A new task for every point, without duplicates."""
        tasks: dict[tuple[Any, ...], Task] = {}
        for regime, cells, start, seed in product(self.regimes, self.cells, self.starts, self.seeds):
            trained: Regime = "class" if regime == "memory" and cells == 0 else regime
            size = cells if REGIMES[trained].cells else 0
            # Without a class token and cells there is no randomness: one task is enough.
            point = (trained, size, start, seed) if REGIMES[trained].class_token else (trained,)
            if point in tasks:
                continue
            generator = torch.Generator().manual_seed(seed)
            task = new_task(
                backbone,
                name,
                labels,
                cells=size,
                regime=trained,
                kind=kind,
                start=start,
                generator=generator,
                parents=parents,
            )
            record = replace(task.record, recipe={"start": start, "task_seed": seed})
            tasks[point] = replace(task, record=record)
        return list(tasks.values())
