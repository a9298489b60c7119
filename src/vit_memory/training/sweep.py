"""Any number of settings trained at once, each as if it were alone: what they learn, and their optimiser.

The loss is the sum over settings, so that every gradient is a setting's own. Clipping, schedule and optimiser state are
kept per setting, and one that diverges is stopped while the others go on. How a setting sees images is its regime's
(`masked.py`, `regimes.py`); here are only its numbers.

Shape letters: B batch, T settings, R those with a class token, S all their cells, C classes, D width, L blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.errors import TrainingError
from vit_memory.graph import TaskGraph
from vit_memory.task import Task
from vit_memory.training.objective import Objective, SingleLabel
from vit_memory.training.recipe import Recipe
from vit_memory.trunk import Trunk

_ADAM = (0.9, 0.999, 1e-8)
Seen = Trunk | Tensor  # what settings look at: the trunk of a batch, or its images


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One point of a sweep: where it starts, and how fast it goes."""

    task: Task  # as it starts
    learning_rate: float
    weight_decay: float = 0.0

    @property
    def name(self) -> str:
        """What tables and messages call it."""
        task = self.task
        cells = f"{task.cells} cell{'' if task.cells == 1 else 's'}" if task.cells else ""
        size = cells if task.regime == "memory" and cells else f"{task.regime} {cells}".strip()
        decay = f", decay {self.weight_decay:g}" if self.weight_decay else ""
        told = self.task.record.recipe
        start = ", drawn token" if told.get("start") == "normal" and self.task.class_token is not None else ""
        seed = f", seed {told['task_seed']}" if told.get("task_seed") else ""
        return f"{size}, rate {self.learning_rate:g}{decay}{start}{seed}"


@dataclass(slots=True, eq=False)
class Stack:
    """One parameter of many settings: `owner` says whose each row along `axis` is."""

    values: Tensor  # requires grad
    owner: Tensor  # (rows,) int64, positions among the settings
    axis: int
    first: Tensor  # optimiser state: momentum, or the mean of gradients
    second: Tensor  # AdamW's mean of squares
    kept: Tensor | None = None  # the values of every setting's best look, where these are kept

    @classmethod
    def of(cls, values: Tensor, owner: Tensor, axis: int) -> "Stack":
        """With nothing remembered yet."""
        return cls(values, owner, axis, torch.zeros_like(values), torch.zeros_like(values))

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


