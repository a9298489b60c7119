"""What a store keeps of a view: a trunk, or the tokens from which branches in training start.

A row has named parts; each is one file of the store (`store_format.py`). Rows are computed from images and assembled
again as the encoding that the settings read.

Shape letters: B batch, H heads, N original tokens, A = H x head size, D width.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.buffers import BufferPool
from vit_memory.families.roles import Rotation
from vit_memory.outputs import Original
from vit_memory.training.store_format import FEATURES, TOKENS, TRUNKS
from vit_memory.training.trunk_shape import TrunkShape, even_slices
from vit_memory.trunk import BranchInputs, BranchTrunk, PooledTrunk, run_to_branches, run_trunk
from vit_memory.updates import PreparedBranch

_GATHERED_AT_ONCE = 16  # rows of a block that are gathered before they are cast: they stay in the processor's cache


@dataclass(frozen=True, slots=True)
class RowPart:
    """One part of every row."""

    shape: tuple[int, ...]
    float32: bool = False  # whatever the precision of the store


@dataclass(frozen=True, slots=True, eq=False)
class ComputedPart:
    """A tensor (B, …) of some rows, for one place of a part."""

    part: str
    place: tuple[int, ...]
    values: Tensor


class RowFormat(Protocol):
    """How views become rows of a store, and rows an encoding."""

    shape: TrunkShape  # of the trunk behind it, which decides how many images are computed at once

    @property
    def parts(self) -> Mapping[str, RowPart]:
        """By the name of their file; parts without elements are left out."""

    @property
    def key(self) -> Mapping[str, Any]:
        """What decides the rows besides images, backbone and precision; empty for a plain trunk."""

    def compute(self, images: Tensor, pool: BufferPool) -> Iterator[ComputedPart]:
        """The rows of images (B, C, height, width)."""

    def assemble(self, tables: Mapping[str, Tensor], rows: Tensor, pool: BufferPool) -> PooledTrunk | BranchInputs:
        """The encoding of some rows of the parts' tables (rows, …); it lasts until the pool is used again."""


def row_bytes(rows: RowFormat, dtype: torch.dtype) -> int:
    """Bytes of one row: its parts, and a mark that it is done."""
    sizes = {True: torch.float32.itemsize, False: dtype.itemsize}
    return 1 + sum(math.prod(part.shape) * sizes[part.float32] for part in rows.parts.values())


class TrunkRows:
    """Trunks: keys and values of the first `blocks` blocks (all by default) and of all blocks of some branches."""

    def __init__(
        self,
        backbone: Backbone,
        image_size: tuple[int, int],
        blocks: int | None = None,
        branches: tuple[PreparedBranch, ...] = (),
    ) -> None:
        self.backbone, self.branches = backbone, branches
        self.blocks = backbone.depth if blocks is None else blocks
        slots = self.blocks + sum(backbone.depth - branch.start for branch in branches)
        self.shape = replace(TrunkShape.of(backbone, image_size), blocks=slots)

    @property
    def parts(self) -> Mapping[str, RowPart]:
        """Keys and values; the final feature and the patch mean of each trunk, which heads read."""
        features = RowPart((1 + len(self.branches), 2, self.shape.width), float32=True)
        return {TRUNKS: RowPart(self.shape.row), FEATURES: features}

    @property
    def key(self) -> Mapping[str, Any]:
        """Which blocks and branches, unless they are those of a plain trunk."""
        if self.blocks == self.backbone.depth and not self.branches:
            return {}
        return {"blocks": self.blocks, "branches": [branch.key for branch in self.branches]}

    def compute(self, images: Tensor, pool: BufferPool) -> Iterator[ComputedPart]:
        """One pass of the backbone, and of the branches."""
        trunk = run_trunk(self.backbone.roles, images, keep=self.blocks, pool=pool, branches=self.branches)
        trunks = [trunk.branches[branch.key] for branch in self.branches]
        blocks = [*zip(trunk.keys, trunk.values, strict=True)]
        for one in trunks:
            blocks += zip(one.keys, one.values, strict=True)
        for i, (keys, values) in enumerate(blocks):
            yield ComputedPart(TRUNKS, (i, 0), keys)
            yield ComputedPart(TRUNKS, (i, 1), values)
        features = [(trunk.original.feature, trunk.patch_mean), *((b.output.feature, b.patch_mean) for b in trunks)]
        for i, (feature, patch_mean) in enumerate(features):
            yield ComputedPart(FEATURES, (i, 0), feature)
            yield ComputedPart(FEATURES, (i, 1), patch_mean)

    def assemble(self, tables: Mapping[str, Tensor], rows: Tensor, pool: BufferPool) -> PooledTrunk:
        """Rows as a trunk in the backbone's dtype, on its device. Final tokens are not stored."""
        keys, values = gather_keys_and_values(self.backbone, self.shape, tables[TRUNKS], rows, pool)
        features = tables[FEATURES][rows].to(self.backbone.device, self.backbone.dtype)  # (B, trunks, 2, D)
        no_tokens = features.new_zeros(len(rows), 0, self.shape.width)
        finals = [(Original(no_tokens, features[:, i, 0]), features[:, i, 1]) for i in range(features.shape[1])]
        branches, first = {}, self.blocks
        for branch, (output, patch_mean) in zip(self.branches, finals[1:], strict=True):
            own = slice(first, first + self.backbone.depth - branch.start)
            branches[branch.key] = BranchTrunk(branch.start, keys[own], values[own], output, patch_mean)
            first = own.stop
        return PooledTrunk(keys[: self.blocks], values[: self.blocks], *finals[0], branches)


