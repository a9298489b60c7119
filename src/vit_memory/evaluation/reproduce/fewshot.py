"""1, 2, 5, 10 and 20 training images per class: which method needs how many?

    vit-memory reproduce fewshot --data DATASETS --backbone BACKBONE

Learning rates are those that were chosen with all images, and the evaluation that is kept is chosen on the same
validation images for every size, so the figures for one image per class are those of somebody who knows the recipe.
To expect: with one or two images per class all methods are close; the order of table2 from five on.
"""

from vit_memory.evaluation.reproduce.experiment import Experiment, Plan
from vit_memory.evaluation.reproduce.methods import BOTH, CLASS, FULL, GAINS, HEAD, LORA, UNMASKED, branches, cells
from vit_memory.evaluation.reproduce.runner import Training

SIZES = (1, 2, 5, 10, 20)


def trainings(plan: Plan) -> list[Training]:
    """Methods with a pass of their own have one seed: a step of theirs costs tenfold."""
    one_pass = (HEAD, CLASS, cells(5), GAINS, BOTH)
    own_pass = (branches(plan.depth)[1], UNMASKED, LORA, FULL)
    first = plan.scale.seeds[0]
    chosen: list[Training] = []
    for size in (size for size in SIZES if size <= (plan.scale.per_class or size)):
        chosen += plan.trainings(one_pass, per_class=size)
        chosen += [one for one in plan.trainings(own_pass, per_class=size) if one.seed == first]
    return chosen


FEWSHOT = Experiment("fewshot", "How many images does each method need?", trainings)
