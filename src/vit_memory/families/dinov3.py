"""transformers' DINOv3 ViT: registers, and rotary positions that turn patches only."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from vit_memory.families.roles import Roles, Rotation
from vit_memory.families.tiny import SIZES, randomised
from vit_memory.families.transformers_layout import (
    BlockLayout,
    NormThenHeads,
    TransformersFamily,
    fields_of,
    find,
)

_LAYOUT = BlockLayout(
    norm1="norm1",
    norm2="norm2",
    attention="attention",
    scale1="layer_scale1",
    scale2="layer_scale2",
    up="mlp.up_proj",
    down="mlp.down_proj",
)


@dataclass(frozen=True, slots=True, eq=False)
class EmbedAndRotate:
    """The library's own embeddings, and its rotation for the image's grid."""

    embeddings: nn.Module
    rope: nn.Module

    def __call__(self, images: Tensor) -> tuple[Tensor, Rotation]:
        """Original tokens (B, N, D), and cosines and sines for the patches among them."""
        return self.embeddings(images), self.rope(images)


@dataclass(frozen=True, slots=True)
class RotatePatches:
    """The library's own rotation: the tokens before the patches stay as they are."""

    module: str  # where the library defines it

    def __call__(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, H, N, A/H), turned."""
        turned: tuple[Tensor, Tensor] = sys.modules[self.module].apply_rotary_pos_emb(q, k, *rotation)
        return turned


@dataclass(frozen=True, slots=True, eq=False)
class FirstToken:
    """The library calls the class token's output pooled."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """The class token's output (B, D)."""
        return tokens[:, 0, :]


@dataclass(frozen=True, slots=True)
class DINOv3(TransformersFamily):
    """The ViTs of DINOv3 (its ConvNeXts are none)."""

    def roles(self, model: nn.Module) -> Roles:
        """Where the parts are."""
        core = self.core(model)
        embeddings: Any = core.embeddings
        roles = self.roles_of(
            core,
            prefix=("class", *("register",) * core.config.num_register_tokens),
            embed=EmbedAndRotate(embeddings, find(core, "rope_embeddings")),
            finish=NormThenHeads(find(core, self.norm), FirstToken(), None),
            stem={
                "patches": embeddings.patch_embeddings,
                "class": embeddings.cls_token,
                "extra": embeddings.register_tokens,
            },
            class_token=embeddings.cls_token,
        )
        return replace(roles, rotate=RotatePatches(type(core).__module__))

    def library_forward(self, model: nn.Module, images: Tensor) -> Mapping[str, Tensor]:
        """The library's own forward, which our passes must equal."""
        return fields_of(model(pixel_values=images))

    def tiny_models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Small random models."""
        from transformers import DINOv3ViTConfig, DINOv3ViTModel

        sizes = {**SIZES, "num_register_tokens": 2}
        gated = DINOv3ViTConfig(**sizes, use_gated_mlp=True)
        return {
            "dinov3-vit": lambda: randomised(DINOv3ViTModel(DINOv3ViTConfig(**sizes))),
            "dinov3-vit:gated": lambda: randomised(DINOv3ViTModel(gated)),
        }


FAMILY = DINOv3(name="dinov3-vit", packages=("dinov3_vit",), layout=_LAYOUT, layers="model.layer|layer", norm="norm")
