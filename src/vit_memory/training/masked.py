"""Settings of the composable regimes, all on one trunk: the pass of the backbone is paid once, whatever is trained.

Under the rule of reading, settings are unrelated tasks: none can see another, and the trunk sees none of them. So it
is computed without a graph, or taken from a store, and only class tokens carry one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.buffers import ThreadBuffers
from vit_memory.errors import TrainingError
from vit_memory.graph import TaskGraph
from vit_memory.reading import Memory, Readers, lay_out, place_cells, project_cells, read
from vit_memory.task import COMPOSABLE
from vit_memory.training.objective import Objective
from vit_memory.training.products import Products
from vit_memory.training.recipe import Recipe
from vit_memory.training.sweep import MemorySweep, Seen, Setting
from vit_memory.trunk import Trunk, run_trunk


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """Readers cut off from what they were made from, and the pairs by which gradients find back."""

    readers: Readers
    made: tuple[tuple[Tensor, Tensor], ...]  # with a graph to what is trained; the leaf that chunks read


class MaskedSweep(MemorySweep):
    """Settings of `head`, `class` and `memory`, which extend the same frozen parents."""

    def __init__(
        self,
        backbone: Backbone,
        settings: Sequence[Setting],
        parents: TaskGraph,
        recipe: Recipe,
        objective: Objective | None = None,
    ) -> None:
        super().__init__(backbone, settings, recipe, objective)
        _check(settings, parents)
        self.parents = parents
        self._ready: _Prepared | None = None
        self._buffers = ThreadBuffers()
        self._lay_out()

    def _lay_out(self) -> None:
        """Lay out the settings with a token beside the parents they read, which are computed once and for all."""
        roles, device = self.backbone.roles, self.backbone.device
        above = [self.parents[name] for name in self.parents if self.parents[name].class_token is not None]
        index = {task.name: len(self.reading) + i for i, task in enumerate(above)}
        ancestors = [list(index.values())] * len(self.reading)
        ancestors += [[index[a] for a in self.parents.ancestors(task.name) if a in index] for task in above]
        counts = [self.settings[i].task.cells for i in self.reading] + [task.cells for task in above]
        layout = lay_out([str(i) for i in range(len(counts))], ancestors, counts)
        order = [int(name) for name in layout.names]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        rows = [row for i in order for row in range(starts[i], starts[i] + counts[i])]
        self._layout = layout.to(device)
        self._order = torch.tensor(order, dtype=torch.long, device=device)
        self._rows = torch.tensor(rows, dtype=torch.long, device=device)
        self._places = torch.tensor([order.index(i) for i in range(len(self.reading))], dtype=torch.long, device=device)
        with torch.no_grad():
            dtype = self.backbone.dtype
            tokens = [task.class_token.to(device, dtype) for task in above if task.class_token is not None]
            self._parent_tokens = torch.stack(tokens) if tokens else torch.zeros(0, self.backbone.width, device=device)
            self._parent_cells = [
                [project_cells(roles, block, task.memory[i].to(device, dtype), raw=task.raw_memory) for task in above]
                for i, block in enumerate(roles.blocks)
            ]

    def look(self, images: Tensor) -> Trunk:
        """The trunk of some images, which holds until the next are looked at."""
        return run_trunk(self.backbone.roles, images, keep=bool(self.reading), pool=self._buffers.pool)

    def logits(self, seen: Seen) -> Tensor:
        """Answers (T, B, C) of every setting to the images of a trunk, with a graph to what is trained."""
        assert isinstance(seen, Trunk)
        features = seen.original.feature.expand(len(self.settings), -1, -1)  # (T, B, D), what `head` settings read
        if self.reading:
            readers = self._prepared().readers
            run = Products(self._buffers.pool)
            read_out = read(self.backbone.roles, readers, seen, run=run)[:, self._places]  # (B, R, D)
            if len(self.reading) == len(self.settings):
                features = read_out.transpose(0, 1)
            else:
                features = features.index_copy(0, self.tokens.owner, read_out.transpose(0, 1).contiguous())
        return self.answers(features)

    def leaves(self) -> list[Tensor]:
        """The prepared readers' tensors, and the heads."""
        made = self._prepared().made if self.reading else ()
        return [*(leaf for _, leaf in made), self.heads.values, self.biases.values]

    def gradients(self) -> list[Tensor]:
        """Those gathered so far: what reached the prepared readers is carried on to what they were made from."""
        if self._ready is not None and self._ready.made:
            reached = [(made, leaf.grad) for made, leaf in self._ready.made if leaf.grad is not None]
            if reached:
                torch.autograd.backward([made for made, _ in reached], [grad for _, grad in reached])
        self._ready = None
        return super().gradients()

    def step(self, number: int, losses: Tensor, count: float = 1.0) -> list[int]:
        """One optimiser step; what was prepared from the old values is dropped."""
        diverged = super().step(number, losses, count)
        self._ready = None
        return diverged

    def load_state(self, state: Mapping[str, Tensor], stopped: Iterable[int]) -> None:
        """Go back to a state of a sweep of the same settings."""
        super().load_state(state, stopped)
        self._ready = None

    def _prepared(self) -> _Prepared:
        """Readers made once for all chunks of a step: cells are projected once, however many images read them."""
        if self._ready is None or (torch.is_grad_enabled() and not self._ready.made):
            made = self._readers()
            if not torch.is_grad_enabled():
                self._ready = _Prepared(made, ())
                return self._ready
            pairs = []

            def leaf(tensor: Tensor) -> Tensor:
                cut = tensor.detach().requires_grad_()
                pairs.append((tensor, cut))
                return cut

            memory = tuple(
                tuple(Memory(leaf(group.keys), leaf(group.values)) for group in block) for block in made.memory
            )
            self._ready = _Prepared(Readers(made.layout, leaf(made.tokens), memory), tuple(pairs))
        return self._ready

    def _readers(self) -> Readers:
        roles, dtype = self.backbone.roles, self.backbone.dtype
        tokens = torch.cat([self.tokens.values.to(dtype), self._parent_tokens])[self._order]
        memory = []
        for block, cells, parents in zip(roles.blocks, self.cells.values.to(dtype), self._parent_cells, strict=True):
            own = project_cells(roles, block, cells)
            keys, values = (
                torch.cat([table, *(theirs[i] for theirs in parents)]).index_select(0, self._rows)
                for i, table in enumerate(own)
            )
            memory.append(place_cells(self._layout, keys, values))
        return Readers(self._layout, roles.pre_norm(tokens), tuple(memory))


def _check(settings: Sequence[Setting], parents: TaskGraph) -> None:
    first = settings[0].task
    for setting in settings:
        if setting.task.regime not in COMPOSABLE:
            raise TrainingError(
                f"{setting.name}: regime {setting.task.regime!r} cannot be trained beside others; "
                f"those that can: {', '.join(sorted(COMPOSABLE))}."
            )
    absent = [name for name in first.parents if name not in parents]
    if absent or set(parents) != set(parents.with_ancestors(first.parents)):
        raise TrainingError(
            f"{first.name} extends {', '.join(first.parents) or 'nothing'}, but given as parents were "
            f"{', '.join(parents) or 'none'}: give its parents and all their ancestors, and no others."
        )
