"""Small random models that hide nothing, for `verify` and the tests."""

from typing import Any

import torch
from torch import nn

# What transformers' configurations call the sizes of a small ViT that still has blocks, heads and a grid.
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}


def randomised(model: nn.Module) -> nn.Module:
    """Give every weight a random value, in eval mode: fresh models hold zeros and ones that hide a forgotten part."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                spread, centre = min(0.5, parameter.shape[1:].numel() ** -0.5), 0.0
            else:  # biases, and the weights of norms and scales, which stay near where they start
                spread, centre = 0.2, float(parameter.float().mean()) if parameter.numel() else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + centre)
    return model.eval()
