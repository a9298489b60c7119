"""Table 2 of the paper: every method on every dataset, with our learned readers, branches and LoRA beside it.

    vit-memory reproduce table2 --data DATASETS --backbone BACKBONE        # small: 20 images per class, about 2 hours
    vit-memory reproduce table2 --scale paper --data DATASETS --dry-run    # what the paper's recipe would cost here

To expect at the small scale: head < class < memory < learned readers < branches on the mean over datasets; a single
dataset with a few hundred test images moves by 2 to 6 points between seeds. LoRA and full fine-tuning change the
backbone, so each of their tasks costs a pass.
"""

from vit_memory.evaluation.reproduce.experiment import Experiment, Plan
from vit_memory.evaluation.reproduce.methods import UNMASKED, cells, table_methods
from vit_memory.evaluation.reproduce.runner import Training


def trainings(plan: Plan) -> list[Training]:
    """All columns; at the paper's scale also unmasked memory of every size."""
    methods = table_methods(plan.depth)
    if plan.scale.name == "paper":
        methods += tuple(cells(count, "memory-unmasked") for count in (1, 10, 20))
    assert UNMASKED in methods
    return plan.trainings(methods)


TABLE2 = Experiment("table2", "How accurate is each way of fine-tuning?", trainings)
