"""What is compared: every method by its name in tables, and what it trains."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Methods of one group share a recipe.
Group = Literal["memory", "short memory", "reader", "variant", "unmasked", "full", "branch", "lora"]
Variant = Literal["after the norm", "first half of the blocks", "second half of the blocks"]


@dataclass(frozen=True, slots=True)
class Method:
    """One column of a table."""

    name: str
    group: Group
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False)  # of new_task; the name says them
    blocks: int | None = None  # of a branch
    variant: Variant | None = None  # of memory, for an ablation
    paper: str | None = None  # the column of the paper's Table 2

    @property
    def composable(self) -> bool:
        """Whether its tasks answer beside others, with the original output as it was."""
        return self.shares_pass or self.group == "branch"

    @property
    def shares_pass(self) -> bool:
        """Whether it is trained together with others on one pass of the backbone."""
        return self.group in ("memory", "short memory", "reader")

    @property
    def has_trunk(self) -> bool:
        """Whether what it reads of the backbone can be stored: nothing that it learns changes it."""
        return self.group not in ("unmasked", "full", "lora")

    @property
    def in_task_file(self) -> bool:
        """Whether what it learns fits in a task file and, for a branch, a branch file."""
        return self.composable or self.group == "unmasked"


def _reader(name: str, **arguments: Any) -> Method:
    return Method(name, "reader", {"regime": "reader", **arguments})


def cells(count: int, regime: str = "memory") -> Method:
    """Memory with so many cells per block."""
    name = f"{count} cell{'' if count == 1 else 's'}"
    if regime == "memory":
        return Method(name, "memory", {"cells": count}, paper=f"{count} cell{'' if count == 1 else 's'}")
    word = {"memory-unmasked": "unmasked"}.get(regime, regime)
    return Method(f"{name}, {word}", "unmasked", {"cells": count, "regime": regime})


def branch(blocks: int) -> Method:
    """LoRA's updates in a branch of the last blocks, and a head on its class token."""
    name = f"branch of {blocks} block{'' if blocks == 1 else 's'}"
    return Method(name, "branch", {"regime": "head"}, blocks=blocks)


def variant(name: Variant, count: int = 5) -> Method:
    """Masked memory, with cells that enter after the norm, or in some of the blocks only."""
    return Method(f"{count} cells, {name}", "variant", {"cells": count}, variant=name)


HEAD = Method("head", "memory", {"regime": "head"}, paper="head")
CLASS = Method("class", "memory", {"regime": "class"}, paper="class")
GAINS = _reader("gains", gains=True)
RANK = _reader("rank 8", rank=8)
BOTH = _reader("rank 8 + gains", rank=8, gains=True)
PATCHES = _reader("rank 8 + gains + patches", rank=8, gains=True, read_out="patches")
FULL = Method("full", "full", {"regime": "full"}, paper="full")
LORA = Method("LoRA", "lora")
COMPOSABLE = (HEAD, CLASS, cells(1), cells(5), cells(10), cells(20), GAINS, RANK, BOTH)
ONE_PASS = (*COMPOSABLE, PATCHES)  # all that one sweep over a stored trunk trains
UNMASKED = cells(5, "memory-unmasked")
# Masked memory with as many steps as unmasked memory has at the small scale, to compare the two.
SHORT = Method("5 cells, 100 steps", "short memory", {"cells": 5})
RANDOM_TOKEN = Method("5 cells, random class token", "memory", {"cells": 5, "start": "normal"})


def branches(depth: int) -> tuple[Method, ...]:
    """A sixth, a third, half and all of the blocks."""
    return tuple(branch(k) for k in dict.fromkeys(max(1, round(depth * share)) for share in (1 / 6, 1 / 3, 1 / 2, 1)))


def table_methods(depth: int) -> tuple[Method, ...]:
    """The columns of Table 2 and ours, from the smallest change to the largest."""
    return (*ONE_PASS, *branches(depth), UNMASKED, LORA, FULL)


# Table 2 of the paper: ViT-B/32 pretrained on ImageNet-21k. Memory was probably not masked there; it is not certain.
PAPER_TABLE2: Mapping[str, Mapping[str, float]] = {
    dataset: dict(zip(("full", "head", "class", "1 cell", "5 cells", "10 cells", "20 cells"), row, strict=True))
    for dataset, row in {
        "sun397": (76.9, 75.9, 76.4, 77.0, 76.8, 76.9, 76.9),
        "inaturalist-2017": (54.0, 46.3, 48.7, 49.4, 50.1, 50.0, 50.0),
        "cifar100": (91.8, 85.8, 88.6, 90.9, 91.0, 91.1, 90.9),
        "places365": (55.9, 50.9, 52.4, 53.3, 53.8, 53.9, 54.1),
    }.items()
}
