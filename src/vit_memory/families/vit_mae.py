"""transformers' ViT-MAE encoder, reading whole images.

The library's own forward hides three quarters of the patches at random. A backbone must see the whole image and say
the same twice, so here no patch is masked: the library says the same with `mask_ratio=0` and rising noise.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vit_memory.families.roles import Roles
from vit_memory.families.tiny import SIZES, randomised
from vit_memory.families.transformers_layout import PlainViT, fields_of


@dataclass(frozen=True, slots=True, eq=False)
class Unmasked:
    """Every patch, in order: what the library's embeddings do but for the masking."""

    embeddings: Any
    image_size: tuple[int, int]

    def __call__(self, images: Tensor) -> tuple[Tensor, None]:
        """Original tokens (B, N, D), positions included."""
        height, width = images.shape[-2:]
        patches = self.embeddings.patch_embeddings.projection(images).flatten(2).transpose(1, 2)
        positions = self.embeddings.position_embeddings
        if (height, width) != self.image_size:
            positions = self.embeddings.interpolate_pos_encoding(patches, height, width)
        class_token = self.embeddings.cls_token + positions[:, :1, :]
        patches = patches + positions[:, 1:, :]
        return torch.cat((class_token.expand(patches.shape[0], -1, -1), patches), dim=1), None


@dataclass(frozen=True, slots=True)
class ViTMAE(PlainViT):
    """PlainViT but for the masking."""

    def roles(self, model: nn.Module) -> Roles:
        """Where the parts are."""
        plain = PlainViT.roles(self, model)
        return replace(plain, embed=Unmasked(self.core(model).embeddings, plain.image_size))

    def library_forward(self, model: nn.Module, images: Tensor) -> Mapping[str, Tensor]:
        """The library's own forward of the encoder, without masking and without shuffling."""
        core: Any = self.core(model)
        roles = self.roles(model)
        patches = (images.shape[-2] // roles.patch_size[0]) * (images.shape[-1] // roles.patch_size[1])
        noise = torch.arange(patches, device=images.device, dtype=torch.float32).expand(len(images), -1)
        ratio, core.config.mask_ratio = core.config.mask_ratio, 0.0
        try:
            other_size = tuple(images.shape[-2:]) != roles.image_size
            return fields_of(core(pixel_values=images, noise=noise, interpolate_pos_encoding=other_size))
        finally:
            core.config.mask_ratio = ratio


def _tiny() -> Mapping[str, Callable[[], nn.Module]]:
    from transformers import ViTMAEConfig, ViTMAEForPreTraining, ViTMAEModel

    config = ViTMAEConfig(
        **SIZES,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    )
    return {
        "vit-mae": lambda: randomised(ViTMAEModel(config)),
        "vit-mae:pretraining": lambda: randomised(ViTMAEForPreTraining(config)),
    }


FAMILY = ViTMAE(name="vit-mae", packages=("vit_mae",), cores=("vit",), prefix=("class",), tiny=_tiny)
