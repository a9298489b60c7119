"""A grid of tasks to train at once; each is combined with every learning rate and weight decay of the recipe."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch

from vit_memory.adapter import DEFAULT_PROJECTIONS, check_projections, projection_order
from vit_memory.backbone import Backbone
from vit_memory.branch import BRANCH_PROJECTIONS, Branch, new_branch
from vit_memory.choices import Kind, Projection, Regime, Start
from vit_memory.errors import TrainingError
from vit_memory.read_out import FINAL, ReadOut
from vit_memory.regimes import REGIMES
from vit_memory.task import BranchLike, Task, new_task

_READER_FIELDS: tuple[str, ...] = ("ranks", "gains", "projections", "read_outs", "reader_cells")


@dataclass(frozen=True, slots=True)
class BranchGrid:
    """Every combination of these is one branch, which is trained with every task of the grid."""

    blocks: tuple[int, ...] = (4,)  # k: how many blocks are its own
    ranks: tuple[int | None, ...] = (8,)  # None: no low-rank updates
    gains: bool = False
    projections: tuple[tuple[Projection, ...], ...] = (BRANCH_PROJECTIONS,)

    def branches(self, backbone: Backbone, name: str, seed: int) -> list[Branch]:
        """A new branch for every point, without duplicates; `seed` decides where it starts."""
        points = dict.fromkeys(
            (blocks, rank, _normalised(f"branch {name!r}", rank, projections, BRANCH_PROJECTIONS))
            for blocks, rank, projections in product(self.blocks, self.ranks, self.projections)
        )
        return [
            new_branch(
                backbone,
                name,
                blocks=blocks,
                rank=rank,
                gains=self.gains,
                projections=projections,
                generator=torch.Generator().manual_seed(seed),
            )
            for blocks, rank, projections in points
        ]


@dataclass(frozen=True, slots=True)
class Grid:
    """Every combination of these is one task."""

    regimes: tuple[Regime, ...] = ("memory",)
    cells: tuple[int, ...] = (5,)  # of the memory regimes; `memory` with 0 cells is `class`
    starts: tuple[Start, ...] = ("original",)
    seeds: tuple[int, ...] = (0,)
    # Of the regime `reader`; a combination that learns nothing of these is left out.
    ranks: tuple[int | None, ...] = (8,)  # None: no low-rank updates
    gains: tuple[bool, ...] = (True,)
    projections: tuple[tuple[Projection, ...], ...] = (DEFAULT_PROJECTIONS,)
    read_outs: tuple[str, ...] = ("final",)
    reader_cells: tuple[int, ...] = (0,)
    branch_grid: BranchGrid | None = None  # branches to train with the tasks

    def record(self) -> dict[str, Any]:
        """The grid as JSON values, without the fields of readers and branches if there are none."""
        left_out = () if "reader" in self.regimes else _READER_FIELDS
        left_out += () if self.branch_grid is not None else ("branch_grid",)
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def tasks(
        self,
        backbone: Backbone,
        name: str,
        labels: Sequence[str],
        parents: Sequence[Task],
        kind: Kind = "single-label",
        branch: BranchLike | None = None,
    ) -> list[Task]:
        """A new task for every point, without duplicates."""
        tasks: dict[tuple[Any, ...], Task] = {}
        for regime, start, seed in product(self.regimes, self.starts, self.seeds):
            for trained, size, reader in self._points(regime, name):
                # Without a class token and cells there is no randomness: one task is enough.
                one = (start, seed) if REGIMES[trained].class_token else ()
                point = (trained, size, *reader.values(), *one)
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
                    branch=branch,
                    **reader,
                )
                record = replace(task.record, recipe={"start": start, "task_seed": seed})
                tasks[point] = replace(task, record=record)
        return list(tasks.values())

    def _points(self, regime: Regime, name: str) -> Iterator[tuple[Regime, int, dict[str, Any]]]:
        """The regime that is trained, its cells, and what its reader consists of."""
        if not REGIMES[regime].reader:
            for cells in self.cells:
                trained: Regime = "class" if regime == "memory" and cells == 0 else regime
                yield trained, cells if REGIMES[trained].cells else 0, {}
            return
        if set(self.ranks) == {None} and not any(self.gains) and {ReadOut.parse(r) for r in self.read_outs} == {FINAL}:
            raise TrainingError(
                "a reader without gains, a rank or a read-out has nothing to learn. Give it one of them: --gains, "
                "--rank 8 or --read-out patches."
            )
        axes = product(self.reader_cells, self.ranks, self.gains, self.projections, self.read_outs)
        for cells, rank, gains, projections, read_out in axes:
            if rank is None and not gains and ReadOut.parse(read_out) == FINAL:
                continue
            # Normalised, so that o+q and q+o, or blocks:1 and final, are one task.
            ordered = _normalised(f"task {name!r}", rank, projections, DEFAULT_PROJECTIONS)
            head_input = str(ReadOut.parse(read_out))
            yield regime, cells, {"rank": rank, "gains": gains, "projections": ordered, "read_out": head_input}


def _normalised(
    where: str, rank: int | None, projections: Sequence[Projection], default: tuple[Projection, ...]
) -> tuple[Projection, ...]:
    """Projections in a fixed order; without a rank none is updated, and all choices are one."""
    check_projections(where, projections)
    return default if rank is None else tuple(sorted(projections, key=projection_order))


# What `vit-memory train` tries without options about regimes, from the smallest task to the largest. Heads of readers
# read the patch mean too: on the bundled backbone that gains about a point, on DINOv2 nothing, and it costs nothing.
DEFAULT_GRID = Grid(
    regimes=("head", "class", "memory", "reader"), ranks=(None, 8), gains=(True,), read_outs=("patches",)
)
