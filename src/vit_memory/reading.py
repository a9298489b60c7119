"""Class tokens against a trunk: the heart of the method, as pure tensor code.

A class token reads the original tokens (from the start block of its branch on, the branch's), itself, its own cells,
and its ancestors' class tokens and cells. The scores of all of them share one softmax; there is no mask over tasks and
no T × T term anywhere, so unrelated tasks are absent from each other's computation rather than multiplied by zero: a
broken one cannot reach them.

Shape letters: B batch, N original tokens, D width, H heads, A = H x head size, T readers, G readers of one group,
K ancestors, P cells a reader may read (its own and its ancestors').
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vit_memory.families.roles import Block, Roles
from vit_memory.trunk import ReadableTrunk, by_heads, finish_block, split_qkv
from vit_memory.updates import BlockUpdates, Run, call, with_updates

# Ancestors' keys are gathered per reader. Beyond this many readers × ancestors a group is cut, so that a long chain
# of extensions costs time in proportion to its pairs but never memory.
_GATHERED_PAIRS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class ReaderGroup:
    """Neighbouring readers that read about equally much, padded to the same lengths."""

    start: int
    stop: int
    ancestors: Tensor  # (G, K) positions among the readers; padding points at 0
    cells: Tensor  # (G, P) rows of the flat cell table; padding points at its last, zero row
    readable: Tensor | None  # (G, K + P) bool, False at padding; None where nothing is padded

    def to(self, device: torch.device) -> "ReaderGroup":
        """The same group with its tensors on that device."""
        readable = None if self.readable is None else self.readable.to(device)
        return replace(self, ancestors=self.ancestors.to(device), cells=self.cells.to(device), readable=readable)


@dataclass(frozen=True, slots=True)
class TrunkReaders:
    """Neighbouring readers that read the same trunk."""

    branch: str | None  # the key of a branch; None: the original trunk
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class ReaderLayout:
    """The order of the readers, their groups and their trunks. The flat table holds their cells in the same order."""

    names: tuple[str, ...]
    groups: tuple[ReaderGroup, ...]
    trunks: tuple[TrunkReaders, ...]

    def to(self, device: torch.device) -> "ReaderLayout":
        """The same layout with its tensors on that device."""
        return replace(self, groups=tuple(group.to(device) for group in self.groups))


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """One group's cells in one block, projected to keys and values. They do not depend on any image."""

    keys: Tensor  # (G, H, A/H, P); P may be 0: the group reads no cells in this block
    values: Tensor  # (G, H, P, A/H)


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """T class tokens ready to read: where they start, the memory of every block and group, and what they learned."""

    layout: ReaderLayout
    tokens: Tensor  # (T, D), as they enter the first block
    memory: tuple[tuple[Memory, ...], ...]  # per block, per group
    updates: tuple[BlockUpdates, ...] = ()  # per block; empty if no reader has learned how to read
    read_out: int = 1  # the last blocks whose outputs are wanted


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """Attention weights of one group in one block, by what was read; over all four they sum to one."""

    group: ReaderGroup
    originals: Tensor  # (B, H, G, N)
    itself: Tensor  # (B, H, G, 1)
    ancestors: Tensor  # (B, H, G, K)
    cells: Tensor  # (B, H, G, P)


Recorder = Callable[[AttentionWeights], None]


@dataclass(frozen=True, slots=True, eq=False)
class TrunkKeysValues:
    """What some neighbouring readers read of the trunk in one block."""

    readers: slice
    keys: Tensor  # (B, H, N, A/H)
    values: Tensor  # (B, H, N, A/H)


def keys_values_of_trunks(
    layout: ReaderLayout, keys_and_values: Callable[[str | None], tuple[Tensor, Tensor]]
) -> list[TrunkKeysValues]:
    """What all readers read in one block. Neighbours that still read the same trunk share one product."""
    parts: list[TrunkKeysValues] = []
    for trunk in layout.trunks:
        keys, values = keys_and_values(trunk.branch)
        if parts and parts[-1].keys is keys:
            parts[-1] = TrunkKeysValues(slice(parts[-1].readers.start, trunk.stop), keys, values)
        else:
            parts.append(TrunkKeysValues(slice(trunk.start, trunk.stop), keys, values))
    return parts


