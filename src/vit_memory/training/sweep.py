"""Many settings trained at once, each as if it were alone: their parameters and their optimiser.

The loss is the sum over settings, so each setting gets its own gradient. Clipping, schedule and optimiser state are
per setting, and a setting that diverges is stopped while the others continue. The forward passes are in
`trunk_sweep.py` and `regimes.py`.

Shape letters: B batch, T settings, C classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.branch import Branch
from vit_memory.choices import Part
from vit_memory.errors import TrainingError
from vit_memory.graph import TaskGraph
from vit_memory.regimes import COMPOSABLE
from vit_memory.task import Task
from vit_memory.training.objective import Objective, SingleLabel
from vit_memory.training.recipe import Recipe
from vit_memory.training.row_formats import RowFormat
from vit_memory.training.trunk_shape import TrunkShape
from vit_memory.trunk import BranchInputs, Trunk

_ADAM = (0.9, 0.999, 1e-8)
# What settings read: the trunk of a batch, where branches in training start, or the images themselves.
Encoding = Trunk | BranchInputs | Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One point of a sweep: a task, a learning rate and a weight decay."""

    task: Task  # before training
    learning_rate: float
    weight_decay: float = 0.0
    branch: Branch | None = None  # that is trained with the task, before training

    @property
    def method(self) -> str:
        """What it learns besides a head, for tables."""
        return self.task.method if self.branch is None else f"{self.task.method} on {self.branch.method}"

    @property
    def parameters(self) -> int:
        """How many parameters it trains."""
        return self.task.parameters + (0 if self.branch is None else self.branch.parameters)

    @property
    def name(self) -> str:
        """Its name in tables and messages."""
        task = self.task
        decay = f", decay {self.weight_decay:g}" if self.weight_decay else ""
        record = task.record.recipe
        start = ", random token" if record.get("start") == "normal" and task.class_token is not None else ""
        seed = f", seed {record['task_seed']}" if record.get("task_seed") else ""
        return f"{self.method}, rate {self.learning_rate:g}{decay}{start}{seed}"


@dataclass(slots=True, eq=False)
class Stack:
    """One parameter of many settings, stacked along `axis`."""

    values: Tensor  # requires grad
    owner: Tensor  # (rows,) int64: the setting that each row along `axis` belongs to
    axis: int
    part: Part | None  # decides its factor on the learning rate; None: a backbone's weight
    exp_avg: Tensor  # optimiser state: SGD's momentum buffer, or AdamW's mean of gradients
    exp_avg_sq: Tensor  # AdamW's mean of squared gradients
    best: Tensor | None = None  # the values of each setting's best evaluation, if they are kept

    @classmethod
    def of(cls, values: Tensor, owner: Tensor, axis: int, part: Part | None) -> "Stack":
        """With empty optimiser state."""
        return cls(values, owner, axis, part, torch.zeros_like(values), torch.zeros_like(values))

    def rows(self, per_setting: Tensor) -> Tensor:
        """(T,) reshaped and repeated so that it multiplies `values`."""
        shape = [1] * self.values.dim()
        shape[self.axis] = -1
        return per_setting[self.owner].view(shape)

    def squared_norms(self, gradient: Tensor, settings: int) -> Tensor:
        """(T,): the squared norm of each setting's gradient."""
        others = [axis for axis in range(gradient.dim()) if axis != self.axis]
        per_row = gradient.square().sum(others) if others else gradient.square()
        return per_row.new_zeros(settings).index_add_(0, self.owner, per_row)


