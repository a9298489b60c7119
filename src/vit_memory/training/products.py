"""Products with frozen weights, on the way of class tokens that are trained.

What a class token leaves in a graph is mostly the results of such products. Left to autograd they are fresh memory in
every chunk, whose pages cost more than what is written to them; here they lie in a room that is used again.
"""

import torch
from torch import Tensor, nn

from vit_memory.trunk import Room, call


class Products:
    """How the tokens of one chunk pass modules. Its graph holds until the next chunk takes the same room."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._made = 0

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """Apply a module to tokens (…, width)."""
        # A subclass of Linear may do anything, and one with weights in training needs more than this gradient.
        if type(module) is not nn.Linear or module.weight.requires_grad or not torch.is_grad_enabled():
            return call(module, x)
        out: Tensor = _Frozen.apply(x, self._product(module, x), module.weight)  # type: ignore[no-untyped-call]
        return out

    @torch.no_grad()
    def _product(self, module: nn.Linear, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        made = self._room.take(("product", self._made), (len(rows), module.out_features), x.dtype, x.device)
        self._made += 1
        bias: Tensor | None = module.bias
        if bias is None:
            torch.mm(rows, module.weight.t(), out=made)
        else:
            torch.addmm(bias, rows, module.weight.t(), out=made)
        return made.view(*x.shape[:-1], -1)


class _Frozen(torch.autograd.Function):
    """A product that was made already: only its gradient is left to do."""

    @staticmethod
    def forward(ctx, x: Tensor, made: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weight)
        return made.view_as(made)  # a view, so that autograd notices where the room was used again too early

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (weight,) = ctx.saved_tensors
        return gradient @ weight, None, None
