"""What a branch is: a second trunk that leaves the original one at a block and has an adapter from there on.

A branch copies all original tokens where it leaves, and runs the copies through the remaining blocks with low-rank
updates and gains of its own. Tasks may stand on it: their class tokens read its tokens, and their heads its output. The
original tokens never read it. Its pass is computed once, however many tasks stand on it, and costs k/L of a plain pass
for the last k of L blocks. From block 0 on it is what LoRA computes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vit_memory.adapter import Adapter, new_adapter
from vit_memory.backbone import Backbone, BackboneIdentity
from vit_memory.choices import Projection
from vit_memory.errors import TaskError
from vit_memory.task import BranchRef, TaskRecord, check_name, content_digest, new_record

# LoRA's: here all tokens are changed, so that updates of v reach what class tokens read.
BRANCH_PROJECTIONS: tuple[Projection, ...] = ("q", "v")


@dataclass(frozen=True, slots=True, eq=False)  # eq=False: comparing tensors gives no single bool
class Branch:
    """A branch: where it leaves the original trunk, and what it learned for the blocks from there on.

    >>> branch = new_branch(backbone, "birds", blocks=2, rank=4)
    >>> branch.start == backbone.depth - 2
    True
    >>> model = MemoryViT(backbone, [new_task(backbone, "wings", ["up", "down"], branch=branch)], [branch])
    >>> tuple(model(torch.zeros(1, 3, 32, 32))["wings"].shape)
    (1, 2)
    """

    name: str
    start: int  # b: the first block that is its own
    adapter: Adapter  # of its k = L - b blocks
    backbone: BackboneIdentity
    record: TaskRecord = field(default_factory=TaskRecord)

    def __post_init__(self) -> None:
        check_name(self.name, "branch")
        where, depth = f"branch {self.name!r}", self.backbone.depth
        if not 0 <= self.start < depth:
            raise TaskError(
                f"{where} starts at block {self.start}; {self.backbone.name} has the blocks 0 to {depth - 1}."
            )
        if self.adapter.empty:
            raise TaskError(f"{where}: without low-rank updates and gains it is the original trunk. Give it either.")
        self.adapter.check(where, self.blocks, self.backbone.width)

    @property
    def blocks(self) -> int:
        """k, how many blocks are its own."""
        return self.backbone.depth - self.start

    @property
    def method(self) -> str:
        """What it consists of, for tables: `last 4 blocks, rank 8`."""
        return f"last {self.blocks} block{'s' * (self.blocks > 1)}, {self.adapter.text(BRANCH_PROJECTIONS)}"

    @property
    def parameters(self) -> int:
        """How many parameters were learned."""
        return sum(tensor.numel() for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Everything learned, by name, in a fixed order."""
        return dict(self.adapter.tensors())

    def map(self, change: Callable[[Tensor], Tensor]) -> "Branch":
        """The same branch with every tensor changed; shapes must stay."""
        return replace(self, adapter=self.adapter.map(change))

    @property
    def digest(self) -> str:
        """A hash of all that decides what it computes; not its name."""
        described = {
            "start": self.start,
            "adapter": list(self.tensors()),
            "scaling": self.adapter.scalings,
            "backbone": self.backbone.fingerprint,
        }
        return content_digest(described, self.tensors().values())

    @property
    def ref(self) -> BranchRef:
        """How tasks name it."""
        return BranchRef(self.name, self.digest)


def new_branch(
    backbone: Backbone,
    name: str,
    *,
    blocks: int = 4,
    rank: int | None = 8,
    gains: bool = False,
    projections: Sequence[Projection] = BRANCH_PROJECTIONS,
    generator: torch.Generator | None = None,
) -> Branch:
    """A branch of the last `blocks` blocks before training: it computes what the original trunk does.

    >>> new_branch(backbone, "birds", blocks=2, rank=8).method
    'last 2 blocks, rank 8'
    """
    where = f"branch {name!r}"
    if not 1 <= blocks <= backbone.depth:
        raise TaskError(f"{where}: blocks is {blocks}; expected 1 to {backbone.depth}, those of {backbone.name}.")
    adapter = new_adapter(
        backbone, where, rank=rank, gains=gains, projections=projections, generator=generator, depth=blocks
    )
    return Branch(name, backbone.depth - blocks, adapter, backbone.identity, new_record(backbone))
