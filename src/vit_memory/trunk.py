"""The original tokens' pass, block by block, and the trunk it leaves behind for readers.

The same operations in the same order on the same shapes as the library, so the same bits (promise 1). No task is
known here: whatever is attached, a trunk is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_memory.buffers import BufferPool
from vit_memory.families.roles import Block, Roles, Rotation
from vit_memory.outputs import Original

Run = Callable[[nn.Module, Tensor], Tensor]  # how a row-wise module is applied to tokens


@dataclass(frozen=True, slots=True, eq=False)
class Trunk:
    """What class tokens read of a batch: the keys and values of every block, and the backbone's own output."""

    keys: tuple[Tensor, ...]  # per block (B, H, N, A/H), rotated and normed as the library does
    values: tuple[Tensor, ...]  # per block (B, H, N, A/H)
    original: Original
    patch_mean: Tensor  # (B, D), see `patch_mean`


@dataclass(frozen=True, slots=True, eq=False)
class PooledTrunk(Trunk):
    """A trunk whose keys and values lie in a buffer pool: they are overwritten when the pool is used for the next."""


def call(module: nn.Module, x: Tensor) -> Tensor:
    """Call a module whose result is a Tensor."""
    y: Tensor = module(x)
    return y


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


@torch.no_grad()
def run_trunk(roles: Roles, images: Tensor, *, keep: bool = True, pool: BufferPool | None = None) -> Trunk:
    """One pass of the original tokens alone over images (B, C, height, width); keys and values only if kept.

    With a `pool` the result is a `PooledTrunk`, which lasts until the next call with the same pool.
    """
    keys: list[Tensor] = []
    values: list[Tensor] = []
    x, rotation = roles.embed(images)

    def attend(block: Block, x: Tensor) -> Tensor:
        attended, k, v = attend_originals(roles, block, *split_qkv(block, block.norm1(x)), rotation)
        if keep:  # head by head, as readers' products want them: they would else copy them, and keep both for a graph
            keys.append(k.contiguous() if pool is None else pool.copy_in(("keys", len(keys)), k))
            values.append(v.contiguous() if pool is None else pool.copy_in(("values", len(values)), v))
        return attended

    for block in roles.blocks:
        x = finish_block(block, x, attend(block, x))
    trunk_type = Trunk if pool is None else PooledTrunk
    original = roles.finish(x)
    return trunk_type(tuple(keys), tuple(values), original, patch_mean(roles, original))
