"""The original tokens' pass, block by block, and the trunk it leaves behind for readers.

The same operations in the same order on the same shapes as the library, so the same bits (promise 1). No task is
known here: whatever is attached, a trunk is the same. A branch goes on from the original tokens at its start block
with copies of them, which its adapter changes; the originals never see them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_memory.buffers import BufferPool
from vit_memory.families.roles import Block, Roles, Rotation
from vit_memory.outputs import Original
from vit_memory.updates import PreparedBranch, Run, call, with_updates


@dataclass(frozen=True, slots=True, eq=False)
class BranchTrunk:
    """What class tokens read of a branch: the keys and values of its blocks, and its final output."""

    start: int  # its first block
    keys: tuple[Tensor, ...]  # per block from `start` on (B, H, N, A/H)
    values: tuple[Tensor, ...]
    output: Original  # after the library's final norm and head
    patch_mean: Tensor  # (B, D), see `patch_mean`

    def at(self, block: int) -> tuple[Tensor, Tensor]:
        """Its keys and values in a block of the backbone, `start` or later."""
        return self.keys[block - self.start], self.values[block - self.start]


class ReadableTrunk(Protocol):
    """What class tokens and heads read; a branch is named by its key, None means the original trunk."""

    def at(self, branch: str | None, block: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, N, A/H) of a block."""

    def output(self, branch: str | None) -> Original:
        """The final output of the tokens."""

    def patches(self, branch: str | None) -> Tensor:
        """The mean of the final patch tokens (B, D)."""


@dataclass(frozen=True, slots=True, eq=False)
class Trunk:
    """What class tokens read of a batch: the keys and values of every block, and the backbone's own output."""

    keys: tuple[Tensor, ...]  # per block (B, H, N, A/H), rotated and normed as the library does
    values: tuple[Tensor, ...]  # per block (B, H, N, A/H)
    original: Original
    patch_mean: Tensor  # (B, D), see `patch_mean`
    branches: Mapping[str, BranchTrunk] = field(default_factory=dict)  # by key

    def at(self, branch: str | None, block: int) -> tuple[Tensor, Tensor]:
        """The keys and values that readers of a branch (None: of the original trunk) read in a block."""
        if branch is not None and block >= self.branches[branch].start:
            return self.branches[branch].at(block)
        return self.keys[block], self.values[block]

    def output(self, branch: str | None) -> Original:
        """The final output of the original tokens, or of a branch's."""
        return self.original if branch is None else self.branches[branch].output

    def patches(self, branch: str | None) -> Tensor:
        """The patch mean of the original tokens, or of a branch's."""
        return self.patch_mean if branch is None else self.branches[branch].patch_mean


@dataclass(frozen=True, slots=True, eq=False)
class BranchInputs:
    """What branches in training start from: the tokens that enter their first blocks, computed without a graph."""

    keys: tuple[Tensor, ...]  # per block (B, H, N, A/H), of the blocks that class tokens read before a branch starts
    values: tuple[Tensor, ...]
    tokens: Mapping[int, Tensor]  # (B, N, D) by block
    rotation: Rotation | None


@dataclass(frozen=True, slots=True, eq=False)
class PooledTrunk(Trunk):
    """A trunk whose keys and values lie in a buffer pool: they are overwritten when the pool is used for the next."""


def split_qkv(block: Block, normed: Tensor, run: Run = call) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (…, A) of normed tokens (…, D), not yet split into heads."""
    if len(block.qkv) == 1:
        q, k, v = run(block.qkv[0], normed).chunk(3, dim=-1)
        return q, k, v
    q, k, v = (run(projection, normed) for projection in block.qkv)
    return q, k, v


def by_heads(x: Tensor, heads: int) -> Tensor:
    """(B, n, A) to (B, H, n, A/H), without a copy."""
    split: Tensor = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return split


def attend_originals(
    roles: Roles, block: Block, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Let original tokens (B, N, A) read each other; returns what they read (B, N, A), and keys and values by head."""
    q, k, v = (by_heads(x, roles.heads) for x in (q, k, v))
    q, k = block.norm_q(q), block.norm_k(k)
    if roles.rotate is not None and rotation is not None:
        q, k = roles.rotate(q, k, rotation)
    return block.attend(q, k, v), k, v


def finish_block(block: Block, x: Tensor, attended: Tensor, run: Run = call) -> Tensor:
    """Everything of a block after attention: projection and MLP with their residuals. Row by row, for any rows.

    The MLP needs the most memory of a block, so `attended` is freed before it; callers keep no reference (fresh memory
    costs 2 % of a pass over large batches).
    """
    for module in block.project:
        attended = run(module, attended)
    x = x + block.scale1(attended)
    del attended
    hidden = run(block.norm2, x)
    for module in block.mlp:
        hidden = run(module, hidden)
    out: Tensor = x + block.scale2(hidden)
    return out


