"""transformers' ViT: the plain one."""

from collections.abc import Callable, Mapping

from torch import nn

from vit_memory.families.tiny import randomised
from vit_memory.families.transformers_layout import PlainViT


def _tiny() -> Mapping[str, Callable[[], nn.Module]]:
    from transformers import ViTConfig, ViTForImageClassification, ViTModel

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=7,
    )
    return {
        "vit": lambda: randomised(ViTForImageClassification(config)),
        "vit:pooler": lambda: randomised(ViTModel(config)),
    }


FAMILY = PlainViT(name="vit", package="vit", cores=("vit",), prefix=("class",), tiny=_tiny)
