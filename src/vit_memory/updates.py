"""How modules are applied to rows, and how adapters change what comes out.

All rows share the backbone's matrix products. Afterwards the rows that have an adapter are changed: scaled and shifted
by its gains, or moved by its low-rank updates. Those of class tokens are grouped, one batched product over the tasks of
equal rank; all tokens of a branch have one adapter. Updates are found by the module whose output they change, so the
passes (`trunk.py`, `reading.py`, `fused.py`) only wrap the function that applies modules. Rows of different tasks and
branches never meet: a NaN stays where it is.

Shape letters: B batch, T readers, G readers of one group, R rows of a branch, D width, r rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_memory.adapter import Adapter, LowRank
from vit_memory.choices import Projection
from vit_memory.families.roles import Block, projections_of

Run = Callable[[nn.Module, Tensor], Tensor]  # how a row-wise module is applied to tokens
RowsOf = Callable[[Tensor], Tensor]  # a writable view of some rows


def call(module: nn.Module, x: Tensor) -> Tensor:
    """Call a module whose result is a Tensor."""
    y: Tensor = module(x)
    return y


class Update(Protocol):
    """Changes a module's output y (…, out) for its input x (…, in): returns another tensor, or y changed in place."""

    def __call__(self, x: Tensor, y: Tensor) -> Tensor: ...  # noqa: D102


BlockUpdates = Mapping[nn.Module, Sequence[Update]]  # by the module whose output they change, in this order


def with_updates(run: Run, updates: BlockUpdates) -> Run:
    """Apply modules with `run`, then change all rows: class tokens (B, T, width), or tokens of a branch."""

    def run_with_updates(module: nn.Module, x: Tensor) -> Tensor:
        y = run(module, x)
        for update in updates.get(module, ()):
            y = update(x, y)
        return y

    return run_with_updates


def with_updates_in(run: Run, changes: Sequence[tuple[RowsOf, BlockUpdates]]) -> Run:
    """Apply modules with `run` to many rows, then change some of them, as seen through their views.

    In place where there is no graph.
    """

    def run_with_updates(module: nn.Module, x: Tensor) -> Tensor:
        y = run(module, x)
        for view, updates in changes:
            own = updates.get(module)
            if own is None:
                continue
            read, written = view(x), view(y)
            changed = written
            for update in own:
                changed = update(read, changed)
            if changed is not written:
                y = y.clone() if torch.is_grad_enabled() else y  # a graph keeps y as it was
                view(y).copy_(changed)
        return y

    return run_with_updates


# ------------------------------------------------------------------------------------------------------------- readers


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


def group_readers(readers: Mapping[int, Adapter]) -> tuple[list[GainGroup], list[LowRankGroup]]:
    """Readers by their position in a pass, gathered into groups."""
    gains = {i: reader.gains for i, reader in readers.items() if reader.gains is not None}
    return (
        [GainGroup(tuple(gains), torch.stack(list(gains.values()), dim=1).unbind(0))] if gains else [],
        [
            LowRankGroup(
                projection,
                tuple(updates),
                torch.stack([update.A for update in updates.values()], dim=1).unbind(0),
                torch.stack([update.scaled_b for update in updates.values()], dim=1).unbind(0),
            )
            for (projection, _), updates in updates_by_size(readers).items()
        ],
    )


def updates_by_size(readers: Mapping[int, Adapter]) -> dict[tuple[Projection, int], dict[int, LowRank]]:
    """Low-rank updates by projection and rank, then by reader."""
    sizes: dict[tuple[Projection, int], dict[int, LowRank]] = {}
    for i, reader in readers.items():
        for projection, update in reader.low_rank.items():
            sizes.setdefault((projection, update.rank), {})[i] = update
    return sizes


