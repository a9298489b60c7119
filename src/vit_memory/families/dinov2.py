"""transformers' DINOv2, without and with registers: layer scale, any image size, a head on class token and patches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vit_memory.families.roles import Roles
from vit_memory.families.tiny import SIZES, randomised
from vit_memory.families.transformers_layout import (
    BlockLayout,
    TransformersFamily,
    fields_of,
    find,
    optional,
)
from vit_memory.outputs import Original

_LAYOUT = BlockLayout(norm1="norm1", norm2="norm2", scale1="layer_scale1", scale2="layer_scale2")


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """The library's own embeddings, which resample positions by themselves."""

    embeddings: nn.Module

    def __call__(self, images: Tensor) -> tuple[Tensor, None]:
        """Original tokens (B, N, D), positions included."""
        return self.embeddings(images), None


@dataclass(frozen=True, slots=True, eq=False)
class ClassAndPatches:
    """Norm; where there is a classifier, it reads the class token beside the mean of the patches."""

    norm: nn.Module
    classifier: nn.Module | None
    prefix: int

    def __call__(self, tokens: Tensor) -> Original:
        """Last block's output (B, N, D) to what the library returns."""
        tokens = self.norm(tokens)
        first = tokens[:, 0, :]
        if self.classifier is None:
            return Original(tokens=tokens, feature=first, pooled=first)
        both = torch.cat([tokens[:, 0], tokens[:, self.prefix :].mean(dim=1)], dim=1)
        return Original(tokens=tokens, feature=first, pooled=first, logits=self.classifier(both))


@dataclass(frozen=True, slots=True)
class DINOv2(TransformersFamily):
    """Both, told apart by their register tokens."""

    def roles(self, model: nn.Module) -> Roles:
        """Where the parts are."""
        core = self.core(model)
        embeddings: Any = core.embeddings
        registers = optional(embeddings, "register_tokens")
        prefix = ("class", *("register",) * (0 if registers is None else registers.shape[1]))
        return self.roles_of(
            core,
            prefix=prefix,
            embed=Embeddings(embeddings),
            finish=ClassAndPatches(find(core, self.norm), optional(model, "classifier"), len(prefix)),
            stem={
                "patches": embeddings.patch_embeddings.projection,
                "class": embeddings.cls_token,
                "extra": registers,
                "positions": embeddings.position_embeddings,
            },
            class_token=embeddings.cls_token,
            class_position=embeddings.position_embeddings[:, 0].detach(),
        )

    def library_forward(self, model: nn.Module, images: Tensor) -> Mapping[str, Tensor]:
        """The library's own forward, which our passes must equal."""
        return fields_of(model(pixel_values=images))

    def tiny_models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Small random models."""
        from transformers import (
            Dinov2Config,
            Dinov2ForImageClassification,
            Dinov2Model,
            Dinov2WithRegistersConfig,
            Dinov2WithRegistersForImageClassification,
        )

        sizes = {**SIZES, "mlp_ratio": 2, "num_labels": 7}
        del sizes["intermediate_size"]  # told by the ratio
        swiglu = Dinov2Config(**sizes, use_swiglu_ffn=True)
        registers = Dinov2WithRegistersConfig(**sizes, num_register_tokens=3)
        return {
            "dinov2": lambda: randomised(Dinov2ForImageClassification(Dinov2Config(**sizes))),
            "dinov2:swiglu": lambda: randomised(Dinov2Model(swiglu)),
            "dinov2-with-registers": lambda: randomised(Dinov2WithRegistersForImageClassification(registers)),
        }


_PACKAGES = ("dinov2", "dinov2_with_registers")  # also the names under which models with a head keep the ViT
FAMILY = DINOv2(name="dinov2", packages=_PACKAGES, cores=_PACKAGES, layout=_LAYOUT)
