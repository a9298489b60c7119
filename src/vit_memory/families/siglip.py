"""transformers' SigLIP vision tower: no class token, so a task's token starts at zero, and the pooling head stays."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vit_memory.families.clip import VisionTower
from vit_memory.families.roles import Roles
from vit_memory.families.tiny import SIZES, randomised
from vit_memory.families.transformers_layout import (
    Interpolating,
    find,
    optional,
    pair,
)
from vit_memory.outputs import Original


@dataclass(frozen=True, slots=True, eq=False)
class PoolingEnding:
    """Norm; attention pooling where the tower has it; a classifier on the mean of the patches."""

    norm: nn.Module
    pooling: nn.Module | None
    classifier: nn.Module | None

    def __call__(self, tokens: Tensor) -> Original:
        """Last block's output (B, N, D) to what the library returns."""
        tokens = self.norm(tokens)
        mean = torch.mean(tokens, dim=1)
        pooled = None if self.pooling is None else self.pooling(tokens)
        return Original(
            tokens=tokens,
            feature=mean if pooled is None else pooled,
            pooled=pooled,
            logits=None if self.classifier is None else self.classifier(mean),
        )


@dataclass(frozen=True, slots=True)
class SigLIPVision(VisionTower):
    """SigLIP's."""

    def roles(self, model: nn.Module) -> Roles:
        """Where the parts are."""
        core = self.core(model)
        embeddings: Any = core.embeddings
        pooling = optional(core, "head")
        return self.roles_of(
            core,
            prefix=(),
            embed=Interpolating(embeddings, pair(core.config.image_size)),
            finish=PoolingEnding(find(core, self.norm), pooling, optional(model, "classifier")),
            # The pooling belongs to the fingerprint: a `head` task reads its output.
            stem={
                "patches": embeddings.patch_embedding,
                "positions": embeddings.position_embedding,
                "pooling": pooling,
            },
        )

    def tiny_models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Small random models."""
        from transformers import SiglipConfig, SiglipForImageClassification, SiglipVisionConfig, SiglipVisionModel

        vision = SiglipVisionConfig(**SIZES)
        text = {"bos_token_id": 0, "eos_token_id": 1}  # its defaults lie outside its vocabulary, and it says so
        whole = SiglipConfig(vision_config=vision.to_dict(), text_config=text, num_labels=7)
        return {
            "siglip-vision": lambda: randomised(SiglipVisionModel(vision)),
            "siglip-vision:classifier": lambda: randomised(SiglipForImageClassification(whole)),
        }


FAMILY = SigLIPVision(name="siglip-vision", packages=("siglip",))
