"""Small random models that hide nothing, for `verify` and the tests."""

import torch
from torch import nn


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