def lay_out(
    names: Sequence[str],
    ancestors: Sequence[Sequence[int]],
    cells: Sequence[int],
    branches: Sequence[str | None] | None = None,
) -> ReaderLayout:
    """Order readers by their trunk, and into groups of like length.

    `ancestors[i]` are positions in `names`, `cells[i]` counts its own, `branches[i]` is the key of the branch that
    it reads (by default all read the original trunk). Lengths are put together by powers of two and padded to the
    longest of the group, so that tasks of one size need no padding at all, and a task with a long ancestry does not
    lengthen everybody else's.
    """
    branches = branches or [None] * len(names)
    trunks: dict[str | None, int] = {None: 0}
    for branch in branches:
        trunks.setdefault(branch, len(trunks))
    total = [cells[i] + sum(cells[j] for j in ancestors[i]) for i in range(len(names))]
    kinds = [(trunks[branches[i]], len(ancestors[i]).bit_length(), total[i].bit_length()) for i in range(len(names))]
    order = sorted(range(len(names)), key=kinds.__getitem__)
    position = {i: p for p, i in enumerate(order)}
    rows: list[tuple[int, int]] = []
    for i in order:
        first = rows[-1][1] if rows else 0
        rows.append((first, first + cells[i]))
    zero_row = rows[-1][1] if rows else 0

    groups: list[ReaderGroup] = []
    start = 0
    while start < len(order):
        kind = kinds[order[start]]
        most = max(1, _GATHERED_PAIRS // (1 << kind[1])) if kind[1] else len(order)
        stop = start
        while stop < len(order) and stop - start < most and kinds[order[stop]] == kind:
            stop += 1
        members = order[start:stop]
        above = [[position[j] for j in ancestors[i]] for i in members]
        read = [
            [row for p in (*up, position[i]) for row in range(*rows[p])] for i, up in zip(members, above, strict=True)
        ]
        groups.append(_group(start, stop, above, read, zero_row))
        start = stop
    ordered = [branches[i] for i in order]
    parts = tuple(
        TrunkReaders(branch, ordered.index(branch), ordered.index(branch) + ordered.count(branch))
        for branch in dict.fromkeys(ordered)
    )
    return ReaderLayout(tuple(names[i] for i in order), tuple(groups), parts)


def _group(start: int, stop: int, above: list[list[int]], read: list[list[int]], zero_row: int) -> ReaderGroup:
    K, P = max(map(len, above)), max(map(len, read))
    padded = any(len(up) < K or len(rows) < P for up, rows in zip(above, read, strict=True))
    readable = [
        [True] * len(up) + [False] * (K - len(up)) + [True] * len(rows) + [False] * (P - len(rows))
        for up, rows in zip(above, read, strict=True)
    ]
    return ReaderGroup(
        start=start,
        stop=stop,
        ancestors=torch.tensor([up + [0] * (K - len(up)) for up in above], dtype=torch.long),
        cells=torch.tensor([rows + [zero_row] * (P - len(rows)) for rows in read], dtype=torch.long),
        readable=torch.tensor(readable) if padded else None,
    )


def project_cells(roles: Roles, block: Block, cells: Tensor, *, raw: bool = False) -> tuple[Tensor, Tensor]:
    """Keys and values (S, H, A/H) of cells (S, D): normed like every token of the block (unless raw), never rotated."""
    normed = cells if raw else block.norm1(cells)
    if len(block.qkv) == 3:
        k, v = (projection(normed) for projection in block.qkv[1:])  # cells ask nothing
    else:
        _, k, v = split_qkv(block, normed)
    k, v = (x.unflatten(-1, (roles.heads, -1)) for x in (k, v))
    return block.norm_k(k), v


def place_cells(layout: ReaderLayout, keys: Tensor, values: Tensor) -> tuple[Memory, ...]:
    """The flat table (S, H, A/H) of one block, gathered per group in the layout that the products want."""
    keys, values = (torch.cat([table, table.new_zeros(1, *table.shape[1:])]) for table in (keys, values))

    def chosen(table: Tensor, group: ReaderGroup) -> Tensor:  # (G, P, H, A/H); the gradient of plain indexing is slow
        rows: Tensor = table.index_select(0, group.cells.flatten()).unflatten(0, group.cells.shape)
        return rows

    return tuple(
        Memory(
            keys=chosen(keys, group).permute(0, 2, 3, 1).contiguous(),
            values=chosen(values, group).transpose(1, 2).contiguous(),
        )
        for group in layout.groups
    )


def attend_readers(
    roles: Roles,
    block: Block,
    qkv: tuple[Tensor, Tensor, Tensor],
    trunks: Sequence[TrunkKeysValues],
    groups: Sequence[ReaderGroup],
    memory: Sequence[Memory],
    record: Recorder | None = None,
) -> Tensor:
    """What T class tokens read in one block: their q, k, v (B, T, A) against keys and values of their trunks.

    q, k, v may be (1, T, A), the same for every image. `trunks` follow the order of the readers. Returns (B, T, A).
    """
    B, _, N, _ = trunks[0].keys.shape
    q, k, v = (by_heads(x, roles.heads).expand(B, -1, -1, -1) for x in qkv)  # (B, H, T, A/H)
    q, k = block.norm_q(q) * block.scaling, block.norm_k(k)
    to_trunk = _joined([q[:, :, part.readers] @ part.keys.transpose(-1, -2) for part in trunks])  # (B, H, T, N)
    to_self = (q * k).sum(-1, keepdim=True)  # (B, H, T, 1)

    trunk_weights: list[Tensor] = []
    other_values: list[Tensor] = []
    for group, cells in zip(groups, memory, strict=True):
        members = slice(group.start, group.stop)
        K, P = group.ancestors.shape[1], cells.keys.shape[-1]
        own_q = q[:, :, members]
        scores = [to_trunk[:, :, members], to_self[:, :, members]]
        if K:
            above_k, above_v = _gather(group, k), _gather(group, v)  # (B, H, G, K, A/H)
            scores.append((own_q.unsqueeze(-2) @ above_k.transpose(-1, -2)).squeeze(-2))
        if P:
            scores.append((own_q.permute(2, 1, 0, 3) @ cells.keys).permute(2, 1, 0, 3))  # (B, H, G, P)
        joint = torch.cat(scores, dim=-1)
        if group.readable is not None:
            joint[..., N + 1 :].masked_fill_(~group.readable[:, : K + P], float("-inf"))
        weights = joint.softmax(dim=-1)
        w_trunk, w_self, w_above, w_cells = weights.split((N, 1, K, P), dim=-1)
        value = w_self * v[:, :, members]
        if K:
            value = value + (w_above.unsqueeze(-2) @ above_v).squeeze(-2)
        if P:
            value = value + (w_cells.permute(2, 1, 0, 3) @ cells.values).permute(2, 1, 0, 3)
        trunk_weights.append(w_trunk)
        other_values.append(value)
        if record is not None:
            record(AttentionWeights(group, w_trunk, w_self, w_above, w_cells))
    w_trunk, others = _joined(trunk_weights), _joined(other_values)
    read_in = _joined([w_trunk[:, :, part.readers] @ part.values for part in trunks])
    return (read_in + others).transpose(1, 2).flatten(2)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts (B, H, some readers, …) of all readers, in their order."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)


def _gather(group: ReaderGroup, x: Tensor) -> Tensor:
    """Ancestors' rows of x (B, H, T, A/H) per reader: (B, H, G, K, A/H), zero at padding.

    Padding must not hold a real row: weight zero times a broken task's NaN is NaN.
    """
    rows = x[:, :, group.ancestors]
    if group.readable is None:
        return rows
    padding = ~group.readable[:, : group.ancestors.shape[1], None]
    return rows.masked_fill(padding, 0.0)


def read(
    roles: Roles, readers: Readers, trunk: ReadableTrunk, record: Recorder | None = None, run: Run = call
) -> tuple[Tensor, ...]:
    """Run T class tokens through all blocks against a given trunk; returns their normed outputs, each (B, T, D).

    The last block's output comes first, then as many of the earlier ones as the readers want. Carries a graph to
    whatever the readers were made from, and none to the trunk: this is what training runs on.
    """
    x = readers.tokens[None]  # (1, T, D): before the first block has read, they are the same for every image
    outputs: list[Tensor] = []
    for i, (block, memory) in enumerate(zip(roles.blocks, readers.memory, strict=True)):
        apply = with_updates(run, readers.updates[i]) if readers.updates else run
        qkv = split_qkv(block, apply(block.norm1, x), apply)
        trunks = keys_values_of_trunks(readers.layout, lambda branch, i=i: trunk.at(branch, i))  # type: ignore[misc]
        read_in = attend_readers(roles, block, qkv, trunks, readers.layout.groups, memory, record)
        x = finish_block(block, x, read_in, apply)
        if i >= len(roles.blocks) - readers.read_out:
            outputs.append(x)
    return tuple(call(roles.final_norm, output) for output in reversed(outputs))