def patch_mean(roles: Roles, original: Original) -> Tensor:
    """The mean of the final patch tokens (B, D), of unit variance: not every library norms its final tokens."""
    mean = original.tokens[:, len(roles.prefix) :].mean(dim=1)
    return F.layer_norm(mean, mean.shape[-1:])


def run_originals(roles: Roles, images: Tensor) -> Original:
    """The same pass with nothing kept for readers, and with a graph to the backbone's weights where they have one."""
    x, rotation = roles.embed(images)
    for block in roles.blocks:
        x = finish_block(block, x, attend_originals(roles, block, *split_qkv(block, block.norm1(x)), rotation)[0])
    return roles.finish(x)


@dataclass(slots=True, eq=False)
class _KeysAndValues:
    """Those of a trunk or branch, collected block by block: of the first `keep` blocks."""

    keep: int
    pool: BufferPool | None
    name: str  # of the trunk, in the pool
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def add(self, k: Tensor, v: Tensor) -> None:
        if len(self.keys) >= self.keep:
            return
        # Head by head, as readers' products want them: they would else copy them, and keep both for a graph.
        for kept, name, x in ((self.keys, "keys", k), (self.values, "values", v)):
            key = (name, self.name, len(kept))
            kept.append(x.contiguous() if self.pool is None else self.pool.copy_in(key, x))


@torch.no_grad()
def run_trunk(
    roles: Roles,
    images: Tensor,
    *,
    keep: int | None = None,
    pool: BufferPool | None = None,
    branches: Sequence[PreparedBranch] = (),
) -> Trunk:
    """One pass of the original tokens over images (B, C, height, width), and of the branches that leave them.

    Of the original tokens, keys and values of the first `keep` blocks are kept (all by default). With a `pool` the
    result is a `PooledTrunk`, which lasts until the next call with the same pool.
    """
    depth = len(roles.blocks)
    kept = _KeysAndValues(depth if keep is None else keep, pool, "")
    x, rotation, entering = _run_blocks(roles, images, depth, [branch.start for branch in branches], kept)
    trunk_type = Trunk if pool is None else PooledTrunk
    original = roles.finish(x)
    del x
    return trunk_type(
        tuple(kept.keys),
        tuple(kept.values),
        original,
        patch_mean(roles, original),
        {branch.key: run_branch(roles, branch, entering[branch.start], rotation, pool=pool) for branch in branches},
    )


@torch.no_grad()
def run_to_branches(
    roles: Roles, images: Tensor, starts: Sequence[int], *, keep: int, pool: BufferPool | None = None
) -> BranchInputs:
    """The original tokens' pass over images (B, C, height, width) up to the last of the blocks `starts`.

    Keys and values of the first `keep` blocks are kept.
    """
    kept = _KeysAndValues(keep, pool, "")
    _, rotation, entering = _run_blocks(roles, images, max(starts), starts, kept)
    return BranchInputs(tuple(kept.keys), tuple(kept.values), entering, rotation)


def _run_blocks(
    roles: Roles, images: Tensor, stop: int, starts: Sequence[int], kept: _KeysAndValues
) -> tuple[Tensor, Rotation | None, dict[int, Tensor]]:
    """The original tokens after the blocks before `stop`, their rotation, and those that enter the blocks `starts`."""
    x, rotation = roles.embed(images)
    entering: dict[int, Tensor] = {}
    for i, block in enumerate(roles.blocks[:stop]):
        if i in starts:
            entering[i] = x
        x = _run_block(roles, block, x, rotation, kept)
    if stop in starts:
        entering[stop] = x
    return x, rotation, entering


def run_branch(
    roles: Roles,
    branch: PreparedBranch,
    x: Tensor,
    rotation: Rotation | None,
    *,
    keep: bool = True,
    pool: BufferPool | None = None,
    run: Run = call,
) -> BranchTrunk:
    """A branch's pass over the tokens x (B, N, D) that enter its first block, with a graph to its adapter if asked.

    `run` applies the backbone's modules. Keys and values are kept unless nothing reads them.
    """
    blocks = roles.blocks[branch.start :]
    kept = _KeysAndValues(len(blocks) if keep else 0, pool, branch.key)
    for block, updates in zip(blocks, branch.updates, strict=True):
        x = _run_block(roles, block, x, rotation, kept, with_updates(run, updates))
    output = roles.finish(x)
    return BranchTrunk(branch.start, tuple(kept.keys), tuple(kept.values), output, patch_mean(roles, output))


def _run_block(
    roles: Roles, block: Block, x: Tensor, rotation: Rotation | None, kept: _KeysAndValues, run: Run = call
) -> Tensor:
    """One block over tokens x (B, N, D) that read each other."""

    def attend() -> Tensor:  # its own scope: nothing but the result is alive in the rest of the block
        attended, k, v = attend_originals(roles, block, *split_qkv(block, run(block.norm1, x), run), rotation)
        kept.add(k, v)
        return attended

    return finish_block(block, x, attend(), run)
