"""Any number of settings trained at once on one trunk, each as if it were alone.

Under the rule of reading, settings are unrelated tasks: none can see another, and the loss is their sum, so that every
gradient is a setting's own. What is stacked is only the arithmetic. Clipping, schedule and optimiser state are kept per
setting, and one that diverges is stopped while the others go on.

Shape letters: B batch, T settings, R those with a class token, S all their cells, C classes, D width, L blocks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.errors import TrainingError
from vit_memory.graph import TaskGraph
from vit_memory.reading import Readers, place_cells, project_cells, read, seat
from vit_memory.task import COMPOSABLE, Task
from vit_memory.training.recipe import Recipe
from vit_memory.trunk import Trunk

_ADAM = (0.9, 0.999, 1e-8)
_STACKS = ("tokens", "cells", "heads", "biases")


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One point of a sweep: where it starts, and how fast it goes."""

    task: Task  # as it starts
    learning_rate: float
    weight_decay: float = 0.0

    @property
    def name(self) -> str:
        """What tables and messages call it."""
        size = f"{self.task.cells} cells" if self.task.regime == "memory" else self.task.regime
        decay = f", decay {self.weight_decay:g}" if self.weight_decay else ""
        told = self.task.record.recipe
        start = ", drawn token" if told.get("start") == "normal" and self.task.class_token is not None else ""
        seed = f", seed {told['task_seed']}" if told.get("task_seed") else ""
        return f"{size}, rate {self.learning_rate:g}{decay}{start}{seed}"


@dataclass(frozen=True, slots=True, eq=False)
class _Stack:
    """One parameter of many settings: `owner` says whose each row along `axis` is."""

    values: Tensor  # requires grad
    owner: Tensor  # (rows,) int64, positions among the settings
    axis: int
    first: Tensor  # optimiser state: momentum, or the mean of gradients
    second: Tensor  # AdamW's mean of squares

    def rows(self, per_setting: Tensor) -> Tensor:
        """(T,) to something that multiplies `values`."""
        shape = [1] * self.values.dim()
        shape[self.axis] = -1
        return per_setting[self.owner].view(shape)

    def squares(self, gradient: Tensor, settings: int) -> Tensor:
        """(T,): each setting's part of the squared norm."""
        others = [axis for axis in range(gradient.dim()) if axis != self.axis]
        per_row = gradient.square().sum(others) if others else gradient.square()
        return per_row.new_zeros(settings).index_add_(0, self.owner, per_row)


