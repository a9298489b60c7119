"""The rule as one dense mask over one token sequence: slow, obvious, trusted. The passes are judged by it.

The sequence is [original tokens | tokens of each branch | class tokens | memory cells]; who reads whom (Table 1 of the
paper, and branches):

                   originals     tokens of branch j    class token k          cells of k
    original          yes                -                   -                      -
    branch token       -           its own branch            -                      -
    class token t  if it stands    if it stands on j   t and its ancestors    t and its ancestors
                   on no branch
    cell               -                 -                   -                      -

A branch is a copy of the original tokens: before its start block its tokens are equal to them, from there on they have
blocks of their own, the backbone's weights with its low-rank updates merged in, its norms and residuals scaled. So has
the class token of a learned reader. Unmasked memory, and the two variants in which cells are tokens that are handed on,
let everybody read everybody.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_memory.adapter import Adapter
from vit_memory.backbone import Backbone
from vit_memory.branch import Branch
from vit_memory.choices import Regime
from vit_memory.errors import TaskError
from vit_memory.families.roles import Block, Roles, Rotation, projections_of
from vit_memory.graph import TaskGraph
from vit_memory.outputs import Original, Outputs
from vit_memory.regimes import COMPOSABLE
from vit_memory.task import Task
from vit_memory.trunk import by_heads, finish_block, patch_mean, split_qkv


def rule(originals: int, tasks: Sequence[Task], graph: TaskGraph) -> Tensor:
    """The table above as bool (S, S): True where the row reads the column."""
    N, T, cells = originals, len(tasks), sum(task.cells for task in tasks)
    branches = list(graph.branches.values())
    trunks = N * (1 + len(branches))  # columns of all copies of the original tokens
    size = trunks + T + cells
    first_cell = {}
    column = trunks + T
    for task in tasks:
        first_cell[task.name] = column
        column += task.cells

    reads = torch.zeros(size, size, dtype=torch.bool)
    for copy in range(1 + len(branches)):
        reads[copy * N : (copy + 1) * N, copy * N : (copy + 1) * N] = True
    for t, task in enumerate(tasks):
        branch = graph.branch_of(task.name)
        copy = 0 if branch is None else 1 + branches.index(branch)
        reads[trunks + t, copy * N : (copy + 1) * N] = True
        for name in (task.name, *graph.ancestors(task.name)):
            if name not in first_cell:  # a `head` task among the ancestors has nothing to read
                continue
            k = [other.name for other in tasks].index(name)
            reads[trunks + t, trunks + k] = True
            reads[trunks + t, first_cell[name] : first_cell[name] + tasks[k].cells] = True
    # Cells read nothing. A row of a softmax needs something to read, so each gets itself; what it reads is dropped.
    reads[trunks + T :, trunks + T :] = torch.eye(cells, dtype=torch.bool)
    return reads


@torch.no_grad()
def dense_forward(
    backbone: Backbone, tasks: Sequence[Task], images: Tensor, branches: Sequence[Branch] = ()
) -> Outputs:
    """All tasks at once in one sequence, by the regime they share: composable ones masked, the others unmasked.

    Several unmasked tasks together are the naive concatenation that the mask exists to avoid.
    """
    roles = backbone.roles
    images = backbone.check_images(images)
    readers = [task for task in tasks if task.class_token is not None]
    regime = _common_regime(tasks)
    graph = TaskGraph(tasks, branches) if regime in COMPOSABLE else None
    tokens = [task.class_token for task in readers if task.class_token is not None]
    raw = torch.tensor([task.raw_memory for task in readers for _ in range(task.cells)], dtype=torch.bool)
    trunks, outputs = dense_pass(
        roles,
        images,
        torch.stack(tokens).to(images) if tokens else images.new_zeros(0, roles.width),
        torch.cat([task.memory for task in readers], dim=1).to(images)
        if readers
        else images.new_zeros(len(roles.blocks), 0, roles.width),
        regime,
        lambda N: None if graph is None else rule(N, readers, graph),
        raw,
        [task.reader for task in readers],
        branches,
    )
    answers = {}
    for task in tasks:
        branch = None if graph is None else graph.branch_of(task.name)
        final = trunks[0 if branch is None else 1 + branches.index(branch)]
        if task.class_token is None:
            answers[task.name] = task.answer(final.feature)
            continue
        own = outputs[:, -task.read_out.blocks :, readers.index(task)].flip(1).flatten(1)  # (B, blocks · D)
        parts = [own, patch_mean(roles, final)] if task.read_out.patches else [own]
        answers[task.name] = task.answer(torch.cat(parts, dim=1))
    return Outputs(trunks[0], answers)


def dense_pass(
    roles: Roles,
    images: Tensor,
    tokens: Tensor,
    cells: Tensor,
    regime: Regime,
    rule_for: Callable[[int], Tensor | None] = lambda originals: None,
    raw: Tensor | None = None,
    learned: Sequence[Adapter | None] = (),
    branches: Sequence[Branch] = (),
) -> tuple[list[Original], Tensor]:
    """One sequence of originals, copies for branches, class tokens (T, D) and cells (L, S, D) through all blocks.

    `rule_for` makes the mask from the number of original tokens; None lets everybody read everybody. `raw` (S,) marks
    cells that skip the norm. `learned` are the readers of the class tokens. Returns the final output of the original
    tokens and of every branch, and the class tokens' normed outputs of every block (B, L, T, D).
    """
    x, rotation = roles.embed(images)
    B, N, _ = x.shape
    T, S, copies = len(tokens), cells.shape[1], 1 + len(branches)
    first = N * copies  # the first class token
    reads = rule_for(N)
    reads = None if reads is None else reads.to(x.device)
    skips_norm = torch.zeros(first + T + S, dtype=torch.bool, device=x.device)
    if raw is not None:
        skips_norm[first + T :] = raw.to(x.device)
    x = torch.cat([*[x] * copies, roles.pre_norm(tokens).expand(B, -1, -1), cells[0].expand(B, -1, -1)], dim=1)
    outputs = []
    for i, block in enumerate(roles.blocks):
        carried = x[:, first + T :]
        if regime == "propagated":
            entering = carried
        elif regime == "additive":
            entering = carried + cells[i] if i else carried
        else:
            entering = cells[i].expand(B, -1, -1)
        own = [
            (slice(N * (1 + j), N * (2 + j)), _merged(block, branch.adapter, i - branch.start))
            for j, branch in enumerate(branches)
            if i >= branch.start
        ] + [
            (slice(first + t, first + t + 1), _merged(block, reader, i))
            for t, reader in enumerate(learned)
            if reader is not None
        ]
        x = torch.cat([x[:, : first + T], entering], dim=1)
        x = _dense_block(roles, block, x, reads, rotation, skips_norm, (N, copies), own)
        outputs.append(roles.final_norm(x[:, first : first + T]))
    finals = [roles.finish(x[:, copy * N : (copy + 1) * N]) for copy in range(copies)]
    return finals, torch.stack(outputs, dim=1)


def _dense_block(
    roles: Roles,
    block: Block,
    x: Tensor,
    reads: Tensor | None,
    rotation: Rotation | None,
    skips_norm: Tensor,
    trunks: tuple[int, int],
    own: Sequence[tuple[slice, Block]],
) -> Tensor:
    """One block over the whole sequence; some tokens have a block of their own. `trunks`: their tokens and number."""
    N, copies = trunks
    normed = torch.where(skips_norm[:, None], x, block.norm1(x))
    q, k, v = split_qkv(block, normed)
    for where, merged in own:
        own_q, own_k, own_v = split_qkv(merged, merged.norm1(x[:, where]))
        q, k, v = _put(q, where, own_q), _put(k, where, own_k), _put(v, where, own_v)
    q, k, v = (by_heads(part, roles.heads) for part in (q, k, v))
    q, k = block.norm_q(q), block.norm_k(k)
    if roles.rotate is not None and rotation is not None:
        turned = [
            roles.rotate(q[:, :, copy * N : (copy + 1) * N], k[:, :, copy * N : (copy + 1) * N], rotation)
            for copy in range(copies)
        ]
        q = torch.cat([*(pair[0] for pair in turned), q[:, :, copies * N :]], dim=2)
        k = torch.cat([*(pair[1] for pair in turned), k[:, :, copies * N :]], dim=2)
    scores = (q @ k.transpose(-1, -2)) * block.scaling
    if reads is not None:
        scores = scores.masked_fill(~reads, float("-inf"))
    attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    out = finish_block(block, x, attended)
    for where, merged in own:
        out = _put(out, where, finish_block(merged, x[:, where], attended[:, where]))
    return out


def _put(x: Tensor, where: slice, tokens: Tensor) -> Tensor:
    """x (B, S, width) with other tokens (B, n, width) in these places."""
    return torch.cat([x[:, : where.start], tokens, x[:, where.stop :]], dim=1)


class _Scaled(nn.Module):
    """A module whose output is multiplied and shifted."""

    def __init__(self, module: nn.Module, scale: Tensor, shift: Tensor | None = None) -> None:
        super().__init__()
        self.module, self.scale, self.shift = module, scale, shift

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x) * self.scale.to(x)
        return y if self.shift is None else y + self.shift.to(x)


class _Merged(nn.Module):
    """A linear layer with something added to its weight."""

    def __init__(self, linear: nn.Linear, added: Tensor) -> None:
        super().__init__()
        self.linear, self.added = linear, added

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.linear.weight + self.added.to(x), self.linear.bias)


def _merged(block: Block, adapter: Adapter, i: int) -> Block:
    """A block with row i of an adapter: low-rank updates added to the weights, gains around the modules."""
    added: dict[nn.Module, Tensor] = {}
    projections = projections_of(block)
    for name, update in adapter.low_rank.items():
        part = projections[name]
        exact = torch.promote_types(torch.float32, part.module.weight.dtype)
        product = update.scaling_of(i) * update.B[i].to(exact) @ update.A[i].to(exact)
        delta = F.pad(product, (0, 0, *part.padding))
        added[part.module] = added.get(part.module, 0) + delta

    def merge(modules: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
        return tuple(
            _Merged(module, added[module]) if isinstance(module, nn.Linear) and module in added else module
            for module in modules
        )

    own = replace(block, qkv=merge(block.qkv), project=merge(block.project), mlp=merge(block.mlp))
    if adapter.gains is None:
        return own
    norm1, shift1, attention, norm2, shift2, mlp = adapter.gains[i]
    return replace(
        own,
        norm1=_Scaled(own.norm1, 1 + norm1, shift1),
        scale1=_Scaled(own.scale1, 1 + attention),
        norm2=_Scaled(own.norm2, 1 + norm2, shift2),
        scale2=_Scaled(own.scale2, 1 + mlp),
    )


def _common_regime(tasks: Sequence[Task]) -> Regime:
    regimes: set[Regime] = {"memory" if task.regime in COMPOSABLE else task.regime for task in tasks} or {"memory"}
    if len(regimes) > 1 or "full" in regimes:
        raise TaskError(
            f"one sequence follows one rule: regimes {', '.join(sorted(regimes))} cannot be computed together, "
            f"and 'full' has a backbone of its own."
        )
    return regimes.pop()
