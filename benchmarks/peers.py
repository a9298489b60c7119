"""The peers of a learned reader, trained on the same batches: peft's LoRA and full fine-tuning.

Both change what the backbone computes, so each task needs a pass of its own. A head reads the final class token, as in
peft's examples for image classification. Batches, views, validation images and the schedule are those of `fit` with the
same recipe; the weights with the best validation accuracy are kept.
"""

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_memory import Backbone, Recipe
from vit_memory.data.loading import Loader
from vit_memory.data.splits import Split
from vit_memory.data.transforms import EvalTransform, TrainTransform
from vit_memory.training.batch_plan import plan_batches
from vit_memory.training.ranks import Ranks

LORA_RANK, LORA_ALPHA = 8, 16
RATES = {"LoRA": (1e-3, 3e-3, 1e-2), "full": (1e-5, 3e-5, 1e-4)}


@dataclass(frozen=True)
class PeerResult:
    """One training of a peer."""

    rate: float
    curve: list[tuple[int, float]]  # step, validation accuracy
    model: nn.Module  # with the weights of its best evaluation
    parameters: int

    @property
    def best(self) -> tuple[float, int]:
        """The best validation accuracy, and its step: the earliest of equals."""
        accuracy = max(value for _, value in self.curve)
        return accuracy, next(step for step, value in self.curve if value == accuracy)


class WithHead(nn.Module):
    """A library's ViT with a linear head on its final class token."""

    def __init__(self, vit: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.vit, self.head = vit, nn.Linear(width, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, C)."""
        logits: Tensor = self.head(self.vit(pixel_values=images).last_hidden_state[:, 0])
        return logits


def peer(method: str, backbone: Backbone, classes: int) -> WithHead:
    """An untrained peer on a copy of the backbone's weights."""
    vit = copy.deepcopy(backbone.model).requires_grad_(True)
    if method == "LoRA":
        from peft import LoraConfig, get_peft_model

        names = [name for name, _ in vit.named_modules()]
        targets = ["q_proj", "v_proj"] if any(name.endswith("q_proj") for name in names) else ["query", "value"]
        vit = get_peft_model(vit, LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=targets))  # type: ignore[arg-type]
    return WithHead(vit.eval(), backbone.width, classes)


def train_peer(
    method: str,
    backbone: Backbone,
    train: Split,
    validation: Split,
    classes: int,
    recipe: Recipe,
    size: int,
    rate: float,
    step_ends: list[float] | None = None,
) -> PeerResult:
    """Train one peer with one learning rate (AdamW), and keep the weights of its best evaluation.

    `step_ends` receives the time at the end of every step.
    """
    torch.manual_seed(recipe.seed)  # LoRA's random half
    model = peer(method, backbone, classes)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    assert backbone.preprocessing is not None
    transform = TrainTransform(
        backbone.preprocessing.at(size), augment=recipe.augment, flip=recipe.flip, area=recipe.area
    )
    loader = Loader(train, transform, 64)
    plan = list(plan_batches(len(train), recipe, 0, Ranks()))
    curve: list[tuple[int, float]] = []
    best: tuple[float, dict[str, Tensor]] = (-math.inf, {})
    for step, batch in enumerate(loader.planned(plan, recipe.seed)):
        for group in optimiser.param_groups:
            group["lr"] = rate * recipe.lr_factor(step)
        optimiser.zero_grad()
        F.cross_entropy(model(batch.images), batch.targets).backward()
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(trained, recipe.clip)
        optimiser.step()
        if step_ends is not None:
            step_ends.append(time.perf_counter())
        if (step + 1) % recipe.evaluate_every == 0 or step + 1 == recipe.steps:
            accuracy = float(correct(model, backbone, validation, size).float().mean())
            curve.append((step + 1, accuracy))
            if accuracy > best[0]:
                kept = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
                best = (accuracy, kept)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in best[1]:
                parameter.copy_(best[1][name])
    return PeerResult(rate, curve, model, sum(parameter.numel() for parameter in trained))


@torch.no_grad()
def correct(model: nn.Module, backbone: Backbone, split: Split, size: int) -> Tensor:
    """(n,) bool: whether the model is right about each image."""
    assert backbone.preprocessing is not None
    loader = Loader(split, EvalTransform(backbone.preprocessing.at(size)), 64)
    right = [model(batch.images).argmax(-1) == batch.targets for batch in loader.batches()]
    return torch.cat(right)


def best_of(results: Sequence[PeerResult]) -> PeerResult:
    """By validation accuracy; of equals the one that reached it first."""
    return max(results, key=lambda result: (result.best[0], -result.best[1]))