class Sweep:
    """The trained tensors of T settings and what their optimiser remembers.

    All settings answer the same labels and extend the same parents, which are frozen.
    """

    def __init__(self, backbone: Backbone, settings: Sequence[Setting], parents: TaskGraph, recipe: Recipe) -> None:
        _check(settings, parents)
        self.backbone, self.settings, self.parents, self.recipe = backbone, tuple(settings), parents, recipe
        device = backbone.device
        self.alive = torch.ones(len(settings), dtype=torch.bool, device=device)
        self._rates = torch.tensor([setting.learning_rate for setting in settings], device=device)
        self._decays = torch.tensor([setting.weight_decay for setting in settings], device=device)
        tasks = [setting.task for setting in settings]
        self._reading = [i for i, task in enumerate(tasks) if task.class_token is not None]
        every = torch.arange(len(tasks), device=device)
        owner = torch.tensor(self._reading, dtype=torch.long, device=device)
        sizes = torch.tensor([tasks[i].cells for i in self._reading], dtype=torch.long, device=device)

        def stack(values: Tensor, owner: Tensor, axis: int) -> _Stack:
            values = values.to(device, torch.float32, copy=True).requires_grad_()
            return _Stack(values, owner, axis, torch.zeros_like(values), torch.zeros_like(values))

        empty = torch.zeros(0, backbone.width)
        tokens = [task.class_token for task in tasks if task.class_token is not None]
        cells = [tasks[i].memory for i in self._reading]
        self._tokens = stack(torch.stack(tokens) if tokens else empty, owner, 0)  # (R, D)
        self._cells = stack(  # (L, S, D)
            torch.cat(cells, dim=1) if cells else empty.expand(backbone.depth, 0, -1),
            owner.repeat_interleave(sizes),
            1,
        )
        self._heads = stack(torch.stack([task.head_weight for task in tasks]), every, 0)  # (T, C, D)
        self._biases = stack(torch.stack([task.head_bias for task in tasks]), every, 0)  # (T, C)
        self._stacks = (self._tokens, self._cells, self._heads, self._biases)
        self._seat()

    def _seat(self) -> None:
        """Seat the settings with a token beside the parents they read, which are computed once and for all."""
        roles, device = self.backbone.roles, self.backbone.device
        above = [self.parents[name] for name in self.parents if self.parents[name].class_token is not None]
        index = {task.name: len(self._reading) + i for i, task in enumerate(above)}
        ancestors = [list(index.values())] * len(self._reading)
        ancestors += [[index[a] for a in self.parents.ancestors(task.name) if a in index] for task in above]
        counts = [self.settings[i].task.cells for i in self._reading] + [task.cells for task in above]
        seating = seat([str(i) for i in range(len(counts))], ancestors, counts)
        order = [int(name) for name in seating.names]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        rows = [row for i in order for row in range(starts[i], starts[i] + counts[i])]
        self._seating = replace(
            seating,
            groups=tuple(
                replace(
                    group,
                    ancestors=group.ancestors.to(device),
                    cells=group.cells.to(device),
                    readable=None if group.readable is None else group.readable.to(device),
                )
                for group in seating.groups
            ),
        )
        self._order = torch.tensor(order, dtype=torch.long, device=device)
        self._rows = torch.tensor(rows, dtype=torch.long, device=device)
        self._places = torch.tensor(
            [order.index(i) for i in range(len(self._reading))], dtype=torch.long, device=device
        )
        with torch.no_grad():
            dtype = self.backbone.dtype
            tokens = [task.class_token.to(device, dtype) for task in above if task.class_token is not None]
            self._parent_tokens = torch.stack(tokens) if tokens else torch.zeros(0, self.backbone.width, device=device)
            self._parent_cells = [
                [project_cells(roles, block, task.memory[i].to(device, dtype), raw=task.raw_memory) for task in above]
                for i, block in enumerate(roles.blocks)
            ]

    def logits(self, trunk: Trunk) -> Tensor:
        """Answers (T, B, C) of every setting to the images of a trunk, with a graph to what is trained."""
        backbone = self.backbone
        B = trunk.original.feature.shape[0]
        features = trunk.original.feature.expand(len(self.settings), -1, -1)  # (T, B, D), what `head` settings read
        if self._reading:
            read_out = read(backbone.roles, self._readers(), trunk)[:, self._places]  # (B, R, D)
            if len(self._reading) == len(self.settings):
                features = read_out.transpose(0, 1)
            else:
                features = features.index_copy(0, self._tokens.owner, read_out.transpose(0, 1).contiguous())
        answers = torch.baddbmm(
            self._biases.values[:, None].to(backbone.dtype).expand(-1, B, -1),
            features,
            self._heads.values.to(backbone.dtype).transpose(1, 2),
        )
        return answers.float()

    def _readers(self) -> Readers:
        roles, dtype = self.backbone.roles, self.backbone.dtype
        tokens = torch.cat([self._tokens.values.to(dtype), self._parent_tokens])[self._order]
        memory = []
        for block, cells, parents in zip(roles.blocks, self._cells.values.to(dtype), self._parent_cells, strict=True):
            own = project_cells(roles, block, cells)
            keys, values = (
                torch.cat([table, *(theirs[i] for theirs in parents)])[self._rows] for i, table in enumerate(own)
            )
            memory.append(place_cells(self._seating, keys, values))
        return Readers(self._seating, roles.pre_norm(tokens), tuple(memory))

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(T,): each setting's cross-entropy, summed over the images (B,)."""
        T, B, C = logits.shape
        each = F.cross_entropy(
            logits.reshape(T * B, C),
            labels.repeat(T),
            reduction="none",
            label_smoothing=self.recipe.label_smoothing,
        )
        return each.view(T, B).sum(1)

    @torch.no_grad()
    def step(self, number: int, losses: Tensor) -> list[int]:
        """One optimiser step of every living setting; returns those that diverged just now and are stopped."""
        T = len(self.settings)
        gradients = [_gradient(stack) for stack in self._stacks]
        squares = [stack.squares(g, T) for stack, g in zip(self._stacks, gradients, strict=True)]
        norms = torch.stack(squares).sum(0).sqrt()
        fine = norms.isfinite() & losses.isfinite()
        diverged = (self.alive & ~fine).nonzero().flatten().tolist()
        self.alive &= fine
        shares = torch.ones_like(norms)
        if self.recipe.clip is not None:
            shares = (self.recipe.clip / (norms + 1e-6)).clamp(max=1)
        rates = self._rates * self.recipe.rate_share(number)
        for stack, gradient in zip(self._stacks, gradients, strict=True):
            alive = stack.rows(self.alive)
            # A stopped setting's gradient may be NaN, and NaN times zero is NaN: choose, do not multiply.
            gradient = torch.where(alive, gradient * stack.rows(shares), 0.0)  # noqa: PLW2901
            rate, decay = torch.where(alive, stack.rows(rates), 0.0), stack.rows(self._decays)
            if self.recipe.optimiser == "sgd":
                stack.first.mul_(self.recipe.momentum).add_(gradient + decay * stack.values)
                stack.values.sub_(rate * stack.first)
            else:
                b1, b2, eps = _ADAM
                stack.first.lerp_(gradient, 1 - b1)
                stack.second.lerp_(gradient.square(), 1 - b2)
                size = stack.first / (1 - b1 ** (number + 1))
                spread = (stack.second / (1 - b2 ** (number + 1))).sqrt() + eps
                stack.values.mul_(1 - rate * decay).sub_(rate * size / spread)
            stack.values.grad = None
        return diverged

    def state(self) -> dict[str, Tensor]:
        """Everything that a later step depends on, by name."""
        kept: dict[str, Tensor] = {}
        for name, stack in zip(_STACKS, self._stacks, strict=True):
            kept |= {name: stack.values, f"{name}.first": stack.first}
            if self.recipe.optimiser == "adamw":
                kept[f"{name}.second"] = stack.second
        return kept

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], stopped: Iterable[int]) -> None:
        """Go back to a state of a sweep of the same settings."""
        for name, here in self.state().items():
            here.copy_(state[name])  # copied into place: tensors of a file lie unaligned in it, and round differently
        self.alive[list(stopped)] = False

    def tasks(self) -> list[Task]:
        """Every setting's task as it is now, on the CPU."""
        values = [stack.values.detach().cpu() for stack in self._stacks]
        tokens, cells, heads, biases = values
        trained = []
        place = {setting: i for i, setting in enumerate(self._reading)}
        starts = torch.tensor([0] + [self.settings[i].task.cells for i in self._reading]).cumsum(0).tolist()
        for i, setting in enumerate(self.settings):
            changes: dict[str, Tensor] = {"head_weight": heads[i].clone(), "head_bias": biases[i].clone()}
            if i in place:
                at = place[i]
                changes["class_token"] = tokens[at].clone()
                changes["memory"] = cells[:, starts[at] : starts[at + 1]].clone()
            trained.append(replace(setting.task, **changes))  # type: ignore[arg-type]
        return trained


