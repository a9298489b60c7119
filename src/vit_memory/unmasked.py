"""The pass of regimes without a mask: original tokens, class token and cells are one sequence in which all read all.

A task of such a regime changes what the original tokens compute, so it cannot share a pass with others. The regimes
differ in where cells come from: `memory-unmasked` has new ones in every block, `propagated` hands the first block's on
from block to block, `additive` hands them on and adds new ones to them.
"""

import torch
from torch import Tensor

from vit_memory.choices import Regime
from vit_memory.families.roles import Block, Roles, Rotation
from vit_memory.outputs import Original
from vit_memory.trunk import by_heads, finish_block, split_qkv


def run_unmasked(
    roles: Roles, images: Tensor, tokens: Tensor, cells: Tensor, regime: Regime, *, raw: bool = False
) -> tuple[Original, Tensor]:
    """Class tokens (T, D) and cells (L, S, D) through all blocks beside the original tokens, with a graph if wanted.

    `raw` cells skip the norm before attention. Returns the original output, as the cells changed it, and the class
    tokens' final outputs (B, T, D).
    """
    x, rotation = roles.embed(images)
    B, N, _ = x.shape
    x = torch.cat([x, roles.pre_norm(tokens).expand(B, -1, -1)], dim=1)  # (B, N + T, D)
    block_cells = cells[0].expand(B, -1, -1)  # (B, S, D)
    for i, block in enumerate(roles.blocks):
        if i:
            block_cells = _next_cells(regime, block_cells, cells[i])
        x, block_cells = _run_block(roles, block, x, block_cells, rotation, N, raw=raw)
    return roles.finish(x[:, :N]), roles.final_norm(x[:, N:])


def _next_cells(regime: Regime, previous: Tensor, own: Tensor) -> Tensor:
    """The cells (B, S, D) that enter a block, from the previous block's output and the block's own (S, D)."""
    if regime == "propagated":
        return previous
    if regime == "additive":
        return previous + own
    if regime == "memory-unmasked":
        return own.expand_as(previous)
    raise ValueError(f"regime {regime!r} has a mask, or no cells.")


def _run_block(
    roles: Roles, block: Block, x: Tensor, cells: Tensor, rotation: Rotation | None, N: int, *, raw: bool
) -> tuple[Tensor, Tensor]:
    together = torch.cat([x, cells], dim=1)  # (B, N + T + S, D)
    normed = torch.cat([block.norm1(x), cells], dim=1) if raw else block.norm1(together)
    q, k, v = (by_heads(part, roles.heads) for part in split_qkv(block, normed))
    q, k = block.norm_q(q), block.norm_k(k)
    if roles.rotate is not None and rotation is not None:  # only the original tokens have positions
        q_turned, k_turned = roles.rotate(q[:, :, :N], k[:, :, :N], rotation)
        q, k = torch.cat([q_turned, q[:, :, N:]], dim=2), torch.cat([k_turned, k[:, :, N:]], dim=2)
    out = finish_block(block, together, block.attend(q, k, v))
    return out[:, : x.shape[1]], out[:, x.shape[1] :]
