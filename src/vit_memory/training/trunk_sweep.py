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
from vit_memory.reader_updates import block_updates, group_readers
from vit_memory.reading import Memory, Readers, lay_out, place_cells, project_cells, read
from vit_memory.regimes import COMPOSABLE
from vit_memory.training.frozen_linear import PooledLinear
from vit_memory.training.memory_sweep import MemorySweep
from vit_memory.training.sweep import Encoding, Stack
from vit_memory.trunk import Trunk, run_trunk


@dataclass(frozen=True, slots=True, eq=False)
class _DetachedReaders:
    """Readers detached from the parameters, so that chunks can be computed in threads, each with its own graph."""

    readers: Readers
    pairs: tuple[tuple[Tensor, Tensor], ...]  # a tensor with a graph to the parameters, and its detached leaf


class TrunkSweep(MemorySweep):
    """Settings of `head`, `class`, `memory` and `reader`, which extend the same frozen parents."""

    storable = True

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
        self._lay_out()
        return stacks

    def _lay_out(self) -> None:
        """Lay out the settings with a class token beside the parents they read; project the parents' cells once."""
        roles, device = self.backbone.roles, self.backbone.device
        above = [self.parents[name] for name in self.parents if self.parents[name].class_token is not None]
        index = {task.name: len(self.with_token) + i for i, task in enumerate(above)}
        ancestors = [list(index.values())] * len(self.with_token)
        ancestors += [[index[a] for a in self.parents.ancestors(task.name) if a in index] for task in above]
        counts = [self.settings[i].task.cells for i in self.with_token] + [task.cells for task in above]
        layout = lay_out([str(i) for i in range(len(counts))], ancestors, counts)
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
        rows = []
        for i, setting in enumerate(self.settings):
            if i not in positions:
                rows.append(0)
                continue
            read_out = setting.task.read_out
            rows += [2 + block * readers + positions[i] for block in range(read_out.blocks)]
            rows += [1] * read_out.patches
        return rows

    def encode(self, images: Tensor) -> Trunk:
        """The trunk of the images. It is valid until the next call in the same thread."""
        return run_trunk(self.backbone.roles, images, keep=bool(self.with_token), pool=self._buffers.pool)

    def logits(self, encoding: Encoding) -> Tensor:
        """Outputs (T, B, C) of every setting for the images of a trunk, with a graph to the leaves."""
        assert isinstance(encoding, Trunk)
        # One row (B, D) each: the original feature, the patch mean, then the readers' outputs block by block.
        rows = [encoding.original.feature[None], encoding.patch_mean[None]]
        if self.with_token:
            readers = self._detached_readers().readers
            outputs = read(self.backbone.roles, readers, encoding, run=PooledLinear(self._buffers.pool))
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

    def _readers(self, leaf: Callable[[Tensor], Tensor]) -> Readers:
        roles, dtype = self.backbone.roles, self.backbone.dtype
        tokens = torch.cat([self.tokens.values.to(dtype), self._parent_tokens])[self._order]
        memory = []
        for block, cells, parents in zip(roles.blocks, self.cells.values.to(dtype), self._parent_cells, strict=True):
            own = project_cells(roles, block, cells)
            keys, values = (
                torch.cat([table, *(projected[i] for projected in parents)]).index_select(0, self._rows)
                for i, table in enumerate(own)
            )
            placed = place_cells(self._layout, keys, values)
            memory.append(tuple(Memory(leaf(group.keys), leaf(group.values)) for group in placed))
        gains, low_rank = self.reader_stacks.groups(self._positions, lambda values: leaf(values.to(dtype)))
        parent_gains, parent_low_rank = self._parent_groups
        return Readers(
            self._layout,
            leaf(roles.pre_norm(tokens)),
            tuple(memory),
            block_updates(roles.blocks, len(self._order), [*gains, *parent_gains], [*low_rank, *parent_low_rank]),
            max(self.settings[i].task.read_out.blocks for i in self.with_token),
        )
