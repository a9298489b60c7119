"""transformers' ViT: the plain one."""

from collections.abc import Callable, Mapping

from torch import nn

from vit_memory.families.tiny import SIZES, randomised
from vit_memory.families.transformers_layout import PlainViT


def _tiny() -> Mapping[str, Callable[[], nn.Module]]:
    from transformers import ViTConfig, ViTForImageClassification, ViTModel

    config = ViTConfig(**SIZES, num_labels=7)
    return {
        "vit": lambda: randomised(ViTForImageClassification(config)),
        "vit:pooler": lambda: randomised(ViTModel(config)),
    }


FAMILY = PlainViT(name="vit", packages=("vit",), cores=("vit",), prefix=("class",), tiny=_tiny)