class Sweep(ABC):
    """T settings that answer the same labels: their trained tensors, and what their optimiser remembers."""

    def __init__(
        self, backbone: Backbone, settings: Sequence[Setting], recipe: Recipe, objective: Objective | None = None
    ) -> None:
        check_alike(settings)
        self.backbone, self.settings, self.recipe = backbone, tuple(settings), recipe
        if objective is None and settings[0].task.kind != "single-label":
            raise TrainingError(f"{settings[0].task.name}: a {settings[0].task.kind} task needs an objective.")
        self.objective = objective or SingleLabel(len(settings[0].task.labels), recipe.label_smoothing)
        self.parents = TaskGraph()
        device = backbone.device
        self.alive = torch.ones(len(settings), dtype=torch.bool, device=device)
        self.stacks: dict[str, Stack] = {}
        self._rates = torch.tensor([setting.learning_rate for setting in settings], device=device)
        self._decays = torch.tensor([setting.weight_decay for setting in settings], device=device)

    @abstractmethod
    def look(self, images: Tensor) -> Seen:
        """What the settings read of images: computed once for all of them, without a graph."""

    @abstractmethod
    def logits(self, seen: Seen) -> Tensor:
        """Outputs (T, B, C) of every setting, with a graph to the leaves."""

    @abstractmethod
    def tasks(self) -> list[Task]:
        """Every setting's task as it is now (at its best look, where these are kept), on the CPU."""

    def leaves(self) -> list[Tensor]:
        """The tensors that the gradients of a batch are taken for. Made before any piece of the batch is computed."""
        return [stack.values for stack in self.stacks.values()]

    def backward(self, seen: Seen, targets: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """The losses (T,) of some images, summed over them, and their gradients for every leaf.

        Nothing is accumulated, so several threads may each compute a piece of a batch; `accumulate` adds them up.
        """
        losses = self.objective.losses(self.logits(seen), targets)
        # A stopped setting may be NaN; left out of the sum it gets no gradient, and the others their own.
        gradients = torch.autograd.grad(losses[self.alive].sum(), self.leaves(), allow_unused=True)
        return losses.detach(), list(gradients)

    def accumulate(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of a piece, in the order of the leaves."""
        for leaf, gradient in zip(self.leaves(), gradients, strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient

    def gradients(self) -> list[Tensor]:
        """Those gathered so far, one for every stack."""
        for stack in self.stacks.values():
            if stack.values.grad is None:
                stack.values.grad = torch.zeros_like(stack.values)
        return [stack.values.grad for stack in self.stacks.values() if stack.values.grad is not None]

    @torch.no_grad()
    def step(self, number: int, losses: Tensor, count: float = 1.0) -> list[int]:
        """One optimiser step of every living setting; returns those that diverged just now and are stopped.

        Gradients and losses are sums over `count` images.
        """
        T = len(self.settings)
        gradients = self.gradients()
        squares = [stack.squares(g, T) for stack, g in zip(self.stacks.values(), gradients, strict=True)]
        norms = torch.stack(squares).sum(0).sqrt() / count
        fine = norms.isfinite() & losses.isfinite()
        diverged = (self.alive & ~fine).nonzero().flatten().tolist()
        self.alive &= fine
        shares = torch.ones_like(norms)
        if self.recipe.clip is not None:
            shares = (self.recipe.clip / (norms + 1e-6)).clamp(max=1)
        rates = self._rates * self.recipe.rate_share(number)
        for stack, gradient in zip(self.stacks.values(), gradients, strict=True):
            alive = stack.rows(self.alive)
            # A stopped setting's gradient may be NaN, and NaN times zero is NaN: choose, do not multiply.
            gradient = torch.where(alive, gradient * stack.rows(shares / count), 0.0)  # noqa: PLW2901
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

    @torch.no_grad()
    def keep(self, improved: Tensor) -> None:
        """Remember the values of those settings (T,) bool as the ones they will end with."""
        for stack in self.stacks.values():
            if stack.kept is None:
                stack.kept = stack.values.detach().clone()
            stack.kept = torch.where(stack.rows(improved.to(stack.values.device)), stack.values, stack.kept)

    def ended(self) -> dict[str, Tensor]:
        """The values of every stack that count: the last, or the kept ones."""
        return {
            name: (stack.values.detach() if stack.kept is None else stack.kept).cpu()
            for name, stack in self.stacks.items()
        }

    def state(self) -> dict[str, Tensor]:
        """Everything that a later step depends on, by name."""
        state: dict[str, Tensor] = {}
        for name, stack in self.stacks.items():
            state |= {name: stack.values, f"{name}.first": stack.first}
            if self.recipe.optimiser == "adamw":
                state[f"{name}.second"] = stack.second
            if stack.kept is not None:
                state[f"{name}.kept"] = stack.kept
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], stopped: Iterable[int]) -> None:
        """Go back to a state of a sweep of the same settings."""
        if any(name.endswith(".kept") for name in state):
            self.keep(self.alive)
        for name, here in self.state().items():
            here.copy_(state[name])  # copied into place: tensors of a file lie unaligned in it, and round differently
        self.alive[list(stopped)] = False


class MemorySweep(Sweep):
    """Settings that learn a class token, memory cells and a head, or some of these."""

    def __init__(
        self, backbone: Backbone, settings: Sequence[Setting], recipe: Recipe, objective: Objective | None = None
    ) -> None:
        super().__init__(backbone, settings, recipe, objective)
        device = backbone.device
        tasks = [setting.task for setting in settings]
        self.reading = [i for i, task in enumerate(tasks) if task.class_token is not None]
        every = torch.arange(len(tasks), device=device)
        owner = torch.tensor(self.reading, dtype=torch.long, device=device)
        sizes = torch.tensor([tasks[i].cells for i in self.reading], dtype=torch.long, device=device)

        def stack(values: Tensor, owner: Tensor, axis: int) -> Stack:
            return Stack.of(values.to(device, torch.float32, copy=True).requires_grad_(), owner, axis)

        empty = torch.zeros(0, backbone.width)
        tokens = [task.class_token for task in tasks if task.class_token is not None]
        cells = [tasks[i].memory for i in self.reading]
        self.tokens = stack(torch.stack(tokens) if tokens else empty, owner, 0)  # (R, D)
        self.cells = stack(  # (L, S, D)
            torch.cat(cells, dim=1) if cells else empty.expand(backbone.depth, 0, -1),
            owner.repeat_interleave(sizes),
            1,
        )
        self.heads = stack(torch.stack([task.head_weight for task in tasks]), every, 0)  # (T, C, D)
        self.biases = stack(torch.stack([task.head_bias for task in tasks]), every, 0)  # (T, C)
        self.stacks = {"tokens": self.tokens, "cells": self.cells, "heads": self.heads, "biases": self.biases}
        self.cell_rows = [0, *sizes.cumsum(0).tolist()]  # where the cells of each reading setting begin

    def answers(self, features: Tensor) -> Tensor:
        """Heads applied to features (T, B, D): (T, B, C)."""
        dtype, B = self.backbone.dtype, features.shape[1]
        biases = self.biases.values[:, None].to(dtype).expand(-1, B, -1)
        return torch.baddbmm(biases, features, self.heads.values.to(dtype).transpose(1, 2)).float()

    def tasks(self) -> list[Task]:
        """Every setting's task as it is now (at its best look, where these are kept), on the CPU."""
        ended = self.ended()
        trained = []
        place = {setting: i for i, setting in enumerate(self.reading)}
        for i, setting in enumerate(self.settings):
            changes = {"head_weight": ended["heads"][i].clone(), "head_bias": ended["biases"][i].clone()}
            if i in place:
                at = place[i]
                changes["class_token"] = ended["tokens"][at].clone()
                changes["memory"] = ended["cells"][:, self.cell_rows[at] : self.cell_rows[at + 1]].clone()
            trained.append(replace(setting.task, **changes))  # type: ignore[arg-type]
        return trained


def check_alike(settings: Sequence[Setting]) -> None:
    """Settings are compared with each other: they must answer the same question."""
    if not settings:
        raise TrainingError("no settings to train.")
    first = settings[0].task
    for setting in settings:
        task = setting.task
        if (task.labels, task.parents, task.kind) != (first.labels, first.parents, first.kind):
            raise TrainingError(f"{task.name}, {setting.name}: other labels, parents or kind than {settings[0].name}.")
        if task.raw_memory:
            raise TrainingError(f"{setting.name}: imported memory (raw) cannot be trained further.")
