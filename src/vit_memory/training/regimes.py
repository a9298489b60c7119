"""Which sweep trains which regime, and the sweeps of the regimes that do not compose.

A new regime is one more line of SWEEPS, and a subclass of Sweep if no existing one fits.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_memory.backbone import Backbone
from vit_memory.choices import Part, Regime
from vit_memory.errors import TrainingError
from vit_memory.graph import TaskGraph
from vit_memory.regimes import COMPOSABLE
from vit_memory.task import Task
from vit_memory.training.branch_sweep import BranchSweep
from vit_memory.training.memory_sweep import MemorySweep
from vit_memory.training.objective import Objective
from vit_memory.training.recipe import Recipe
from vit_memory.training.sweep import Encoding, Setting, Stack, Sweep
from vit_memory.training.trunk_sweep import TrunkSweep
from vit_memory.trunk import run_originals
from vit_memory.unmasked import run_unmasked


class UnmaskedSweep(MemorySweep):
    """Settings whose cells every token reads: each needs its own backbone pass, with a graph through all of it."""

    def encode(self, images: Tensor) -> Tensor:
        """The images themselves: the first block already reads the cells of a setting."""
        return images

    def logits(self, encoding: Encoding) -> Tensor:
        """Outputs (T, B, C), one pass per setting."""
        assert isinstance(encoding, Tensor)
        dtype = self.backbone.dtype
        features = []
        for i, setting in enumerate(self.settings):
            token = self.tokens.values[i : i + 1].to(dtype)
            cells = self.cells.values[:, self.cell_rows[i] : self.cell_rows[i + 1]].to(dtype)
            _, read_out = run_unmasked(self.backbone.roles, encoding, token, cells, setting.task.regime)
            features.append(read_out[:, 0])
        return self.apply_heads(torch.stack(features))


class FullSweep(Sweep):
    """Settings that each train a whole backbone, and a head on its original class token."""

    def create_parameters(self) -> dict[str, Stack]:
        """A copy of the backbone's parameters and a head for every setting."""
        backbone = self.backbone
        if backbone.dtype != torch.float32:
            raise TrainingError(f"full fine-tuning needs float32 weights; {backbone.name} is {backbone.dtype}.")
        self._models = [copy.deepcopy(backbone.model).eval().requires_grad_(True) for _ in self.settings]
        self._roles = [backbone.family.roles(model) for model in self._models]
        stacks: dict[str, Stack] = {}
        for i, setting in enumerate(self.settings):
            parameters = dict(_used_parameters(backbone, self._models[i]))
            parameters["head"] = nn.Parameter(setting.task.head_weight.to(backbone.device, copy=True))
            parameters["bias"] = nn.Parameter(setting.task.head_bias.to(backbone.device, copy=True))
            for name, parameter in parameters.items():
                owner = torch.full((len(parameter),), i, device=backbone.device)
                part: Part | None = "head" if name in ("head", "bias") else None
                stacks[f"{i}.{name}"] = Stack.of(parameter, owner, 0, part)
        return stacks

    def encode(self, images: Tensor) -> Tensor:
        """The images themselves: every setting has its own backbone."""
        return images

    def logits(self, encoding: Encoding) -> Tensor:
        """Outputs (T, B, C), one pass per setting."""
        assert isinstance(encoding, Tensor)
        outputs = []
        for i, roles in enumerate(self._roles):
            head, bias = self.stacks[f"{i}.head"].values, self.stacks[f"{i}.bias"].values
            outputs.append(F.linear(run_originals(roles, encoding).feature, head, bias))
        return torch.stack(outputs)

    def tasks(self) -> list[Task]:
        """Heads, each with the identity of the backbone that was trained with it (`trained_backbone`)."""
        values = self.final_values()
        return [
            replace(
                setting.task,
                head_weight=values[f"{i}.head"].clone(),
                head_bias=values[f"{i}.bias"].clone(),
                backbone=self.trained_backbone(i).identity,
            )
            for i, setting in enumerate(self.settings)
        ]

    def trained_backbone(self, i: int) -> Backbone:
        """The backbone of setting i with its trained weights."""
        model = copy.deepcopy(self._models[i])
        values = self.final_values()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if f"{i}.{name}" in values:
                    parameter.copy_(values[f"{i}.{name}"])
        return Backbone(model.eval(), self.backbone.family, self.backbone.name, self.backbone.preprocessing)


SWEEPS: Mapping[Regime, type[Sweep]] = {
    "head": TrunkSweep,
    "class": TrunkSweep,
    "memory": TrunkSweep,
    "reader": TrunkSweep,
    "memory-unmasked": UnmaskedSweep,
    "propagated": UnmaskedSweep,
    "additive": UnmaskedSweep,
    "full": FullSweep,
}


def build_sweep(
    backbone: Backbone,
    settings: Sequence[Setting],
    parents: TaskGraph,
    recipe: Recipe,
    objective: Objective | None = None,
) -> Sweep:
    """The sweep that trains these settings. Raises TrainingError if their regimes cannot share one."""
    if not settings:
        raise TrainingError("no settings to train.")
    sweeps = {SWEEPS[setting.task.regime] for setting in settings}
    if any(setting.branch is not None for setting in settings) and sweeps == {TrunkSweep}:
        sweeps = {BranchSweep}
    if len(sweeps) > 1:
        regimes = ", ".join(sorted({setting.task.regime for setting in settings}))
        raise TrainingError(
            f"the regimes {regimes} cannot be trained at once: only {', '.join(sorted(COMPOSABLE))} share one pass. "
            f"Train the others in runs of their own."
        )
    return sweeps.pop()(backbone, settings, parents, recipe, objective)


def _used_parameters(backbone: Backbone, model: nn.Module) -> Sequence[tuple[str, nn.Parameter]]:
    """The parameters that the class token's output depends on: not those of the original head or a pooler."""
    roles = backbone.family.roles(model)
    image = torch.zeros(1, roles.channels, *roles.image_size, device=backbone.device)
    run_originals(roles, image).feature.sum().backward()
    used = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return used
