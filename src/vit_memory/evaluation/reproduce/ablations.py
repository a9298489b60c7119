"""Ablations of memory: masked or not, where it enters, where it goes, how much of it, and how the class token starts.

    vit-memory reproduce ablations --data DATASETS --backbone BACKBONE

Unmasked memory as the paper describes it (discarded after every block), handed on from block to block (`propagated`),
or handed on with additions (`additive`); masked memory before and after the norm, in all blocks or one half of them,
with 0 to 50 cells, and with a random class token. The paper reports propagated and additive
below discarded; with the hundred steps of the small scale we found them above. To expect besides: about five cells are
enough; cells after the norm learn slowly at the same spread.
"""

from vit_memory.evaluation.reproduce.experiment import Experiment, Plan
from vit_memory.evaluation.reproduce.methods import CLASS, RANDOM_TOKEN, Method, cells, variant
from vit_memory.evaluation.reproduce.runner import Training

CELLS = (1, 2, 5, 10, 20, 50)
MASKED: tuple[Method, ...] = (CLASS, *(cells(count) for count in CELLS), RANDOM_TOKEN)
VARIANTS: tuple[Method, ...] = (
    variant("after the norm"),
    variant("first half of the blocks"),
    variant("second half of the blocks"),
)
UNMASKED: tuple[Method, ...] = tuple(cells(5, regime) for regime in ("memory-unmasked", "propagated", "additive"))


def trainings(plan: Plan) -> list[Training]:
    """Masked memory with every seed; the others, with a pass of their own, with the first one only."""
    first = plan.scale.seeds[0]
    own_pass = [one for one in plan.trainings(UNMASKED) if one.seed == first]
    return plan.trainings((*MASKED, *VARIANTS)) + own_pass


ABLATIONS = Experiment("ablations", "Which part of the method does what?", trainings)
