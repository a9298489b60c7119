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

# Width, blocks, heads and patch size of the pretrained models that the paper names.
_SHAPES: Mapping[str, tuple[int, int, int, int]] = {
    "google/vit-base-patch32-224-in21k": (768, 12, 12, 32),
    "google/vit-base-patch16-224-in21k": (768, 12, 12, 16),
    "google/vit-large-patch32-224-in21k": (1024, 24, 16, 32),
}


def random_model(name: str) -> nn.Module | None:
    """A model with random weights in the shape of a pretrained one, to time it; None if the shape is not known."""
    if name not in _SHAPES:
        return None
    from transformers import ViTConfig, ViTModel

    width, blocks, heads, patch = _SHAPES[name]
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        patch_size=patch,
    )
    model: nn.Module = ViTModel(config, add_pooling_layer=False)
    return model.eval()
