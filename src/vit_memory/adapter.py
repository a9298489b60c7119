"""What is learned about blocks without changing their weights: gains, and low-rank updates as in LoRA.

A task of regime `reader` has an adapter for the rows of its own class token, a branch has one for all its tokens. No
original token and no unrelated task reads these rows, so every other output stays as it is. `updates.py` applies
adapters.

Shape letters: L blocks, D width, A = heads x head size, r rank.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.choices import Projection
from vit_memory.errors import TaskError
from vit_memory.families.roles import projections_of

# The rows of `Adapter.gains`; the scales without a norm are those of what attention and the MLP add to a token.
GAINS = ("norm1 scale", "norm1 shift", "attention scale", "norm2 scale", "norm2 shift", "MLP scale")
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
# Not LoRA's q and v: a reader's k and v are those of its own class token only, the patches keep theirs.
DEFAULT_PROJECTIONS: tuple[Projection, ...] = ("q", "o")


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """A low-rank update of one projection in every block: its weight W acts as W + scaling · B A, as in LoRA.

    >>> LowRank(A=torch.zeros(12, 8, 384), B=torch.zeros(12, 384, 8)).rank
    8
    """

    A: Tensor  # (L, r, in)
    B: Tensor  # (L, out, r)
    scaling: float | tuple[float, ...] = 1.0  # of all blocks, or of each; other than 1 in imported adapters only

    @property
    def rank(self) -> int:
        """r."""
        return self.A.shape[1]

    @property
    def scaled_b(self) -> Tensor:
        """B with the scaling multiplied in."""
        if isinstance(self.scaling, tuple):
            return torch.stack([B * own for B, own in zip(self.B, self.scaling, strict=True)])
        return self.B if self.scaling == 1.0 else self.B * self.scaling

    def scaling_of(self, i: int) -> float:
        """The scaling of block i."""
        return self.scaling[i] if isinstance(self.scaling, tuple) else self.scaling


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Gains and low-rank updates of some blocks: all of them for a task, those from its start on for a branch.

    Gains are kept as differences from identity: zeros leave a token as it is. A scale of 0.1 multiplies by 1.1.

    >>> str(new_task(backbone, "pets", ["cat", "dog"], regime="reader", rank=8, gains=True).reader)
    'rank 8 + gains'
    """

    gains: Tensor | None = None  # (L, 6, D): see GAINS
    low_rank: Mapping[Projection, LowRank] = field(default_factory=dict)

    def __str__(self) -> str:
        """For tables: `rank 8 + gains`; projections are named unless they are the usual ones of a reader."""
        return self.text(DEFAULT_PROJECTIONS)

    def text(self, usual: Sequence[Projection]) -> str:
        """The same; these projections are not named."""
        ranks = {update.rank for update in self.low_rank.values()}
        low_rank = f"rank {'/'.join(map(str, sorted(ranks)))}" if ranks else ""
        if ranks and set(self.low_rank) != set(usual):
            low_rank += f" on {'+'.join(self.low_rank)}"
        return " + ".join(filter(None, (low_rank, "gains" if self.gains is not None else "")))

    @property
    def empty(self) -> bool:
        """Whether it has neither gains nor updates."""
        return self.gains is None and not self.low_rank

    def map(self, change: Callable[[Tensor], Tensor]) -> "Adapter":
        """The same adapter with every tensor changed, for example moved to a device."""
        return Adapter(
            None if self.gains is None else change(self.gains),
            {name: replace(update, A=change(update.A), B=change(update.B)) for name, update in self.low_rank.items()},
        )

    @property
    def scalings(self) -> dict[str, float | list[float]]:
        """Scalings other than 1, by projection, as JSON values: a number, or one for every block."""
        return {
            name: list(update.scaling) if isinstance(update.scaling, tuple) else update.scaling
            for name, update in self.low_rank.items()
            if update.scaling != 1.0
        }

    @property
    def scaled_by_block(self) -> bool:
        """Whether a projection has a scaling for every block."""
        return any(isinstance(update.scaling, tuple) for update in self.low_rank.values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name, in a fixed order."""
        if self.gains is not None:
            yield "gains", self.gains
        for projection in PROJECTIONS:
            if projection in self.low_rank:
                yield f"{projection}.lora_A", self.low_rank[projection].A
                yield f"{projection}.lora_B", self.low_rank[projection].B

    def check(self, where: str, depth: int, width: int) -> None:
        """Raise TaskError if a tensor does not fit a backbone of so many blocks of that width."""
        if self.gains is not None:
            _check_shape(where, "gains", self.gains, (depth, len(GAINS), width))
        for projection, update in self.low_rank.items():
            check_projections(where, (projection,))
            scalings = update.scaling if isinstance(update.scaling, tuple) else (update.scaling,) * depth
            if len(scalings) != depth or not all(map(math.isfinite, scalings)):
                raise TaskError(
                    f"{where}: {projection} has a scaling of {update.scaling}; expected a finite number, or one for "
                    f"each of {depth} blocks."
                )
            rank = update.rank if update.A.dim() == 3 else 0
            check_rank(where, rank, width)
            # One side is the backbone's width; the other may be another, which check_backbone knows.
            inner = update.A.shape[2] if projection in ("o", "fc2") else width
            outer = width if projection in ("o", "fc2") else update.B.shape[1] if update.B.dim() == 3 else 0
            _check_shape(where, f"{projection} lora_A", update.A, (depth, rank, inner))
            _check_shape(where, f"{projection} lora_B", update.B, (depth, outer, rank))

    def check_backbone(self, where: str, backbone: Backbone, depth: int | None = None) -> None:
        """Raise TaskError if the backbone does not have these projections in these sizes, in so many blocks (all)."""
        depth = backbone.depth if depth is None else depth
        sizes = projection_sizes(where, backbone, tuple(self.low_rank))
        for projection, update in self.low_rank.items():
            inner, outer = sizes[projection]
            _check_shape(where, f"{projection} lora_A", update.A, (depth, update.rank, inner))
            _check_shape(where, f"{projection} lora_B", update.B, (depth, outer, update.rank))


def new_adapter(
    backbone: Backbone,
    where: str,
    *,
    rank: int | None,
    gains: bool,
    projections: Sequence[Projection],
    generator: torch.Generator | None,
    depth: int | None = None,
) -> Adapter:
    """An adapter of `depth` blocks (all) that changes nothing yet: gains at identity, every B at zero."""
    depth, width = backbone.depth if depth is None else depth, backbone.width
    low_rank: dict[Projection, LowRank] = {}
    if rank is not None:
        check_rank(where, rank, width)
        check_projections(where, projections)
        ordered = sorted(projections, key=projection_order)  # the order in which they were given makes no difference
        for projection, (inner, outer) in projection_sizes(where, backbone, ordered).items():
            # Spread so that A x has the scale of x.
            A = torch.randn(depth, rank, inner, generator=generator) * inner**-0.5
            low_rank[projection] = LowRank(A, torch.zeros(depth, outer, rank))
    return Adapter(torch.zeros(depth, len(GAINS), width) if gains else None, low_rank)


def projection_sizes(
    where: str, backbone: Backbone, projections: Sequence[Projection]
) -> dict[Projection, tuple[int, int]]:
    """Input and output width of the backbone's projections; TaskError if it has no such linear layer."""
    sizes: dict[Projection, tuple[int, int]] = {}
    for block in backbone.roles.blocks:
        layers = projections_of(block)
        for projection in projections:
            if projection not in layers:
                raise TaskError(
                    f"{where}: {backbone.name} (family {backbone.family.name}) has no projection {projection!r} that "
                    f"could be updated; it has {', '.join(layers)}."
                )
            sizes[projection] = layers[projection].inner, layers[projection].outer
    return sizes


def projection_order(projection: Projection) -> int:
    """A key to sort projections by."""
    return PROJECTIONS.index(projection)


def check_rank(where: str, rank: int, width: int) -> None:
    """Raise TaskError unless 1 <= rank <= width."""
    if not 1 <= rank <= width:
        raise TaskError(f"{where}: rank {rank}; expected 1 to {width}, the backbone's width.")


def check_projections(where: str, projections: Sequence[str]) -> None:
    """Raise TaskError unless these are names of projections, each given once."""
    unknown = [name for name in projections if name not in PROJECTIONS]
    if unknown or not projections or len(set(projections)) != len(projections):
        raise TaskError(
            f"{where}: low-rank updates of {', '.join(map(repr, unknown or projections)) or 'no projection'}; expected "
            f"one or more of {', '.join(PROJECTIONS)}, each once."
        )


def _check_shape(where: str, part: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected or not tensor.is_floating_point():
        raise TaskError(
            f"{where}: {part} is {tuple(tensor.shape)} {tensor.dtype}, expected {expected} of a floating type."
        )
