"""Matrix products of trained class tokens with frozen weights, in buffers that are used again.

The graph of a class token consists mostly of the results of such products. Autograd would allocate new memory for them
in every chunk, and mapping its pages costs more time than writing to them.
"""

import torch
from torch import Tensor, nn

from vit_memory.buffers import BufferPool
from vit_memory.updates import call


class PooledLinear:
    """Applies modules to the tokens of one chunk. Its graph is valid until the next chunk uses the same pool."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._count = 0

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """Apply a module to tokens (…, width)."""
        # A subclass of Linear may compute anything, and trained weights need more than this gradient.
        if type(module) is not nn.Linear or module.weight.requires_grad or not torch.is_grad_enabled():
            return call(module, x)
        out: Tensor = _FrozenLinear.apply(x, self._product(module, x), module.weight)  # type: ignore[no-untyped-call]
        return out

    @torch.no_grad()
    def _product(self, module: nn.Linear, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        product = self._pool.get(("product", self._count), (len(rows), module.out_features), x.dtype, x.device)
        self._count += 1
        bias: Tensor | None = module.bias
        if bias is None:
            torch.mm(rows, module.weight.t(), out=product)
        else:
            torch.addmm(bias, rows, module.weight.t(), out=product)
        return product.view(*x.shape[:-1], -1)


class _FrozenLinear(torch.autograd.Function):
    """Adds the gradient of a product that is already computed."""

    @staticmethod
    def forward(ctx, x: Tensor, product: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weight)
        return product.view_as(product)  # a view: autograd notices if the buffer is overwritten too early

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (weight,) = ctx.saved_tensors
        return gradient @ weight, None, None
