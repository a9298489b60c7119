"""Settings of the composable regimes: one backbone pass serves all of them.

Settings are unrelated tasks: none reads another, and the trunk reads none of them. So the trunk is computed without a
graph, or read from a store, and only class tokens have a graph.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vit_memory.buffers import ThreadBuffers
from vit_memory.errors import TrainingError
from vit_memory.reading import Memory, Readers, lay_out, place_cells, project_cells, read
from vit_memory.regimes import COMPOSABLE
from vit_memory.snapshot import prepare_branch
from vit_memory.training.frozen_linear import PooledLinear
from vit_memory.training.memory_sweep import MemorySweep
from vit_memory.training.row_formats import RowFormat, TrunkRows
from vit_memory.training.sweep import Encoding, Stack
from vit_memory.trunk import ReadableTrunk, Trunk, run_trunk
from vit_memory.updates import PreparedBranch, Run, group_readers, reader_updates


@dataclass(frozen=True, slots=True, eq=False)
class _DetachedReaders:
    """Readers detached from the parameters, so that chunks can be computed in threads, each with its own graph."""

    readers: Readers
    pairs: tuple[tuple[Tensor, Tensor], ...]  # a tensor with a graph to the parameters, and its detached leaf


class TrunkSweep(MemorySweep):
    """Settings of `head`, `class`, `memory` and `reader`, which extend the same frozen parents.

    They read the original trunk, or frozen branches that are among `parents`.
    """

    def check_parents(self) -> None:
        """Raise TrainingError unless the parents are exactly those that the settings extend, with all ancestors."""
        task, parents = self.settings[0].task, self.parents
        for setting in self.settings:
            if setting.task.regime not in COMPOSABLE:
                raise TrainingError(
                    f"{setting.name}: regime {setting.task.regime!r} cannot be trained beside others; "
                    f"those that can: {', '.join(sorted(COMPOSABLE))}."
                )
        missing = [name for name in task.parents if name not in parents]
        if missing or set(parents) != set(parents.with_ancestors(task.parents)):
            raise TrainingError(
                f"{task.name} extends {', '.join(task.parents) or 'nothing'}, but the given parents are "
                f"{', '.join(parents) or 'none'}: give its parents and all their ancestors, and no others."
            )

    def create_parameters(self) -> dict[str, Stack]:
        """Those of a MemorySweep; the frozen parents are prepared beside them."""
        stacks = super().create_parameters()
        self._detached: _DetachedReaders | None = None
        self._buffers = ThreadBuffers()
        self.frozen_branches = self._prepare_branches()
        self._lay_out()
        return stacks

    def _prepare_branches(self) -> tuple[PreparedBranch, ...]:
        """The frozen branches that settings and parents stand on."""
        own = [self.parents.find_branch(setting.task) for setting in self.settings]
        inherited = [self.parents.branch_of(name) for name in self.parents]
        by_name = {branch.name: branch for branch in (*own, *inherited) if branch is not None}
        digests = self.parents.branch_digests
        return tuple(prepare_branch(self.backbone, branch, digests[name]) for name, branch in by_name.items())

    def branch_key(self, i: int) -> str | None:
        """The key of the branch that setting i stands on; a float16 branch has another digest than the task names."""
        branch = self.parents.find_branch(self.settings[i].task)
        return None if branch is None else self.parents.branch_digests[branch.name]

    @property
    def _trunk_keys(self) -> list[str | None]:
        """The trunks that settings and parents may read."""
        return [None, *(branch.key for branch in self.frozen_branches)]

    @property
    def kept_blocks(self) -> int:
        """How many blocks of the original trunk are read."""
        if not self.frozen_branches:
            return self.backbone.depth
        starts = {branch.key: branch.start for branch in self.frozen_branches}
        read = {trunk.branch for trunk in self._layout.trunks} if self.with_token else set()
        return max((self.backbone.depth if key is None else starts[key] for key in read), default=0)

    def stored_rows(self, image_size: tuple[int, int]) -> RowFormat | None:
        """Trunks of the original tokens and of the frozen branches."""
        return TrunkRows(self.backbone, image_size, self.kept_blocks, self.frozen_branches)

    def _lay_out(self) -> None:
        """Lay out the settings with a class token beside the parents they read; project the parents' cells once."""
        roles, device = self.backbone.roles, self.backbone.device
        above = [self.parents[name] for name in self.parents if self.parents[name].class_token is not None]
        index = {task.name: len(self.with_token) + i for i, task in enumerate(above)}
        ancestors = [list(index.values())] * len(self.with_token)
        ancestors += [[index[a] for a in self.parents.ancestors(task.name) if a in index] for task in above]
        counts = [self.settings[i].task.cells for i in self.with_token] + [task.cells for task in above]
        trunks = [self.branch_key(i) for i in self.with_token]
        trunks += [
            None if (b := self.parents.branch_of(task.name)) is None else self.parents.branch_digests[b.name]
            for task in above
        ]
        layout = lay_out([str(i) for i in range(len(counts))], ancestors, counts, trunks)
        order = [int(name) for name in layout.names]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        rows = [row for i in order for row in range(starts[i], starts[i] + counts[i])]
        self._layout = layout.to(device)
        self._order = torch.tensor(order, dtype=torch.long, device=device)
        self._rows = torch.tensor(rows, dtype=torch.long, device=device)
        positions = {i: order.index(row) for row, i in enumerate(self.with_token)}
        self._positions = positions
        self._head_rows = torch.tensor(self._find_head_rows(positions, len(order)), dtype=torch.long, device=device)
        learned = {
            order.index(index[task.name]): task.reader.map(lambda x: x.to(device, self.backbone.dtype))
            for task in above
            if task.reader is not None
        }
        self._parent_groups = group_readers(learned)
        with torch.no_grad():
            dtype = self.backbone.dtype
            tokens = [task.class_token.to(device, dtype) for task in above if task.class_token is not None]
            nothing = torch.zeros(0, self.backbone.width, device=device, dtype=dtype)
            self._parent_tokens = torch.stack(tokens) if tokens else nothing
            self._parent_cells = [
                [project_cells(roles, block, task.memory[i].to(device, dtype), raw=task.raw_memory) for task in above]
                for i, block in enumerate(roles.blocks)
            ]

    def _find_head_rows(self, positions: Mapping[int, int], readers: int) -> list[int]:
        """For every part of every head, its row of what `logits` puts together: see there."""
        rows, trunks = [], self._trunk_keys
        for i, setting in enumerate(self.settings):
            trunk = 2 * trunks.index(self.branch_key(i))
            if i not in positions:
                rows.append(trunk)
                continue
            read_out = setting.task.read_out
            rows += [2 * len(trunks) + block * readers + positions[i] for block in range(read_out.blocks)]
            rows += [trunk + 1] * read_out.patches
        return rows

    def encode(self, images: Tensor) -> Encoding:
        """The trunk of the images. It is valid until the next call in the same thread."""
        keep = self.kept_blocks if self.with_token else 0
        return run_trunk(self.backbone.roles, images, keep=keep, pool=self._buffers.pool, branches=self.frozen_branches)

    def logits(self, encoding: Encoding) -> Tensor:
        """Outputs (T, B, C) of every setting for the images of a trunk, with a graph to the leaves."""
        assert isinstance(encoding, Trunk)
        return self.read_logits(encoding, PooledLinear(self._buffers.pool))

    def read_logits(self, trunk: ReadableTrunk, run: Run) -> Tensor:
        """Outputs (T, B, C) of every setting, read from a trunk; `run` applies the backbone's modules."""
        # One row (B, D) each: per trunk its final feature and patch mean, then the readers' outputs block by block.
        rows = []
        for key in self._trunk_keys:
            rows += [trunk.output(key).feature[None], trunk.patches(key)[None]]
        if self.with_token:
            outputs = read(self.backbone.roles, self._detached_readers().readers, trunk, run=run)
            rows += [output.transpose(0, 1) for output in outputs]  # (readers, B, D)
        return self.apply_heads(torch.cat(rows).index_select(0, self._head_rows))

    def leaves(self) -> list[Tensor]:
        """The tensors of the detached readers, and the heads."""
        pairs = self._detached_readers().pairs if self.with_token else ()
        return [*(leaf for _, leaf in pairs), self.heads.values, self.biases.values]

    def gradients(self) -> list[Tensor]:
        """The accumulated gradients: those of the detached readers are carried back to the parameters."""
        if self._detached is not None and self._detached.pairs:
            pairs = [(attached, leaf.grad) for attached, leaf in self._detached.pairs if leaf.grad is not None]
            if pairs:
                torch.autograd.backward([attached for attached, _ in pairs], [gradient for _, gradient in pairs])
        self._detached = None
        return super().gradients()

    def load_state_dict(self, state: Mapping[str, Tensor], stopped: Iterable[int]) -> None:
        """Restore the state of a sweep of the same settings, of which some were stopped."""
        super().load_state_dict(state, stopped)
        self.forget_readers()

    def forget_readers(self) -> None:
        """Compute the readers again from the parameters, which were changed."""
        self._detached = None

    def _detached_readers(self) -> _DetachedReaders:
        """Computed once for all chunks of a step: cells are projected once, however many images read them."""
        if self._detached is None or (torch.is_grad_enabled() and not self._detached.pairs):
            pairs: list[tuple[Tensor, Tensor]] = []

            def leaf(tensor: Tensor) -> Tensor:
                if not torch.is_grad_enabled():
                    return tensor
                detached = tensor.detach().requires_grad_()
                pairs.append((tensor, detached))
                return detached

            self._detached = _DetachedReaders(self._readers(leaf), tuple(pairs))
        return self._detached

    def project_own_cells(self, i: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (S, H, A/H) of the settings' cells (S, D) in block i."""
        return project_cells(self.backbone.roles, self.backbone.roles.blocks[i], cells)

    def place_in_block(self, i: int, memory: tuple[Memory, ...]) -> tuple[Memory, ...]:
        """What the groups read in block i: all their cells."""
        return memory

    def _readers(self, leaf: Callable[[Tensor], Tensor]) -> Readers:
        roles, dtype = self.backbone.roles, self.backbone.dtype
        tokens = torch.cat([self.tokens.values.to(dtype), self._parent_tokens])[self._order]
        memory = []
        for i, (cells, parents) in enumerate(zip(self.cells.values.to(dtype), self._parent_cells, strict=True)):
            own = self.project_own_cells(i, cells)
            keys, values = (
                torch.cat([table, *(projected[k] for projected in parents)]).index_select(0, self._rows)
                for k, table in enumerate(own)
            )
            placed = self.place_in_block(i, place_cells(self._layout, keys, values))
            memory.append(tuple(Memory(leaf(group.keys), leaf(group.values)) for group in placed))
        gains, low_rank = self.reader_stacks.groups(self._positions, lambda values: leaf(values.to(dtype)))
        parent_gains, parent_low_rank = self._parent_groups
        return Readers(
            self._layout,
            leaf(roles.pre_norm(tokens)),
            tuple(memory),
            reader_updates(roles.blocks, len(self._order), [*gains, *parent_gains], [*low_rank, *parent_low_rank]),
            max(self.settings[i].task.read_out.blocks for i in self.with_token),
        )
