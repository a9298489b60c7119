"""The same comparison on several backbones: does the order of the methods depend on the architecture?

    vit-memory reproduce architectures --data DATASETS --backbones bundled,google/vit-base-patch16-224-in21k

The paper's were ViT-B/32, B/16 and L/32 (`--scale paper`); their figures are not known to us. To expect: the order of
table2 on every backbone; smaller differences where the head alone is already good.
"""

from vit_memory.evaluation.reproduce.experiment import Experiment, Plan
from vit_memory.evaluation.reproduce.methods import BOTH, CLASS, GAINS, HEAD, cells
from vit_memory.evaluation.reproduce.runner import Training


def trainings(plan: Plan) -> list[Training]:
    """The methods that share one pass, so that a further backbone costs little."""
    return plan.trainings((HEAD, CLASS, cells(1), cells(5), GAINS, BOTH))


ARCHITECTURES = Experiment("architectures", "Does it depend on the architecture?", trainings)
