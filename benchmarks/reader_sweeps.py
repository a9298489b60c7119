"""What `benchmarks.readers` trains: methods in groups, each of which is one sweep over a stored trunk."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vit_memory.choices import Optimiser

READER: dict[str, Any] = {"regime": "reader"}
BOTH: dict[str, Any] = {**READER, "rank": 8, "gains": True}
PATCHES: dict[str, Any] = {**BOTH, "read_out": "patches"}
_ADAM_RATES = (1e-3, 3e-3, 1e-2)


@dataclass(frozen=True)
class Sweep:
    """Methods that are trained at once, with three learning rates each."""

    methods: Mapping[str, Mapping[str, Any]]  # arguments of new_task; `blocks`: those that have low-rank updates
    steps: int = 200
    optimiser: Optimiser = "adamw"
    rates: tuple[float, ...] = _ADAM_RATES
    recipe: Mapping[str, Any] = field(default_factory=dict)  # other fields of the recipe
    seeds: int = 3


SWEEPS: Mapping[str, Sweep] = {
    "readers": Sweep(
        {
            "head": {"regime": "head"},
            "class": {"regime": "class"},
            "5 cells": {"cells": 5},
            "20 cells": {"cells": 20},
            "gains": {**READER, "gains": True},
            "rank 8": {**READER, "rank": 8},
            "rank 8 + gains": BOTH,
            "rank 8 + gains + patches": PATCHES,
            "rank 8 + gains + blocks:4": {**BOTH, "read_out": "blocks:4"},
            "rank 8 + gains + blocks:4+patches": {**BOTH, "read_out": "blocks:4+patches"},
        },
    ),
    # Memory as it was trained before there were readers, until it no longer improves.
    "memory": Sweep({"5 cells, SGD": {"cells": 5}, "20 cells, SGD": {"cells": 20}}, 400, "sgd", (0.03, 0.1, 0.3)),
    # Readers with as many steps as that.
    "long": Sweep(
        {
            "rank 8 + gains, 400 steps": BOTH,
            "rank 8 + gains + patches, 400 steps": PATCHES,
            "rank 8 + gains + blocks:4, 400 steps": {**BOTH, "read_out": "blocks:4"},
        },
        400,
    ),
    "larger": Sweep({f"rank {rank} + gains": {**BOTH, "rank": rank} for rank in (16, 32)}),
    # What else a reader could be, with one seed each.
    "shapes": Sweep(
        {
            **{f"rank {rank} + gains": {**BOTH, "rank": rank} for rank in (2, 4)},
            "rank 8 on q+v+o + gains": {**BOTH, "projections": ("q", "v", "o")},
            "rank 8 on all + gains": {**BOTH, "projections": ("q", "k", "v", "o", "fc1", "fc2")},
            "rank 8, first half of the blocks": {**READER, "rank": 8, "blocks": range(6)},
            "rank 8, second half of the blocks": {**READER, "rank": 8, "blocks": range(6, 12)},
            "rank 8, last third of the blocks": {**READER, "rank": 8, "blocks": range(8, 12)},
        },
        seeds=1,
    ),
    "smoothing": Sweep({"rank 8 + gains, label smoothing 0.1": BOTH}, recipe={"label_smoothing": 0.1}, seeds=1),
    "mild crops": Sweep({"rank 8 + gains, crops of 70 to 100 %": BOTH}, recipe={"area": (0.7, 1.0)}, seeds=1),
    "strong crops": Sweep({"rank 8 + gains, crops of 8 to 100 %": BOTH}, recipe={"area": (0.08, 1.0)}, seeds=1),
    "no crops": Sweep({"rank 8 + gains, no augmentation": BOTH}, recipe={"augment": "none"}, seeds=1),
}
