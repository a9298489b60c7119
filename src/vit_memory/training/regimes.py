"""The regimes: what each trains, whether its tasks can stand beside others, and how its settings see images.

A new regime is one more line of REGIMES, and a Sweep if no other's will do.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_memory.backbone import Backbone
from vit_memory.errors import TrainingError
from vit_memory.graph import TaskGraph
from vit_memory.task import COMPOSABLE, Regime, Task
from vit_memory.training.masked import MaskedSweep
from vit_memory.training.objective import Objective
from vit_memory.training.recipe import Recipe
from vit_memory.training.sweep import MemorySweep, Seen, Setting, Stack, Sweep
from vit_memory.trunk import run_originals
from vit_memory.unmasked import run_unmasked

Build = Callable[[Backbone, Sequence[Setting], TaskGraph, Recipe, Objective | None], Sweep]


class UnmaskedSweep(MemorySweep):
    """Settings whose cells every token reads: each needs a pass of its own, and a graph through all of it."""

    def __init__(
        self,
        backbone: Backbone,
        settings: Sequence[Setting],
        parents: TaskGraph,
        recipe: Recipe,
        objective: Objective | None = None,
    ) -> None:
        _refuse_parents(settings, parents)
        super().__init__(backbone, settings, recipe, objective)

    def look(self, images: Tensor) -> Tensor:
        """The images: nothing can be computed before a setting's own cells take part."""
        return images

    def logits(self, seen: Seen) -> Tensor:
        """Answers (T, B, C), one pass per setting."""
        assert isinstance(seen, Tensor)
        dtype = self.backbone.dtype
        features = []
        for at, setting in enumerate(self.settings):
            token = self.tokens.values[at : at + 1].to(dtype)
            cells = self.cells.values[:, self.cell_rows[at] : self.cell_rows[at + 1]].to(dtype)
            _, read_out = run_unmasked(self.backbone.roles, seen, token, cells, setting.task.regime)
            features.append(read_out[:, 0])
        return self.answers(torch.stack(features))


class FullSweep(Sweep):
    """Settings that train a whole backbone each, and a head on its original class token."""

    def __init__(
        self,
        backbone: Backbone,
        settings: Sequence[Setting],
        parents: TaskGraph,
        recipe: Recipe,
        objective: Objective | None = None,
    ) -> None:
        _refuse_parents(settings, parents)
        super().__init__(backbone, settings, recipe, objective)
        if backbone.dtype != torch.float32:
            raise TrainingError(f"full fine-tuning needs float32 weights; {backbone.name} is {backbone.dtype}.")
        self._models = [_trainable_copy(backbone) for _ in settings]
        self._roles = [backbone.family.roles(model) for model in self._models]
        for i, setting in enumerate(settings):
            learned = dict(_used(backbone, self._models[i]))
            learned["head"] = nn.Parameter(setting.task.head_weight.to(backbone.device, copy=True))
            learned["bias"] = nn.Parameter(setting.task.head_bias.to(backbone.device, copy=True))
            for name, parameter in learned.items():
                owner = torch.full((len(parameter),), i, device=backbone.device)
                self.stacks[f"{i}.{name}"] = Stack.of(parameter, owner, 0)

    def look(self, images: Tensor) -> Tensor:
        """The images: every setting has a backbone of its own."""
        return images

    def logits(self, seen: Seen) -> Tensor:
        """Answers (T, B, C), one pass per setting."""
        assert isinstance(seen, Tensor)
        answers = []
        for i, roles in enumerate(self._roles):
            head, bias = self.stacks[f"{i}.head"].values, self.stacks[f"{i}.bias"].values
            answers.append(F.linear(run_originals(roles, seen).feature, head, bias))
        return torch.stack(answers)

    def tasks(self) -> list[Task]:
        """Heads, each naming the backbone that was trained with it; see `weights`."""
        trained = []
        ended = self.ended()
        for i, setting in enumerate(self.settings):
            tuned = self.backbone_of(i)
            trained.append(
                replace(
                    setting.task,
                    head_weight=ended[f"{i}.head"].clone(),
                    head_bias=ended[f"{i}.bias"].clone(),
                    backbone=tuned.identity,
                )
            )
        return trained

    def backbone_of(self, i: int) -> Backbone:
        """The backbone that setting i ended with."""
        model = copy.deepcopy(self._models[i])
        ended = self.ended()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if f"{i}.{name}" in ended:
                    parameter.copy_(ended[f"{i}.{name}"])
        return Backbone(model.eval(), self.backbone.family, self.backbone.name, self.backbone.preprocessing)


@dataclass(frozen=True, slots=True)
class RegimeFacts:
    """What there is to know about a regime before training with it."""

    trains: str
    composes: bool  # its tasks stand beside others, and are trained beside others on one pass
    stored: bool  # it can train from stored trunks
    sweep: Build


_MASKED: Build = MaskedSweep
REGIMES: Mapping[Regime, RegimeFacts] = {
    "head": RegimeFacts("a head on the original output", True, True, _MASKED),
    "class": RegimeFacts("a class token and a head", True, True, _MASKED),
    "memory": RegimeFacts("a class token, cells that only it reads, and a head", True, True, _MASKED),
    "memory-unmasked": RegimeFacts("the same, with cells that every token reads", False, False, UnmaskedSweep),
    "propagated": RegimeFacts("the same, cells entering once and handed on", False, False, UnmaskedSweep),
    "additive": RegimeFacts("the same, handed on with an update per block", False, False, UnmaskedSweep),
    "full": RegimeFacts("the whole backbone and a head", False, False, FullSweep),
}


def sweep_of(
    backbone: Backbone,
    settings: Sequence[Setting],
    parents: TaskGraph,
    recipe: Recipe,
    objective: Objective | None = None,
) -> Sweep:
    """The sweep that trains these settings; regimes that see images differently cannot share one."""
    if not settings:
        raise TrainingError("no settings to train.")
    builds = {REGIMES[setting.task.regime].sweep for setting in settings}
    if len(builds) > 1:
        regimes = ", ".join(sorted({setting.task.regime for setting in settings}))
        raise TrainingError(
            f"the regimes {regimes} cannot be trained at once: only {', '.join(sorted(COMPOSABLE))} share one pass. "
            f"Train the others in runs of their own."
        )
    return builds.pop()(backbone, settings, parents, recipe, objective)


def _refuse_parents(settings: Sequence[Setting], parents: TaskGraph) -> None:
    extending = parents or any(setting.task.parents for setting in settings)
    if extending:
        raise TrainingError(f"{settings[0].name}: only {', '.join(sorted(COMPOSABLE))} tasks can extend others.")


def _trainable_copy(backbone: Backbone) -> nn.Module:
    model = copy.deepcopy(backbone.model).eval()
    return model.requires_grad_(True)


def _used(backbone: Backbone, model: nn.Module) -> Sequence[tuple[str, nn.Parameter]]:
    """The parameters that a class token's answer depends on: not the original head, nor a pooler."""
    roles = backbone.family.roles(model)
    image = torch.zeros(1, roles.channels, *roles.image_size, device=backbone.device)
    run_originals(roles, image).feature.sum().backward()
    used = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return used