class BranchInputRows:
    """Where branches in training start: the tokens that enter their first blocks, and what class tokens read before.

    Keys and values are kept of the first `blocks` blocks: none, if no setting has a class token.
    """

    def __init__(self, backbone: Backbone, image_size: tuple[int, int], starts: tuple[int, ...], blocks: int) -> None:
        self.backbone, self.starts, self.blocks = backbone, starts, blocks
        self.shape = replace(TrunkShape.of(backbone, image_size), blocks=blocks)
        self.rotation = rotation_of(backbone, image_size)

    @property
    def parts(self) -> Mapping[str, RowPart]:
        """Tokens, and keys and values if there are any."""
        tokens = {TOKENS: RowPart((len(self.starts), self.shape.tokens, self.shape.width))}
        return {TRUNKS: RowPart(self.shape.row), **tokens} if self.blocks else tokens

    @property
    def key(self) -> Mapping[str, Any]:
        """Which blocks."""
        return {"tokens_entering": list(self.starts), "blocks": self.blocks}

    def compute(self, images: Tensor, pool: BufferPool) -> Iterator[ComputedPart]:
        """The backbone's pass up to the last start."""
        start = run_to_branches(self.backbone.roles, images, self.starts, keep=self.blocks, pool=pool)
        for i, (keys, values) in enumerate(zip(start.keys, start.values, strict=True)):
            yield ComputedPart(TRUNKS, (i, 0), keys)
            yield ComputedPart(TRUNKS, (i, 1), values)
        for i, block in enumerate(self.starts):
            yield ComputedPart(TOKENS, (i,), start.tokens[block])

    def assemble(self, tables: Mapping[str, Tensor], rows: Tensor, pool: BufferPool) -> BranchInputs:
        """Rows as the start of branches, in the backbone's dtype, on its device."""
        keys: tuple[Tensor, ...] = ()
        values: tuple[Tensor, ...] = ()
        if self.blocks:
            keys, values = gather_keys_and_values(self.backbone, self.shape, tables[TRUNKS], rows, pool)
        device, dtype = self.backbone.device, self.backbone.dtype
        tokens = {block: tables[TOKENS][rows, i].to(device, dtype) for i, block in enumerate(self.starts)}
        return BranchInputs(keys, values, tokens, self.rotation)


def gather_keys_and_values(
    backbone: Backbone, shape: TrunkShape, table: Tensor, rows: Tensor, pool: BufferPool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Keys and values of every stored block, each (B, H, N, A/H), in the backbone's dtype, in buffers of the pool."""
    device, dtype = backbone.device, backbone.dtype
    one = shape.row[2:]  # the keys, or values, of one block: a line of the table below
    keys, values = (
        tuple(pool.get((name, i), (len(rows), *one), dtype, device) for i in range(shape.blocks))
        for name in ("keys", "values")
    )
    lines_table = table.view(-1, math.prod(one))
    for part in even_slices(len(rows), _GATHERED_AT_ONCE):
        lines = rows[part] * (2 * shape.blocks)
        gathered = pool.get("gathered", (len(lines), lines_table.shape[1]), lines_table.dtype, lines_table.device)
        for i in range(shape.blocks):
            for j, target in enumerate((keys, values)):
                torch.index_select(lines_table, 0, lines + (2 * i + j), out=gathered)
                target[i][part].copy_(gathered.view(-1, *one))
    return keys, values


def rotation_of(backbone: Backbone, image_size: tuple[int, int]) -> Rotation | None:
    """The rotary positions of images of that size; they do not depend on the pixels."""
    image = torch.zeros(1, backbone.roles.channels, *image_size, device=backbone.device, dtype=backbone.dtype)
    with torch.no_grad():
        return backbone.roles.embed(backbone.check_images(image))[1]