class Sweep(ABC):
    """T settings with the same labels: their parameters and optimiser state. Subclasses define the forward pass."""

    def __init__(
        self,
        backbone: Backbone,
        settings: Sequence[Setting],
        parents: TaskGraph,
        recipe: Recipe,
        objective: Objective | None = None,
    ) -> None:
        """`parents` holds the tasks that the settings extend, and the frozen branches that they stand on."""
        check_alike(settings)
        self.backbone, self.settings, self.parents, self.recipe = backbone, tuple(settings), parents, recipe
        if objective is None and settings[0].task.kind != "single-label":
            raise TrainingError(f"{settings[0].task.name}: a {settings[0].task.kind} task needs an objective.")
        self.objective = objective or SingleLabel(len(settings[0].task.labels), recipe.label_smoothing)
        device = backbone.device
        self.alive = torch.ones(len(settings), dtype=torch.bool, device=device)
        self._rates = torch.tensor([setting.learning_rate for setting in settings], device=device)
        self._decays = torch.tensor([setting.weight_decay for setting in settings], device=device)
        self.check_parents()
        self.stacks = self.create_parameters()

    def check_parents(self) -> None:
        """Raise TrainingError if the settings cannot extend the parents. By default they cannot extend any task."""
        if self.parents or any(setting.task.parents for setting in self.settings):
            raise TrainingError(
                f"{self.settings[0].name}: only {', '.join(sorted(COMPOSABLE))} tasks can extend others."
            )

    def stored_rows(self, image_size: tuple[int, int]) -> RowFormat | None:
        """What a store keeps of images of that size; None if `encode` gives nothing that can be kept."""
        return None

    def live_chunk(self, shape: TrunkShape, threads: int) -> int:
        """How many images each thread computes at a time, from pixels."""
        return shape.live_chunk(self.backbone.dtype, threads)

    def stored_chunk(self, shape: TrunkShape, threads: int) -> int:
        """How many images each thread computes at a time, from a store."""
        return shape.stored_chunk(self.backbone.dtype, threads, len(self.settings))

    @abstractmethod
    def create_parameters(self) -> dict[str, Stack]:
        """The trained tensors of all settings, by name."""

    @abstractmethod
    def encode(self, images: Tensor) -> Encoding:
        """The frozen part of the forward pass: computed once for all settings, without a graph."""

    @abstractmethod
    def logits(self, encoding: Encoding) -> Tensor:
        """Outputs (T, B, C) of every setting, with a graph to the leaves."""

    @abstractmethod
    def tasks(self) -> list[Task]:
        """Every setting's task with its current weights (its best ones if they are kept), on the CPU."""

    def branches(self) -> Sequence[Branch | None]:
        """The branches that were trained with the tasks, in the same way."""
        return [None] * len(self.settings)

    def leaves(self) -> list[Tensor]:
        """The tensors that the gradients of a batch are taken for. Call it once before threads compute the batch."""
        return [stack.values for stack in self.stacks.values()]

    def backward(self, encoding: Encoding, targets: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """The losses (T,) of some images, summed over them, and their gradients for every leaf.

        Nothing is accumulated, so several threads may each compute a chunk of a batch; `accumulate` adds them up.
        """
        losses = self.objective.losses(self.logits(encoding), targets)
        # A stopped setting may be NaN: it is left out of the sum, so that the others keep their own gradients.
        gradients = torch.autograd.grad(losses[self.alive].sum(), self.leaves(), allow_unused=True)
        return losses.detach(), list(gradients)

    def accumulate(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of a chunk, in the order of the leaves."""
        for leaf, gradient in zip(self.leaves(), gradients, strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient

    def gradients(self) -> list[Tensor]:
        """The accumulated gradients, one per stack."""
        for stack in self.stacks.values():
            if stack.values.grad is None:
                stack.values.grad = torch.zeros_like(stack.values)
        return [stack.values.grad for stack in self.stacks.values() if stack.values.grad is not None]

    @torch.no_grad()
    def step(self, number: int, losses: Tensor, count: float = 1.0) -> list[int]:
        """One optimiser step of every setting that is alive; returns those that diverged in this step and are stopped.

        Gradients and losses are sums over `count` images.
        """
        T = len(self.settings)
        gradients = self.gradients()
        squares = [stack.squared_norms(g, T) for stack, g in zip(self.stacks.values(), gradients, strict=True)]
        norms = torch.stack(squares).sum(0).sqrt() / count
        fine = norms.isfinite() & losses.isfinite()
        diverged = (self.alive & ~fine).nonzero().flatten().tolist()
        self.alive &= fine
        clip_coefficients = torch.ones_like(norms)
        if self.recipe.clip is not None:
            clip_coefficients = (self.recipe.clip / (norms + 1e-6)).clamp(max=1)
        rates = self._rates * self.recipe.lr_factor(number)
        for stack, gradient in zip(self.stacks.values(), gradients, strict=True):
            alive = stack.rows(self.alive)
            # A stopped setting's gradient may be NaN, and NaN times zero is NaN: choose, do not multiply.
            gradient = torch.where(alive, gradient * stack.rows(clip_coefficients / count), 0.0)  # noqa: PLW2901
            rate = torch.where(alive, stack.rows(rates * self.recipe.rate_factor(stack.part)), 0.0)
            decay = stack.rows(self._decays)
            if self.recipe.optimiser == "sgd":
                stack.exp_avg.mul_(self.recipe.momentum).add_(gradient + decay * stack.values)
                stack.values.sub_(rate * stack.exp_avg)
            else:
                b1, b2, eps = _ADAM
                stack.exp_avg.lerp_(gradient, 1 - b1)
                stack.exp_avg_sq.lerp_(gradient.square(), 1 - b2)
                size = stack.exp_avg / (1 - b1 ** (number + 1))
                spread = (stack.exp_avg_sq / (1 - b2 ** (number + 1))).sqrt() + eps
                stack.values.mul_(1 - rate * decay).sub_(rate * size / spread)
            stack.values.grad = None
        return diverged

    @torch.no_grad()
    def keep_best(self, improved: Tensor) -> None:
        """Copy the current values of the settings that improved, (T,) bool: they are the ones that `tasks` returns."""
        for stack in self.stacks.values():
            if stack.best is None:
                stack.best = stack.values.detach().clone()
            stack.best = torch.where(stack.rows(improved.to(stack.values.device)), stack.values, stack.best)

    def final_values(self) -> dict[str, Tensor]:
        """The values of every stack on the CPU: the best ones if they are kept, else the current ones."""
        return {
            name: (stack.values.detach() if stack.best is None else stack.best).cpu()
            for name, stack in self.stacks.items()
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that later steps depend on, by name. The names are part of the checkpoint format."""
        state: dict[str, Tensor] = {}
        for name, stack in self.stacks.items():
            state |= {name: stack.values, f"{name}.first": stack.exp_avg}
            if self.recipe.optimiser == "adamw":
                state[f"{name}.second"] = stack.exp_avg_sq
            if stack.best is not None:
                state[f"{name}.kept"] = stack.best
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor], stopped: Iterable[int]) -> None:
        """Restore the state of a sweep of the same settings, of which some were stopped."""
        if any(name.endswith(".kept") for name in state):
            self.keep_best(self.alive)
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])  # into the existing tensors: those of a file are unaligned and round differently
        self.alive[list(stopped)] = False


def check_alike(settings: Sequence[Setting]) -> None:
    """Raise TrainingError unless the settings have the same labels, parents and kind, so that scores are comparable."""
    if not settings:
        raise TrainingError("no settings to train.")
    first = settings[0].task
    for setting in settings:
        task = setting.task
        if (task.labels, task.parents, task.kind) != (first.labels, first.parents, first.kind):
            raise TrainingError(f"{task.name}, {setting.name}: other labels, parents or kind than {settings[0].name}.")
        if task.raw_memory:
            raise TrainingError(f"{setting.name}: imported memory (raw) cannot be trained further.")
