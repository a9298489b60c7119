"""One pass for everything: original and class tokens joined for the matrix products, attention split.

Tokens travel as rows: first all original tokens of the batch, then all class tokens, so that both are views of one
matrix and no copy is needed to take them apart. Only what attention returns is copied together again.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vit_memory.families.roles import Block, Roles, Rotation
from vit_memory.joining import JoinPlan
from vit_memory.outputs import Original
from vit_memory.reader_updates import with_updates
from vit_memory.reading import Memory, ReaderGroup, Readers, attend_readers
from vit_memory.trunk import attend_originals, call, finish_block, split_qkv


@torch.no_grad()
def run_fused(roles: Roles, plan: JoinPlan, readers: Readers, images: Tensor) -> tuple[Original, tuple[Tensor, ...]]:
    """What the backbone says, and the normed outputs of the class tokens, each (B, T, D), as `read` returns them."""
    x, rotation = roles.embed(images)
    B, N, D = x.shape
    T = readers.tokens.shape[0]
    run = _runner(plan, x, T)
    rows = torch.cat([x.reshape(B * N, D), readers.tokens.expand(B, T, D).reshape(B * T, D)])
    outputs: list[Tensor] = []

    def readers_of(rows: Tensor) -> Tensor:
        return rows[B * N :].view(B, T, -1)

    for i, (block, memory) in enumerate(zip(roles.blocks, readers.memory, strict=True)):
        apply = with_updates(run, readers.updates[i], readers_of) if readers.updates else run
        rows = finish_block(
            block,
            rows,
            _attend(
                roles,
                block,
                split_qkv(block, apply(block.norm1, rows), apply),
                (B, N, T),
                rotation,
                readers.layout.groups,
                memory,
            ),
            apply,
        )
        if i >= len(roles.blocks) - readers.read_out:
            outputs.append(readers_of(rows))
    original = roles.finish(rows[: B * N].unflatten(0, (B, N)))
    return original, tuple(call(roles.final_norm, output) for output in reversed(outputs))


def _attend(
    roles: Roles,
    block: Block,
    qkv: tuple[Tensor, Tensor, Tensor],
    sizes: tuple[int, int, int],
    rotation: Rotation | None,
    groups: Sequence[ReaderGroup],
    memory: Sequence[Memory],
) -> Tensor:
    """Original tokens read each other, class tokens read them and their own: rows (B·N + B·T, A) in and out."""
    B, N, T = sizes
    q, k, v = (part[: B * N].unflatten(0, (B, N)) for part in qkv)
    q_read, k_read, v_read = (part[B * N :].unflatten(0, (B, T)) for part in qkv)
    attended, keys, values = attend_originals(roles, block, q, k, v, rotation)
    read = attend_readers(roles, block, (q_read, k_read, v_read), (keys, values), groups, memory)
    return torch.cat([attended.flatten(0, 1), read.flatten(0, 1)])


def _runner(plan: JoinPlan, x: Tensor, readers: int) -> Callable[[nn.Module, Tensor], Tensor]:
    """How to apply a row-wise module to the rows: in one call where no bit of the originals changes, else in two."""
    if torch.compiler.is_compiling():  # nothing can be proved while tracing: a compiled function has its own rounding
        return call
    B, N = x.shape[:2]
    joined = plan.joined(x, N, readers)

    def run(module: nn.Module, rows: Tensor) -> Tensor:
        if module in joined:
            return call(module, rows)
        alone = call(module, rows[: B * N].unflatten(0, (B, N)))
        return torch.cat([alone.flatten(0, 1), call(module, rows[B * N :])])

    return run
