"""StandaloneModel: one task that changes the backbone's own output and therefore answers without others beside it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vit_memory.backbone import Backbone
from vit_memory.errors import UnknownTask
from vit_memory.model import Outputs, check_trained_on
from vit_memory.reference import dense_forward
from vit_memory.task import Task
from vit_memory.trunk import run_trunk


class StandaloneModel(nn.Module):
    """A backbone and one task of a regime that does not compose, called like a MemoryViT.

    The backbone must be the one that the task was trained on; for the regime `full`, the one trained with it.
    """

    def __init__(self, backbone: Backbone, task: Task) -> None:
        super().__init__()
        check_trained_on(task, backbone)
        self.backbone, self.task = backbone, task
        self.tasks: Mapping[str, Task] = _OneTask({task.name: task})

    @torch.no_grad()
    def forward(self, images: Tensor, tasks: Sequence[str] | None = None) -> Outputs:
        """The task's output (B, C). `original` is the backbone's output as the task changed it."""
        for name in tasks or ():
            self.tasks[name]  # raises UnknownTask
        if self.task.regime != "full":
            return dense_forward(self.backbone, [self.task], images)
        original = run_trunk(self.backbone.roles, self.backbone.check_images(images), keep=False).original
        return Outputs(original, {self.task.name: self.task.answer(original.feature)})


class _OneTask(dict[str, Task]):
    def __missing__(self, name: str) -> Task:
        raise UnknownTask(f"no task {name!r}. Attached: {', '.join(self)}.")
