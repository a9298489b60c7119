"""LoRA, by peft: the peer that changes the whole backbone, so that every task needs a pass of its own.

A head reads the final class token, as in peft's examples for image classification. Batches, views, validation images
and the schedule are those of `fit` with the same recipe; the weights of the best evaluation are kept.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_memory.backbone import Backbone
from vit_memory.choices import Projection
from vit_memory.data.loading import Loader
from vit_memory.data.splits import Split
from vit_memory.data.transforms import EvalTransform, TrainTransform
from vit_memory.errors import VitMemoryError
from vit_memory.families.roles import projections_of
from vit_memory.preprocessing import Preprocessing
from vit_memory.training.batch_plan import plan_batches
from vit_memory.training.ranks import Ranks
from vit_memory.training.recipe import Recipe
from vit_memory.trunk import run_originals

RANK, ALPHA = 8, 16
PROJECTIONS: tuple[Projection, ...] = ("q", "v")
_LOADER_BATCH = 64


class LoraModel(nn.Module):
    """A library's ViT with peft's updates, and a linear head on its final class token."""

    def __init__(self, backbone: Backbone, classes: int) -> None:
        super().__init__()
        try:
            from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise VitMemoryError("LoRA needs peft: pip install 'vit-memory[peft]'") from error
        vit = copy.deepcopy(backbone.model)
        names = {module: name for name, module in backbone.model.named_modules()}
        targets = {names[projections_of(b)[p].module] for b in backbone.roles.blocks for p in PROJECTIONS}
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=sorted(targets))
        adapted: Any = get_peft_model(vit, config)
        self.vit: nn.Module = adapted.base_model.model.eval()
        self._roles = backbone.family.roles(self.vit)  # peft's modules in the places of the library's
        self.head = nn.Linear(backbone.width, classes, device=backbone.device)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)  # as the heads of all other methods start

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, C)."""
        logits: Tensor = self.head(run_originals(self._roles, images).feature.float())
        return logits


@dataclass(frozen=True, slots=True, eq=False)
class LoraResult:
    """One training."""

    rate: float
    curve: list[tuple[int, float]]  # step, validation accuracy
    model: LoraModel  # with the weights of its best evaluation
    parameters: int

    @property
    def score(self) -> float:
        """The best validation accuracy."""
        return max(value for _, value in self.curve)


def train_lora(
    backbone: Backbone,
    train: Split,
    validation: Split,
    classes: int,
    recipe: Recipe,
    preprocessing: Preprocessing,
    rate: float,
    on_step: Callable[[int], None] = lambda step: None,
) -> LoraResult:
    """Train with one learning rate (AdamW), and keep the weights of the best evaluation."""
    torch.manual_seed(recipe.seed)  # peft draws its random half from the global generator
    model = LoraModel(backbone, classes)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    transform = TrainTransform(preprocessing, augment=recipe.augment, flip=recipe.flip, area=recipe.area)
    loader = Loader(train, transform, _LOADER_BATCH)
    curve: list[tuple[int, float]] = []
    best: tuple[float, dict[str, Tensor]] = (-math.inf, {})
    for step, batch in enumerate(loader.planned(list(plan_batches(len(train), recipe, 0, Ranks())), recipe.seed)):
        for group in optimiser.param_groups:
            group["lr"] = rate * recipe.lr_factor(step)
        optimiser.zero_grad()
        images = batch.images.to(backbone.device, backbone.dtype)
        F.cross_entropy(model(images), batch.targets.to(backbone.device)).backward()
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(trained, recipe.clip)
        optimiser.step()
        on_step(step + 1)
        if (step + 1) % recipe.evaluate_every == 0 or step + 1 == recipe.steps:
            accuracy = float(correct(model, validation, preprocessing, backbone).float().mean())
            curve.append((step + 1, accuracy))
            if accuracy > best[0]:
                kept = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
                best = (accuracy, kept)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in best[1]:
                parameter.copy_(best[1][name])
    return LoraResult(rate, curve, model, sum(parameter.numel() for parameter in trained))


@torch.no_grad()
def correct(model: nn.Module, split: Split, preprocessing: Preprocessing, backbone: Backbone) -> Tensor:
    """(n,) bool: whether the model is right about each image. `backbone` says where and in what precision it is."""
    batches = Loader(split, EvalTransform(preprocessing), _LOADER_BATCH).batches()
    answers = ((model(b.images.to(backbone.device, backbone.dtype)).argmax(-1).cpu(), b.targets) for b in batches)
    return torch.cat([answer == targets for answer, targets in answers])
