"""transformers' ViT-MSN: ViT without a pooler."""

from collections.abc import Callable, Mapping

from torch import nn

from vit_memory.families.tiny import SIZES, randomised
from vit_memory.families.transformers_layout import PlainViT


def _tiny() -> Mapping[str, Callable[[], nn.Module]]:
    from transformers import ViTMSNConfig, ViTMSNForImageClassification

    config = ViTMSNConfig(**SIZES, num_labels=7)
    return {"vit-msn": lambda: randomised(ViTMSNForImageClassification(config))}


FAMILY = PlainViT(name="vit-msn", packages=("vit_msn",), cores=("vit",), prefix=("class",), tiny=_tiny)
