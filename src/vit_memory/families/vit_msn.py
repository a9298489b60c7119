"""transformers' ViT-MSN: ViT without a pooler."""

from collections.abc import Callable, Mapping

from torch import nn

from vit_memory.families.tiny import randomised
from vit_memory.families.transformers_layout import PlainViT


def _tiny() -> Mapping[str, Callable[[], nn.Module]]:
    from transformers import ViTMSNConfig, ViTMSNForImageClassification

    config = ViTMSNConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=7,
    )
    return {"vit-msn": lambda: randomised(ViTMSNForImageClassification(config))}


FAMILY = PlainViT(name="vit-msn", package="vit_msn", cores=("vit",), prefix=("class",), tiny=_tiny)
