"""One pass for everything: the tokens of the trunk, of branches and of tasks joined for the matrix products, attention
split.

Tokens travel as rows: first all original tokens of the batch, then those of the branches that have begun, then all
class tokens, so that each is a view of one matrix and no copy is needed to take them apart. Only what attention returns
is copied together again, and everything once where a branch begins.

Shape letters: B batch, N original tokens, D width, A = heads x head size, T readers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor, nn

from vit_memory.families.roles import Block, Roles, Rotation
from vit_memory.joining import JoinPlan
from vit_memory.outputs import Original
from vit_memory.reading import Readers, attend_readers, keys_values_of_trunks
from vit_memory.trunk import attend_originals, finish_block, split_qkv
from vit_memory.updates import BlockUpdates, PreparedBranch, RowsOf, Run, call, with_updates_in


@dataclass(frozen=True, slots=True, eq=False)
class FusedOutputs:
    """What one pass gives."""

    finals: dict[str | None, Original]  # of the original tokens (None), and of branches by key
    readers: tuple[Tensor, ...]  # normed outputs of the class tokens, each (B, T, D), as `read` returns them


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where the tokens are among the rows."""

    batch: int  # B
    originals: int  # N
    branches: tuple[PreparedBranch, ...]  # those that have begun
    readers: int  # T

    @property
    def trunk(self) -> slice:
        return slice(0, self.batch * self.originals)

    def branch_rows(self, j: int) -> slice:
        size = self.batch * self.originals
        return slice((1 + j) * size, (2 + j) * size)

    @property
    def class_tokens(self) -> slice:
        return slice((1 + len(self.branches)) * self.batch * self.originals, None)

    @property
    def extra_rows(self) -> int:
        """Rows of every image besides its original tokens."""
        return len(self.branches) * self.originals + self.readers

    def view_tokens(self, rows: Tensor, where: slice) -> Tensor:
        """The originals, or those of a branch, as (B, N, width)."""
        return rows[where].view(self.batch, self.originals, -1)

    def view_readers(self, rows: Tensor) -> Tensor:
        """The class tokens as (B, T, width)."""
        return rows[self.class_tokens].view(self.batch, self.readers, -1)


def run_fused(
    roles: Roles,
    plan: JoinPlan,
    readers: Readers | None,
    images: Tensor,
    branches: Sequence[PreparedBranch] = (),
) -> FusedOutputs:
    """The final output of the original tokens and of each branch, and the class tokens' outputs.

    Call it in `torch.no_grad`, unless a graph to what the readers and branches were made from is wanted.
    """
    x, rotation = roles.embed(images)
    B, N, D = x.shape
    T = 0 if readers is None else len(readers.tokens)
    at = _Rows(B, N, (), T)
    rows = x.reshape(B * N, D)
    if readers is not None:
        rows = torch.cat([rows, readers.tokens.expand(B, T, D).reshape(B * T, D)])
    run = _runner(plan, x, at)
    outputs: list[Tensor] = []
    for i, block in enumerate(roles.blocks):
        starting = tuple(branch for branch in branches if branch.start == i)
        if starting:
            at, rows = _begin_branches(at, rows, starting)
            run = _runner(plan, x, at)
        apply = _with_all_updates(run, at, readers, i)
        rows = finish_block(
            block,
            rows,
            _attend(roles, block, split_qkv(block, apply(block.norm1, rows), apply), at, rotation, readers, i),
            apply,
        )
        if readers is not None and i >= len(roles.blocks) - readers.read_out:
            outputs.append(at.view_readers(rows))
    finals: dict[str | None, Original] = {None: roles.finish(at.view_tokens(rows, at.trunk))}
    for j, branch in enumerate(at.branches):
        finals[branch.key] = roles.finish(at.view_tokens(rows, at.branch_rows(j)))
    return FusedOutputs(finals, tuple(call(roles.final_norm, output) for output in reversed(outputs)))


def _begin_branches(at: _Rows, rows: Tensor, starting: tuple[PreparedBranch, ...]) -> tuple[_Rows, Tensor]:
    """The rows with a copy of the original tokens for each branch, before the class tokens."""
    copies = [rows[at.trunk]] * len(starting)
    joined = torch.cat([rows[: at.class_tokens.start], *copies, rows[at.class_tokens]])
    return replace(at, branches=(*at.branches, *starting)), joined


def _with_all_updates(run: Run, at: _Rows, readers: Readers | None, i: int) -> Run:
    """What branches and readers learned for block i, each for its own rows."""
    changes: list[tuple[RowsOf, BlockUpdates]] = []
    for j, branch in enumerate(at.branches):
        changes.append((itemgetter(at.branch_rows(j)), branch.updates[i - branch.start]))
    if readers is not None and readers.updates:
        changes.append((at.view_readers, readers.updates[i]))
    return with_updates_in(run, changes) if changes else run


def _attend(
    roles: Roles,
    block: Block,
    qkv: tuple[Tensor, Tensor, Tensor],
    at: _Rows,
    rotation: Rotation | None,
    readers: Readers | None,
    i: int,
) -> Tensor:
    """Tokens of a trunk read each other; class tokens read their trunk, themselves, their ancestors and cells.

    Rows (…, A) in and out.
    """

    def attend(where: slice) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (at.view_tokens(part, where) for part in qkv)
        return attend_originals(roles, block, q, k, v, rotation)

    originals, keys, values = attend(at.trunk)
    attended = [originals.flatten(0, 1)]
    trunks: dict[str | None, tuple[Tensor, Tensor]] = {}
    for j, branch in enumerate(at.branches):
        tokens, branch_keys, branch_values = attend(at.branch_rows(j))
        attended.append(tokens.flatten(0, 1))
        trunks[branch.key] = branch_keys, branch_values
    if readers is not None:
        read_parts = keys_values_of_trunks(readers.layout, lambda branch: trunks.get(branch, (keys, values)))
        q, k, v = (at.view_readers(part) for part in qkv)
        read = attend_readers(roles, block, (q, k, v), read_parts, readers.layout.groups, readers.memory[i])
        attended.append(read.flatten(0, 1))
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def _runner(plan: JoinPlan, x: Tensor, at: _Rows) -> Run:
    """How to apply a row-wise module to the rows: in one call where no bit of the originals changes, else in two."""
    if torch.compiler.is_compiling():  # nothing can be proved while tracing: a compiled function has its own rounding
        return call
    if not at.extra_rows:  # no branch has begun, and no class token is read
        return lambda module, rows: call(module, at.view_tokens(rows, at.trunk)).flatten(0, 1)
    joined = plan.joined(x, at.originals, at.extra_rows)

    def run(module: nn.Module, rows: Tensor) -> Tensor:
        if module in joined:
            return call(module, rows)
        alone = call(module, at.view_tokens(rows, at.trunk)).flatten(0, 1)
        return torch.cat([alone, call(module, rows[at.trunk.stop :])])

    return run
