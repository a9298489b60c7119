"""The roles that the parts of a ViT play, whatever library it comes from.

A family fills these in with the library's own modules; the passes (`trunk`, `reading`, `fused`, `reference`) are
written against them and know no library. Everything here holds references: nothing is copied, nothing is changed.

Shape letters: B batch, N original tokens, D width, H heads, A = H x head size, L blocks, T tasks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from vit_memory.choices import Projection
from vit_memory.outputs import Original

Rotation = tuple[Tensor, Tensor]  # cosines and sines of the patches' rotary positions


class Attend(Protocol):
    """The library's own attention over original tokens: three (B, H, N, A/H) in, (B, N, A) out."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...  # noqa: D102


class Embed(Protocol):
    """Images (B, C, height, width) to original tokens (B, N, D) and, where positions rotate, their rotation."""

    def __call__(self, images: Tensor) -> tuple[Tensor, Rotation | None]: ...  # noqa: D102


class Rotate(Protocol):
    """Turn queries and keys of the original tokens by their positions; tokens that are no patches stay."""

    def __call__(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]: ...  # noqa: D102


class Finish(Protocol):
    """Last block's output (B, N, D) to what the library returns."""

    def __call__(self, tokens: Tensor) -> Original: ...  # noqa: D102


class CheckSize(Protocol):
    """Say what is wrong with an image size, or nothing."""

    def __call__(self, height: int, width: int) -> str | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One transformer block. Every module but `attend` works on each row by itself."""

    norm1: nn.Module
    qkv: tuple[nn.Module, ...]  # one fused D -> 3A, or three D -> A
    norm_q: nn.Module  # per head; Identity where the model has none
    norm_k: nn.Module
    attend: Attend
    scaling: float
    project: tuple[nn.Module, ...]  # in order; the last is A -> D
    scale1: nn.Module  # layer scale; Identity where the model has none
    norm2: nn.Module
    mlp: tuple[nn.Module, ...]  # in order
    scale2: nn.Module


@dataclass(frozen=True, slots=True, eq=False)
class BlockProjection:
    """A linear layer of a block, or the third of a fused one that makes queries, keys or values."""

    module: nn.Linear
    inner: int
    outer: int
    start: int = 0  # its first output among the module's

    @property
    def padding(self) -> tuple[int, int]:
        """How many outputs the module has before and after this projection's."""
        return self.start, self.module.out_features - self.start - self.outer


def projections_of(block: Block) -> dict[Projection, BlockProjection]:
    """The linear layers of a block by name. A gated MLP that is one module has no fc1, or neither fc1 nor fc2."""
    projections: dict[Projection, BlockProjection] = {}
    names: tuple[Projection, ...] = ("q", "k", "v")
    parts = 3 // len(block.qkv)  # of one module
    for i, name in enumerate(names):
        _add_linear(projections, name, block.qkv[i // parts], parts, i % parts)
    _add_linear(projections, "o", block.project[-1])
    if len(block.mlp) > 1:
        _add_linear(projections, "fc1", block.mlp[0])
        _add_linear(projections, "fc2", block.mlp[-1])
    return projections


def _add_linear(
    projections: dict[Projection, BlockProjection], name: Projection, module: nn.Module, parts: int = 1, part: int = 0
) -> None:
    if isinstance(module, nn.Linear):
        outer = module.out_features // parts
        projections[name] = BlockProjection(module, module.in_features, outer, part * outer)


@dataclass(frozen=True, slots=True, eq=False)
class Roles:
    """A whole ViT by role."""

    width: int  # D
    heads: int  # H
    channels: int
    patch_size: tuple[int, int]
    image_size: tuple[int, int]  # what it was pretrained at
    prefix: tuple[str, ...]  # the original tokens before the patches, e.g. ("class", "register", "register")
    embed: Embed
    pre_norm: nn.Module  # what class tokens pass before the first block; Identity where the model has none
    blocks: tuple[Block, ...]
    rotate: Rotate | None
    final_norm: nn.Module  # what a class token passes before its head
    finish: Finish
    check_size: CheckSize
    stem: Mapping[str, nn.Module | Tensor | None]  # weights outside the blocks, by role, for the fingerprint
    class_token: Tensor | None  # (1, 1, D) or (D,) parameter
    class_position: Tensor | None  # what its position adds, viewable as (D,)

    def initial_class_token(self) -> Tensor:
        """The vector (D,) that enters where the original class token enters, position included; else zero."""
        if self.class_token is None:
            return self.blocks[0].norm1.weight.new_zeros(self.width)  # type: ignore[operator]
        token = self.class_token.detach().reshape(-1)
        return token.clone() if self.class_position is None else token + self.class_position.detach().reshape(-1)

    def class_token_modules(self) -> Iterator[nn.Module]:
        """Every module that class tokens and memory cells pass."""
        yield self.pre_norm
        for block in self.blocks:
            yield from (block.norm1, *block.qkv, block.norm_q, block.norm_k, *block.project, block.scale1)
            yield from (block.norm2, *block.mlp, block.scale2)
        yield self.final_norm

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight a task depends on, by role: the same for every library and layout that stores it."""
        for role, part in self.stem.items():
            if isinstance(part, nn.Module):
                yield from _parameters(role, part)
            elif part is not None:
                yield role, part
        for i, block in enumerate(self.blocks):
            yield from _parameters(f"{i}.norm1", block.norm1)
            yield from _qkv_parameters(f"{i}", block.qkv)
            yield from _parameters(f"{i}.norm_q", block.norm_q)
            yield from _parameters(f"{i}.norm_k", block.norm_k)
            yield from _chain_parameters(f"{i}.project", block.project)
            yield from _parameters(f"{i}.scale1", block.scale1)
            yield from _parameters(f"{i}.norm2", block.norm2)
            yield from _chain_parameters(f"{i}.mlp", block.mlp)
            yield from _parameters(f"{i}.scale2", block.scale2)
        yield from _parameters("final_norm", self.final_norm)


def _parameters(role: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # Numbered, not named: one library's `gamma` is another's `lambda1`.
    for i, parameter in enumerate(module.parameters()):
        yield f"{role}.{i}", parameter


def _chain_parameters(role: str, chain: tuple[nn.Module, ...]) -> Iterator[tuple[str, Tensor]]:
    with_weights = (module for module in chain if any(True for _ in module.parameters()))
    for i, module in enumerate(with_weights):  # activations do not count: some libraries keep them as modules
        yield from _parameters(f"{role}.{i}", module)


def _qkv_parameters(role: str, qkv: tuple[nn.Module, ...]) -> Iterator[tuple[str, Tensor]]:
    if len(qkv) == 3:
        for name, module in zip("qkv", qkv, strict=True):
            yield from _parameters(f"{role}.{name}", module)
        return
    parts = [parameter.chunk(3) for parameter in qkv[0].parameters()]
    for j, name in enumerate("qkv"):
        for i, part in enumerate(parts):
            yield f"{role}.{name}.{i}", part[j]
