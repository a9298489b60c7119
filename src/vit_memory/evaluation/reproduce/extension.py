"""Extension: a task that reads the class tokens and cells of earlier tasks, against the same task without parents.

    vit-memory reproduce extension --data DATASETS --backbone BACKBONE

Needs datasets with a column `coarse_label` beside `label` (superclasses of CIFAR-100; indoor and outdoor of Places).
A chain: coarse labels, then fine labels that extend them. A diamond over the first two such datasets: the coarse task
of the first, on it the fine task of the first and the coarse task of the second, and on both the fine task of the
second. A coarse task has the images of the fine one, so that what an extended task gains comes from the parent's labels
and not from more images. To expect: small gains where the coarse labels say something about the fine ones, none to
speak of where the original tokens already hold it. The paper reports no figures that are known to us.
"""

from vit_memory.evaluation.reproduce.experiment import Experiment, Plan
from vit_memory.evaluation.reproduce.methods import BOTH, Method, cells
from vit_memory.evaluation.reproduce.runner import FINE, Training

COARSE = "coarse_label"


def chain(dataset: str, method: Method, seed: int, per_class: int | None) -> tuple[Training, Training, Training]:
    """The coarse task, the fine task that extends it, and the fine task without parents."""
    coarse = Training(dataset, method, seed, per_class, COARSE)
    return (
        coarse,
        Training(dataset, method, seed, per_class, FINE, (coarse,)),
        Training(dataset, method, seed, per_class),
    )


def diamond(first: str, second: str, method: Method, seed: int, per_class: int | None) -> Training:
    """The last of four tasks over two datasets; the others are its ancestors."""
    top = Training(first, method, seed, per_class, COARSE)
    left = Training(first, method, seed, per_class, FINE, (top,))
    right = Training(second, method, seed, per_class, COARSE, (top,))
    return Training(second, method, seed, per_class, FINE, (left, right))


def trainings(plan: Plan) -> list[Training]:
    """Chains on every dataset with coarse labels, and a diamond over the first two."""
    wanted: list[Training] = []
    for seed in plan.scale.seeds:
        for method in (cells(5), BOTH):
            for dataset in plan.coarse:
                wanted += chain(dataset, method, seed, plan.scale.per_class)
            if len(plan.coarse) > 1:
                wanted.append(diamond(plan.coarse[0], plan.coarse[1], method, seed, plan.scale.per_class))
    return wanted


EXTENSION = Experiment("extension", "Does a task gain from building on another?", trainings)
