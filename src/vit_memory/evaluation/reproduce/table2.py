"""Table 2 of the paper: every method on every dataset, with our learned readers, branches and LoRA beside it.

    vit-memory reproduce table2 --data DATASETS --backbone BACKBONE        # small: 20 images per class, about 2 hours
    vit-memory reproduce table2 --scale paper --data DATASETS --dry-run    # what the paper's recipe would cost here

To expect at the small scale: head < class < memory < learned readers < branches on the mean over datasets; a single
dataset with a few hundred test images moves by 2 to 6 points between seeds. LoRA and full fine-tuning change the
backbone, so each of their tasks costs a pass.
"""

import time
from dataclasses import asdict

from vit_memory.evaluation.reproduce.cost import time_backbone
from vit_memory.evaluation.reproduce.experiment import Experiment, Plan
from vit_memory.evaluation.reproduce.methods import SHORT, Method, cells, table_methods
from vit_memory.evaluation.reproduce.runner import Runner, Training


def trainings(plan: Plan) -> list[Training]:
    """All columns; at the paper's scale unmasked memory of every size, else masked memory with as many steps as it."""
    more: tuple[Method, ...] = ()
    if plan.scale.name == "paper":
        more = tuple(cells(count, "memory-unmasked") for count in (1, 10, 20))
    elif plan.scale.recipes[SHORT.group].steps < plan.scale.recipes["memory"].steps:
        more = (SHORT,)
    return plan.trainings((*table_methods(plan.depth), *more))


def measure(runner: Runner, plan: Plan) -> None:
    """Seconds per image of every method on this machine: what the trainings' own times cannot tell, sharing a pass."""
    identity = {"kind": "timing", "backbone": runner.backbone_name}
    settings = {"preprocessing": str(runner.preprocessing)}
    if runner.records.find(identity, settings) is None:
        start = time.perf_counter()
        methods = dict.fromkeys(training.method for training in trainings(plan))
        seconds = time_backbone(runner.backbone, runner.options.image_size, methods)
        runner.record(identity, settings, asdict(seconds), time.perf_counter() - start)


TABLE2 = Experiment("table2", "How accurate is each way of fine-tuning?", trainings, measure)
