"""transformers' CLIP vision tower: a norm before the first block, the last norm on the class token alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vit_memory.families.roles import Original, Preprocessing, Roles
from vit_memory.families.tiny import randomised
from vit_memory.families.transformers_layout import (
    AtLeastOnePatch,
    BlockLayout,
    core_of,
    find,
    forward_at_any_size,
    library_classes,
    optional,
    pair,
    preprocessing_of,
)

TOWER_LAYOUT = BlockLayout(
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
class CLIPVision:
    """The vision half; a whole CLIP is accepted and its text half ignored."""

    name: str = "clip-vision"
    library: str = "transformers"
    cores: tuple[str, ...] = ("vision_model", "vision_model.vision_model")

    def accepts(self, model: nn.Module) -> bool:
        """By class; a text tower is none."""
        return library_classes(model, "clip") and "Text" not in type(model).__name__

    def roles(self, model: nn.Module) -> Roles:
        """Where the parts are."""
        core = core_of(model, *self.cores)
        config: Any = core.config
        embeddings: Any = core.embeddings
        image_size, patch_size = pair(config.image_size), pair(config.patch_size)
        pre_norm, norm = find(core, "pre_layrnorm"), find(core, "post_layernorm")
        return Roles(
            width=config.hidden_size,
            heads=config.num_attention_heads,
            channels=config.num_channels,
            patch_size=patch_size,
            image_size=image_size,
            prefix=("class",),
            embed=EmbedThenNorm(embeddings, pre_norm, image_size),
            pre_norm=pre_norm,
            blocks=tuple(TOWER_LAYOUT.block(layer) for layer in find(core, "encoder.layers")),
            rotate=None,
            final_norm=norm,
            finish=TowerEnding(norm, optional(model, "visual_projection"), optional(model, "classifier")),
            check_size=AtLeastOnePatch(patch_size),
            stem={
                "patches": embeddings.patch_embedding,
                "class": embeddings.class_embedding,
                "positions": embeddings.position_embedding,
                "pre_norm": pre_norm,
            },
            class_token=embeddings.class_embedding,
            class_position=embeddings.position_embedding.weight[0],
        )

    def preprocessing(self, model: nn.Module) -> Preprocessing | None:
        """From the processor beside the weights."""
        return preprocessing_of(model)

    def library_forward(self, model: nn.Module, images: Tensor) -> Mapping[str, Tensor]:
        """The judge; of a whole CLIP, its vision tower."""
        whole = optional(model, "text_model") is not None
        judged = core_of(model, *self.cores) if whole else model
        return forward_at_any_size(judged, images, self.roles(model).image_size)

    def tiny_models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Small random models."""
        from transformers import (
            CLIPConfig,
            CLIPForImageClassification,
            CLIPVisionConfig,
            CLIPVisionModel,
            CLIPVisionModelWithProjection,
        )

        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
            "projection_dim": 16,
        }
        vision = CLIPVisionConfig(**sizes)
        whole = CLIPConfig(vision_config=vision.to_dict(), num_labels=7)
        return {
            "clip-vision": lambda: randomised(CLIPVisionModel(vision)),
            "clip-vision:projection": lambda: randomised(CLIPVisionModelWithProjection(vision)),
            "clip-vision:classifier": lambda: randomised(CLIPForImageClassification(whole)),
        }


FAMILY = CLIPVision()
