"""Facts of every regime, one row each: what a task of it consists of, and whether it can be attached beside others."""

from collections.abc import Mapping
from dataclasses import dataclass

from vit_memory.choices import Regime


@dataclass(frozen=True, slots=True)
class RegimeFacts:
    """What a task of one regime consists of beside its head."""

    class_token: bool = True
    cells: bool = True
    default_cells: int = 5
    reader: bool = False  # gains, low-rank updates and read-outs of its own
    own_backbone: bool = False  # its file comes with a trained backbone
    conflict: str | None = None  # why it cannot be attached beside other tasks; None if it can


_CELLS_PASSED_ON = (
    "its cells are updated in every block and read by the original tokens, which changes all other outputs"
)
REGIMES: Mapping[Regime, RegimeFacts] = {
    "head": RegimeFacts(class_token=False, cells=False, default_cells=0),
    "class": RegimeFacts(cells=False, default_cells=0),
    "memory": RegimeFacts(),
    "reader": RegimeFacts(default_cells=0, reader=True),
    "memory-unmasked": RegimeFacts(
        conflict="its original tokens read its memory, so it changes the original output and every other task"
    ),
    "propagated": RegimeFacts(conflict=_CELLS_PASSED_ON),
    "additive": RegimeFacts(conflict=_CELLS_PASSED_ON),
    "full": RegimeFacts(
        class_token=False,
        cells=False,
        default_cells=0,
        own_backbone=True,
        conflict="it has its own weights instead of the backbone's",
    ),
}
COMPOSABLE: frozenset[Regime] = frozenset(regime for regime, facts in REGIMES.items() if facts.conflict is None)
