"""transformers' CLIP vision tower: a norm before the first block, the last norm on the class token alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vit_memory.families.roles import Roles
from vit_memory.families.tiny import SIZES, randomised
from vit_memory.families.transformers_layout import (
    BlockLayout,
    TransformersFamily,
    find,
    forward_at_any_size,
    optional,
    pair,
)
from vit_memory.outputs import Original

_LAYOUT = BlockLayout(
    norm1="layer_norm1",
    norm2="layer_norm2",
    attention="self_attn",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    project="self_attn.out_proj|self_attn.o_proj",
)


@dataclass(frozen=True, slots=True, eq=False)
class EmbedThenNorm:
    """The library's own embeddings and the norm after them."""

    embeddings: nn.Module
    norm: nn.Module
    image_size: tuple[int, int]

    def __call__(self, images: Tensor) -> tuple[Tensor, None]:
        """Original tokens (B, N, D) as they enter the first block."""
        other_size = tuple(images.shape[-2:]) != self.image_size
        return self.norm(self.embeddings(images, interpolate_pos_encoding=other_size)), None


@dataclass(frozen=True, slots=True, eq=False)
class TowerEnding:
    """Norm on the class token; then nothing, the projection to the joint space, or a classifier on the patches."""

    norm: nn.Module
    projection: nn.Module | None
    classifier: nn.Module | None

    def __call__(self, tokens: Tensor) -> Original:
        """Last block's output (B, N, D) to what the library returns."""
        feature = self.norm(tokens[:, 0, :])
        return Original(
            tokens=tokens,
            feature=feature,
            pooled=feature if self.projection is None else self.projection(feature),
            logits=None if self.classifier is None else self.classifier(torch.mean(tokens[:, 1:, :], dim=1)),
        )


@dataclass(frozen=True, slots=True)
class VisionTower(TransformersFamily):
    """The vision half of a model of images and texts; a whole one is accepted and its text half ignored."""

    cores: tuple[str, ...] = ("vision_model", "vision_model.vision_model")
    layout: BlockLayout = _LAYOUT
    layers: str = "encoder.layers"
    norm: str = "post_layernorm"

    def accepts(self, model: nn.Module) -> bool:
        """By class; a text tower is none."""
        return TransformersFamily.accepts(self, model) and "Text" not in type(model).__name__

    def library_forward(self, model: nn.Module, images: Tensor) -> Mapping[str, Tensor]:
        """The library's own forward; of a whole model, its vision tower."""
        core = self.core(model)
        whole = optional(model, "text_model") is not None
        return forward_at_any_size(core if whole else model, images, pair(core.config.image_size))


@dataclass(frozen=True, slots=True)
class CLIPVision(VisionTower):
    """CLIP's."""

    def roles(self, model: nn.Module) -> Roles:
        """Where the parts are."""
        core = self.core(model)
        embeddings: Any = core.embeddings
        pre_norm, norm = find(core, "pre_layrnorm"), find(core, self.norm)
        roles = self.roles_of(
            core,
            prefix=("class",),
            embed=EmbedThenNorm(embeddings, pre_norm, pair(core.config.image_size)),
            finish=TowerEnding(norm, optional(model, "visual_projection"), optional(model, "classifier")),
            stem={
                "patches": embeddings.patch_embedding,
                "class": embeddings.class_embedding,
                "positions": embeddings.position_embedding,
                "pre_norm": pre_norm,
            },
            class_token=embeddings.class_embedding,
            class_position=embeddings.position_embedding.weight[0].detach(),
        )
        return replace(roles, pre_norm=pre_norm)

    def tiny_models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Small random models."""
        from transformers import (
            CLIPConfig,
            CLIPForImageClassification,
            CLIPVisionConfig,
            CLIPVisionModel,
            CLIPVisionModelWithProjection,
        )

        vision = CLIPVisionConfig(**SIZES, projection_dim=16)
        whole = CLIPConfig(vision_config=vision.to_dict(), num_labels=7)
        return {
            "clip-vision": lambda: randomised(CLIPVisionModel(vision)),
            "clip-vision:projection": lambda: randomised(CLIPVisionModelWithProjection(vision)),
            "clip-vision:classifier": lambda: randomised(CLIPForImageClassification(whole)),
        }


FAMILY = CLIPVision(name="clip-vision", packages=("clip",))
