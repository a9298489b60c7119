"""What a learned reader consists of: gains and low-rank updates for one class token, and what its head reads.

A class token runs through the blocks as rows of its own, which no original token and no unrelated task reads. So what
is learned for these rows alone leaves every other output as it is. `reader_updates.py` applies it.

Shape letters: L blocks, D width, A = heads x head size, r rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.choices import Projection
from vit_memory.errors import TaskError
from vit_memory.families.roles import projections_of

# The rows of `LearnedReader.gains`; the scales without a norm are those of what attention and the MLP add to a token.
GAINS = ("norm1 scale", "norm1 shift", "attention scale", "norm2 scale", "norm2 shift", "MLP scale")
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
# Not LoRA's q and v: a reader's k and v are those of its own class token only, the patches keep theirs.
DEFAULT_PROJECTIONS: tuple[Projection, ...] = ("q", "o")


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """A low-rank update of one projection in every block: its weight W acts as W + B A, as in LoRA with scaling 1.

    >>> LowRank(A=torch.zeros(12, 8, 384), B=torch.zeros(12, 384, 8)).rank
    8
    """

    A: Tensor  # (L, r, in)
    B: Tensor  # (L, out, r)

    @property
    def rank(self) -> int:
        """r."""
        return self.A.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class LearnedReader:
    """What a task learned about how its class token reads.

    Gains are kept as differences from identity: zeros leave a token as it is. A scale of 0.1 multiplies by 1.1.

    >>> str(new_task(backbone, "pets", ["cat", "dog"], regime="reader", rank=8, gains=True).reader)
    'rank 8 + gains'
    """

    gains: Tensor | None = None  # (L, 6, D): see GAINS
    low_rank: Mapping[Projection, LowRank] = field(default_factory=dict)

    def __str__(self) -> str:
        """For tables: `rank 8 + gains`; projections are named unless they are the usual ones."""
        ranks = {update.rank for update in self.low_rank.values()}
        low_rank = f"rank {'/'.join(map(str, sorted(ranks)))}" if ranks else ""
        if ranks and set(self.low_rank) != set(DEFAULT_PROJECTIONS):
            low_rank += f" on {'+'.join(self.low_rank)}"
        return " + ".join(filter(None, (low_rank, "gains" if self.gains is not None else "")))

    def map(self, change: Callable[[Tensor], Tensor]) -> "LearnedReader":
        """The same reader with every tensor changed, for example moved to a device."""
        return LearnedReader(
            None if self.gains is None else change(self.gains),
            {name: LowRank(change(update.A), change(update.B)) for name, update in self.low_rank.items()},
        )

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
            rank = update.rank if update.A.dim() == 3 else 0
            check_rank(where, rank, width)
            # One side is the backbone's width; the other may be another, which check_backbone knows.
            inner = update.A.shape[2] if projection in ("o", "fc2") else width
            outer = width if projection in ("o", "fc2") else update.B.shape[1] if update.B.dim() == 3 else 0
            _check_shape(where, f"{projection} lora_A", update.A, (depth, rank, inner))
            _check_shape(where, f"{projection} lora_B", update.B, (depth, outer, rank))

    def check_backbone(self, where: str, backbone: Backbone) -> None:
        """Raise TaskError if the backbone does not have these projections in these sizes."""
        sizes = projection_sizes(where, backbone, tuple(self.low_rank))
        for projection, update in self.low_rank.items():
            inner, outer = sizes[projection]
            _check_shape(where, f"{projection} lora_A", update.A, (backbone.depth, update.rank, inner))
            _check_shape(where, f"{projection} lora_B", update.B, (backbone.depth, outer, update.rank))


@dataclass(frozen=True, slots=True)
class ReadOut:
    """What a head reads: a class token's output of the last `blocks` blocks, and the mean of the final patch tokens.

    >>> ReadOut.parse("blocks:4+patches")
    ReadOut(blocks=4, patches=True)
    """

    blocks: int = 1  # each output passes the final norm; the last block's comes first
    patches: bool = False

    @classmethod
    def parse(cls, text: "str | ReadOut") -> "ReadOut":
        """From text: final, patches, blocks:N, or several joined by +. Raises TaskError for anything else."""
        if isinstance(text, ReadOut):
            return text
        parts = [part.strip().partition(":") for part in text.split("+")]  # (name, ":" or "", number or "")
        names = [name for name, _, _ in parts]
        numbers = {name: number for name, _, number in parts}
        blocks = numbers.pop("blocks", "1")
        fine = set(numbers) <= {"final", "patches"} and not any(numbers.values()) and len(set(names)) == len(names)
        if not fine or not blocks.isdecimal() or int(blocks) < 1:
            raise TaskError(
                f"read-out {text!r}: expected final, patches, blocks:N, or several joined by +, such as "
                f"blocks:4+patches."
            )
        return cls(int(blocks), "patches" in names)

    def __str__(self) -> str:
        parts = [f"blocks:{self.blocks}"] * (self.blocks > 1) + ["patches"] * self.patches
        return "+".join(parts) or "final"

    @property
    def parts(self) -> int:
        """How many vectors of the backbone's width a head reads."""
        return self.blocks + self.patches

    def check(self, where: str, depth: int) -> None:
        """Raise TaskError if there are not so many blocks."""
        if not 1 <= self.blocks <= depth:
            raise TaskError(f"{where}: a read-out of the last {self.blocks} blocks; the backbone has {depth}.")


FINAL = ReadOut()  # the last block's output alone


def new_reader(
    backbone: Backbone,
    where: str,
    *,
    rank: int | None,
    gains: bool,
    projections: Sequence[Projection],
    generator: torch.Generator | None,
) -> LearnedReader:
    """A reader that changes nothing yet: gains at identity, one side of every low-rank pair at zero."""
    depth, width = backbone.depth, backbone.width
    low_rank: dict[Projection, LowRank] = {}
    if rank is not None:
        check_rank(where, rank, width)
        check_projections(where, projections)
        ordered = sorted(projections, key=projection_order)  # the order in which they were given makes no difference
        for projection, (inner, outer) in projection_sizes(where, backbone, ordered).items():
            # Spread so that A x has the scale of x.
            A = torch.randn(depth, rank, inner, generator=generator) * inner**-0.5
            low_rank[projection] = LowRank(A, torch.zeros(depth, outer, rank))
    return LearnedReader(torch.zeros(depth, len(GAINS), width) if gains else None, low_rank)


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