def _gradient(stack: _Stack) -> Tensor:
    return torch.zeros_like(stack.values) if stack.values.grad is None else stack.values.grad


def _check(settings: Sequence[Setting], parents: TaskGraph) -> None:
    if not settings:
        raise TrainingError("no settings to train.")
    first = settings[0].task
    for setting in settings:
        task = setting.task
        if task.regime not in COMPOSABLE:
            raise TrainingError(
                f"{setting.name}: regime {task.regime!r} cannot be trained beside others; "
                f"those that can: {', '.join(sorted(COMPOSABLE))}."
            )
        if (task.labels, task.parents, task.kind) != (first.labels, first.parents, first.kind):
            raise TrainingError(f"{task.name}, {setting.name}: other labels, parents or kind than {settings[0].name}.")
        if task.raw_memory:
            raise TrainingError(f"{setting.name}: imported memory (raw) cannot be trained further.")
    if first.kind != "single-label":
        raise TrainingError(f"{first.name}: it is {first.kind}; only single-label tasks can be trained yet.")
    absent = [name for name in first.parents if name not in parents]
    if absent or set(parents) != set(parents.with_ancestors(first.parents)):
        raise TrainingError(
            f"{first.name} extends {', '.join(first.parents) or 'nothing'}, but given as parents were "
            f"{', '.join(parents) or 'none'}: give its parents and all their ancestors, and no others."
        )