def reader_updates(
    blocks: Sequence[Block], readers: int, gains: Sequence[GainGroup], low_rank: Sequence[LowRankGroup]
) -> tuple[BlockUpdates, ...]:
    """The updates of every block for so many readers; empty if no reader has any."""
    if not gains and not low_rank:
        return ()
    device = gains[0].gains[0].device if gains else low_rank[0].A[0].device
    positions = [*(group.positions for group in gains), *(group.positions for group in low_rank)]
    rows = {each: _rows(each, readers, device) for each in positions}

    def one_block(i: int, block: Block) -> BlockUpdates:
        updates: dict[nn.Module, list[Update]] = {}
        projections = projections_of(block) if low_rank else {}
        for group in low_rank:
            projection = projections[group.projection]
            update = _ReaderLowRank(rows[group.positions], group.A[i], group.B[i], projection.padding)
            updates.setdefault(projection.module, []).append(update)
        for each in gains:
            for module, scale, shift in _gains_by_module(block, each.gains[i].unbind(1)):
                updates.setdefault(module, []).append(_ReaderGains(rows[each.positions], 1 + scale, shift))
        return updates

    return tuple(one_block(i, block) for i, block in enumerate(blocks))


def _gains_by_module(block: Block, gains: Sequence[Tensor]) -> list[tuple[nn.Module, Tensor, Tensor | None]]:
    """The modules whose outputs gains change, with their scale and shift; `gains` are in the order of GAINS."""
    norm1, shift1, attention, norm2, shift2, mlp = gains
    return [
        (block.norm1, norm1, shift1),
        # A residual is scaled before layer scale, which is a factor too: the order makes no difference but rounding.
        (block.project[-1], attention, None),
        (block.norm2, norm2, shift2),
        (block.mlp[-1], mlp, None),
    ]


def _rows(positions: tuple[int, ...], readers: int, device: torch.device) -> Tensor | None:
    """An index of the readers, None if they are all of them in order: then nothing needs to be gathered."""
    return None if positions == tuple(range(readers)) else torch.tensor(positions, dtype=torch.long, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class _ReaderGains:
    rows: Tensor | None  # (G,)
    scale: Tensor  # (G, D)
    shift: Tensor | None  # (G, D)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return _change(y, self.rows, self._change)

    def _change(self, y: Tensor) -> Tensor:
        return y * self.scale if self.shift is None else torch.addcmul(self.shift, y, self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class _ReaderLowRank:
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


# ------------------------------------------------------------------------------------------------------------ branches


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBranch:
    """A branch on the backbone's device and in its dtype, ready for the pass."""

    key: str  # what its readers name it by
    start: int  # its first block
    updates: tuple[BlockUpdates, ...]  # per block from `start` on


def prepare_adapter(blocks: Sequence[Block], key: str, start: int, adapter: Adapter) -> PreparedBranch:
    """The adapter of the blocks from `start` on, by the modules whose outputs it changes."""
    return PreparedBranch(key, start, tuple(_branch_block(block, adapter, i) for i, block in enumerate(blocks[start:])))


def _branch_block(block: Block, adapter: Adapter, i: int) -> BlockUpdates:
    updates: dict[nn.Module, list[Update]] = {}
    projections = projections_of(block) if adapter.low_rank else {}
    for name, low_rank in adapter.low_rank.items():
        projection = projections[name]
        update = _BranchLowRank(low_rank.A[i], low_rank.scaled_b[i], projection.start, projection.padding)
        updates.setdefault(projection.module, []).append(update)
    if adapter.gains is not None:
        for module, scale, shift in _gains_by_module(block, adapter.gains[i].unbind(0)):
            updates.setdefault(module, []).append(_BranchGains(1 + scale, shift))
    return updates


@dataclass(frozen=True, slots=True, eq=False)
class _BranchGains:
    scale: Tensor  # (D,)
    shift: Tensor | None  # (D,)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return y * self.scale if self.shift is None else torch.addcmul(self.shift, y, self.scale)
        y.mul_(self.scale)
        return y if self.shift is None else y.add_(self.shift)


@dataclass(frozen=True, slots=True, eq=False)
class _BranchLowRank:
    """In place where there is no graph: a branch has many rows, and y is a fresh output that nothing else holds."""

    A: Tensor  # (r, in)
    B: Tensor  # (out, r)
    start: int  # of this projection's outputs among the module's
    padding: tuple[int, int]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        down = x @ self.A.t()
        if torch.is_grad_enabled():
            delta = down @ self.B.t()
            return y + (F.pad(delta, self.padding) if any(self.padding) else delta)
        rows = y.view(-1, y.shape[-1])[:, self.start : self.start + len(self.B)]
        rows.addmm_(down.flatten(0, -2), self.B.t())
        return y
