"""Where class tokens may ride along in the original tokens' matrix products without changing a bit of them.

Joined rows read each weight once, which is what counts at small batches. But a longer product is not always the same
to the bit: for some shapes the library below splits its sums differently. Shapes decide that, not values, so each
shape is tried once on random numbers, both ways, and remembered; where the bits differ the product is made twice.

Activations have no sums, but two ways to compute one number: most of a tensor goes through vector instructions, what
does not fill a vector through the scalar function, and for some values the two differ in the last bit. They are tried
on such values only. A module that contains others (a gated MLP) hides its activation and is never joined.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """Which row-wise modules of a backbone may be joined, per shape. Proved on first need, then looked up.

    A `deferred` plan proves nothing in the middle of a pass, where a request would wait for it. For a shape that it
    does not know it joins nothing, which changes no bit of the original output, and notes the shape; `prove_next`
    proves what was noted, when there is time.
    """

    def __init__(self, roles: Roles, *, deferred: bool = False) -> None:
        self._roles = roles
        self._deferred = deferred
        self._joined: Mapping[PassShape, frozenset[nn.Module]] = {}  # replaced, never changed: threads share it
        self._noted: Mapping[PassShape, None] = {}  # met in passes, not proved yet
        self._ahead: Sequence[PassShape] = ()  # not met yet
        self._proving: PassShape | None = None
        self._verdicts: dict[tuple[str, int], bool] = {}  # of the shape that is being proved
        self._modules: tuple[tuple[nn.Module, int, str], ...] | None = None

    def joined(self, x: Tensor, originals: int, readers: int) -> frozenset[nn.Module]:
        """The modules that may take original and class tokens in one call, for tokens like x (B, N, D)."""
        shape = PassShape(x.shape[0], originals, readers, x.dtype, x.device, torch.get_num_threads())
        known = self._joined.get(shape)
        if known is not None:
            return known
        if self._deferred:
            if shape not in self._noted:
                self._noted = {**self._noted, shape: None} if len(self._noted) < _REMEMBERED else {shape: None}
            return frozenset()
        verdicts: dict[tuple[str, int], bool] = {}
        while self._prove_a_module(shape, verdicts):
            pass
        return self._remember(shape, verdicts)

    def plan_ahead(self, shapes: Iterable[PassShape]) -> None:
        """Note shapes that passes will probably have, instead of those noted here before."""
        self._ahead = tuple(shape for shape in dict.fromkeys(shapes) if shape not in self._joined)

    @property
    def has_work(self) -> bool:
        """Whether `prove_next` has something to prove."""
        return self._proving is not None or bool(self._noted or self._ahead)

    def prove_next(self) -> bool:
        """Prove one module of the next noted shape, a small part of a pass; False if there is nothing to prove.

        One thread at a time. Shapes that passes have met come first.
        """
        if self._proving is None:
            self._proving, self._verdicts = next(iter((*self._noted, *self._ahead)), None), {}
        shape = self._proving
        if shape is None:
            return False
        threads = torch.get_num_threads()
        if threads != shape.threads:
            torch.set_num_threads(shape.threads)
        try:
            if not self._prove_a_module(shape, self._verdicts):
                self._remember(shape, self._verdicts)
                self._proving = None
        finally:
            if threads != shape.threads:
                torch.set_num_threads(threads)
        return True

    def _remember(self, shape: PassShape, verdicts: Mapping[tuple[str, int], bool]) -> frozenset[nn.Module]:
        known = frozenset(module for module, width, structure in self._rows() if verdicts[structure, width])
        newest = list(self._joined.items())[1 - _REMEMBERED :]
        self._joined = {**dict(newest), shape: known}
        self._noted = {other: None for other in self._noted if other != shape}
        self._ahead = tuple(other for other in self._ahead if other != shape)
        return known

    @torch.no_grad()
    def _prove_a_module(self, shape: PassShape, verdicts: dict[tuple[str, int], bool]) -> bool:
        """Add the verdict of one more module; False if all have one."""
        for module, width, structure in self._rows():
            if (structure, width) not in verdicts:
                verdicts[structure, width] = same_bits_when_joined(module, width, shape)
                return True
        return False

    def _rows(self) -> tuple[tuple[nn.Module, int, str], ...]:
        """The row-wise modules, each with the width of its input and its structure."""
        if self._modules is None:
            self._modules = tuple((m, width, _structure(m)) for m, width in _row_wise(self._roles))
        return self._modules


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
