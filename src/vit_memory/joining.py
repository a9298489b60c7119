"""Where class tokens may ride along in the original tokens' matrix products without changing a bit of them.

Joined rows read each weight once, which is what counts at small batches. But a longer product is not always the same
to the bit: for some shapes the library below splits its sums differently. Shapes decide that, not values, so each
shape is tried once on random numbers, both ways, and remembered; where the bits differ the product is made twice.

Activations have no sums, but two ways to compute one number: most of a tensor goes through vector instructions, what
does not fill a vector through the scalar function, and for some values the two differ in the last bit. They are tried
on such values only. A module that contains others (a gated MLP) hides its activation and is never joined.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vit_memory.families.roles import Roles

_REMEMBERED = 512  # shapes; a server sees a handful of batch sizes times the task counts of its day
_TRIED_VALUES = 4096  # of an activation; for SiLU and GELU 4 and 19 in a hundred differ (AVX-512)


@dataclass(frozen=True, slots=True)
class PassShape:
    """All that decides how a product is cut up."""

    batch: int
    originals: int  # N
    readers: int  # T
    dtype: torch.dtype
    device: torch.device
    threads: int


class JoinPlan:
    """Which row-wise modules of a backbone may be joined, per shape. Proved on first need, then looked up."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._structures: dict[nn.Module, str] = {m: _structure(m) for m, _ in _row_wise(roles)}
        self._joined: dict[PassShape, frozenset[nn.Module]] = {}

    def joined(self, x: Tensor, originals: int, readers: int) -> frozenset[nn.Module]:
        """The modules that may take original and class tokens in one call, for tokens like x (B, N, D)."""
        shape = PassShape(x.shape[0], originals, readers, x.dtype, x.device, torch.get_num_threads())
        known = self._joined.get(shape)
        if known is None:
            known = self._prove(shape)
            if len(self._joined) >= _REMEMBERED:
                self._joined.clear()
            self._joined[shape] = known
        return known

    @torch.no_grad()
    def _prove(self, shape: PassShape) -> frozenset[nn.Module]:
        verdicts: dict[tuple[str, int], bool] = {}
        joined: set[nn.Module] = set()
        for module, width in _row_wise(self._roles):
            key = (self._structures[module], width)
            if key not in verdicts:
                verdicts[key] = same_bits_when_joined(module, width, shape)
            if verdicts[key]:
                joined.add(module)
        return frozenset(joined)


def same_bits_when_joined(module: nn.Module, width: int, shape: PassShape) -> bool:
    """Whether original tokens (B, N, width) leave the module with the same bits when B·T further rows ride along."""
    if next(module.children(), None) is not None:
        return False
    probe = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    for parameter in probe.parameters():  # random weights: zeros in a checkpoint would prove anything
        spread = parameter.shape[-1] ** -0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    B, N, T = shape.batch, shape.originals, shape.readers
    if next(module.parameters(), None) is None:
        rows = _telling_values(probe, B * (N + T) * width, shape, generator).view(-1, width)
    else:
        rows = torch.randn(B * (N + T), width, generator=generator).to(shape.device, shape.dtype)
    alone = probe(rows[: B * N].view(B, N, width))
    return torch.equal(probe(rows)[: B * N].view_as(alone), alone)


def _telling_values(activation: nn.Module, count: int, shape: PassShape, generator: torch.Generator) -> Tensor:
    """So many values for which the vector and the scalar way give different bits; any values if there are none."""
    values = torch.randn(_TRIED_VALUES, generator=generator).to(shape.device, shape.dtype)
    scattered = torch.stack([values, values], dim=1)[:, 0]  # every second number of a tensor: no vector can be loaded
    differ = values[activation(values) != activation(scattered)]
    chosen = differ if len(differ) else values
    return chosen.repeat(count // len(chosen) + 1)[:count]


def _structure(module: nn.Module) -> str:
    """Equal for modules that cut up their work alike."""
    sizes = [tuple(parameter.shape) for parameter in module.parameters()]
    return f"{type(module).__qualname__} {module!r} {sizes}"


def _row_wise(roles: Roles) -> Iterator[tuple[nn.Module, int]]:
    """The modules that the fused pass applies to rows, each with the width of its input."""
    for block in roles.blocks:
        yield block.norm1, roles.width
        for projection in block.qkv:
            yield projection, roles.width
        yield from _chain(block.project)
        yield block.norm2, roles.width
        yield from _chain(block.mlp)


def _chain(modules: tuple[nn.Module, ...]) -> Iterator[tuple[nn.Module, int]]:
    """Activations take the width that the linear layer before them gives."""
    width = 0
    for module in modules:
        first = next(module.parameters(), None)
        if first is not None:
            width = first.shape[-1]
        yield module, width
        if first is not None and first.dim() > 1:
            width = first.shape[0]
