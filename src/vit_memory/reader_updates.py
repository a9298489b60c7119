"""Learned readers in the pass: what is learned for some class tokens, applied to their rows and to no others.

All class tokens share the backbone's matrix products. Afterwards the rows of tasks with a learned reader are changed:
scaled and shifted by their gains, or moved by their low-rank updates, one batched product over the tasks of equal rank.
Updates are found by the module whose output they change, so the passes (`reading.py`, `fused.py`) only wrap the
function that applies modules. Rows of different tasks never meet: a NaN stays where it is.

Shape letters: B batch, T readers, G readers of one group, D width, r rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_memory.choices import Projection
from vit_memory.families.roles import Block, projections_of
from vit_memory.learned_reader import LearnedReader, LowRank
from vit_memory.trunk import Run


class Update(Protocol):
    """Changes a module's output y (B, T, out) for its input x (B, T, in), in the rows of some readers."""

    def __call__(self, x: Tensor, y: Tensor) -> Tensor: ...  # noqa: D102


@dataclass(frozen=True, slots=True, eq=False)
class GainGroup:
    """The gains of some readers."""

    positions: tuple[int, ...]  # of its G readers among all
    gains: Sequence[Tensor]  # per block (G, 6, D): see GAINS


@dataclass(frozen=True, slots=True, eq=False)
class LowRankGroup:
    """Low-rank updates of one projection, of readers that have the same rank."""

    projection: Projection
    positions: tuple[int, ...]  # of its G readers among all
    A: Sequence[Tensor]  # per block (G, r, in)
    B: Sequence[Tensor]  # per block (G, out, r)


def group_readers(readers: Mapping[int, LearnedReader]) -> tuple[list[GainGroup], list[LowRankGroup]]:
    """Readers by their position in a pass, gathered into groups."""
    gains = {i: reader.gains for i, reader in readers.items() if reader.gains is not None}
    return (
        [GainGroup(tuple(gains), torch.stack(list(gains.values()), dim=1).unbind(0))] if gains else [],
        [
            LowRankGroup(
                projection,
                tuple(updates),
                torch.stack([update.A for update in updates.values()], dim=1).unbind(0),
                torch.stack([update.B for update in updates.values()], dim=1).unbind(0),
            )
            for (projection, _), updates in updates_by_size(readers).items()
        ],
    )


def updates_by_size(readers: Mapping[int, LearnedReader]) -> dict[tuple[Projection, int], dict[int, LowRank]]:
    """Low-rank updates by projection and rank, then by reader."""
    sizes: dict[tuple[Projection, int], dict[int, LowRank]] = {}
    for i, reader in readers.items():
        for projection, update in reader.low_rank.items():
            sizes.setdefault((projection, update.rank), {})[i] = update
    return sizes


BlockUpdates = Mapping[nn.Module, Sequence[Update]]  # by the module whose output they change, in this order


def block_updates(
    blocks: Sequence[Block], readers: int, gains: Sequence[GainGroup], low_rank: Sequence[LowRankGroup]
) -> tuple[BlockUpdates, ...]:
    """The updates of every block for so many readers; empty if no reader has any."""
    if not gains and not low_rank:
        return ()
    device = gains[0].gains[0].device if gains else low_rank[0].A[0].device
    positions = [*(group.positions for group in gains), *(group.positions for group in low_rank)]
    rows = {each: _rows(each, readers, device) for each in positions}
    return tuple(_one_block(block, i, rows, gains, low_rank) for i, block in enumerate(blocks))


def _one_block(
    block: Block,
    i: int,
    rows: Mapping[tuple[int, ...], Tensor | None],
    gains: Sequence[GainGroup],
    low_rank: Sequence[LowRankGroup],
) -> BlockUpdates:
    updates: dict[nn.Module, list[Update]] = {}
    projections = projections_of(block) if low_rank else {}
    for group in low_rank:
        projection = projections[group.projection]
        update = _LowRankUpdate(rows[group.positions], group.A[i], group.B[i], projection.padding)
        updates.setdefault(projection.module, []).append(update)
    for each in gains:
        norm1, shift1, attention, norm2, shift2, mlp = each.gains[i].unbind(1)  # each (G, D)
        for module, scale, shift in (
            (block.norm1, norm1, shift1),
            # A branch is scaled before layer scale, which is a factor too: the order makes no difference but rounding.
            (block.project[-1], attention, None),
            (block.norm2, norm2, shift2),
            (block.mlp[-1], mlp, None),
        ):
            updates.setdefault(module, []).append(_ScaleAndShift(rows[each.positions], 1 + scale, shift))
    return updates


def _rows(positions: tuple[int, ...], readers: int, device: torch.device) -> Tensor | None:
    """An index of the readers, None if they are all of them in order: then nothing needs to be gathered."""
    return None if positions == tuple(range(readers)) else torch.tensor(positions, dtype=torch.long, device=device)


def with_updates(run: Run, updates: BlockUpdates, readers_of: Callable[[Tensor], Tensor] | None = None) -> Run:
    """Apply modules with `run`, then change the rows of readers.

    Tensors are (B, T, width) of class tokens alone, or anything that `readers_of` gives a writable view (B, T, width)
    of; their rows are then changed in place.
    """

    def run_with_updates(module: nn.Module, x: Tensor) -> Tensor:
        y = run(module, x)
        own = updates.get(module)
        if own is None:
            return y
        if readers_of is None:
            for update in own:
                y = update(x, y)
            return y
        read_in, changed = readers_of(x), readers_of(y)
        for update in own:
            changed = update(read_in, changed)
        readers_of(y).copy_(changed)
        return y

    return run_with_updates


@dataclass(frozen=True, slots=True, eq=False)
class _ScaleAndShift:
    rows: Tensor | None  # (G,)
    scale: Tensor  # (G, D)
    shift: Tensor | None  # (G, D)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return _change(y, self.rows, self._change)

    def _change(self, y: Tensor) -> Tensor:
        return y * self.scale if self.shift is None else torch.addcmul(self.shift, y, self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class _LowRankUpdate:
    rows: Tensor | None  # (G,)
    A: Tensor  # (G, r, in)
    B: Tensor  # (G, out, r)
    padding: tuple[int, int]  # outputs of a fused module before and after this projection's

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        x = x if self.rows is None else x.index_select(1, self.rows)
        down = x.transpose(0, 1) @ self.A.transpose(1, 2)  # (G, B, r)
        delta = (down @ self.B.transpose(1, 2)).transpose(0, 1)  # (B, G, out)
        delta = F.pad(delta, self.padding) if any(self.padding) else delta
        return _change(y, self.rows, partial(torch.add, delta))


def _change(y: Tensor, rows: Tensor | None, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change y (B, T, width) in these rows, or in all."""
    return change(y) if rows is None else y.index_copy(1, rows, change(y.index_select(1, rows)))
